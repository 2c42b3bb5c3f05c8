# SPDX-License-Identifier: Apache-2.0
"""Start weights: every hospital's networks begin with a declared checkpoint; a new head where the classes differ;
frozen layers that neither train nor travel."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from baselines import begin
from medpfl import store
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError, DataError, MedPFLError, SiteFileError
from medpfl.core.frozen import frozen_entries
from medpfl.core.mixers import Identity, Mean, Mixer
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job, load_job
from medpfl.methods.apfl import APFL
from medpfl.methods.contract import Method
from medpfl.methods.ditto import Ditto
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedbn import FedBN
from medpfl.methods.fedper import FedPer
from medpfl.methods.fedrep import FedRep
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.fedsm import FedSM, FedSMPersonalised
from medpfl.methods.ifca import IFCA
from medpfl.methods.l2gd import L2GD
from medpfl.methods.local import Local
from medpfl.methods.moon import Moon
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.methods.pfedme import PFedMe
from medpfl.methods.scaffold import Scaffold
from medpfl.methods.softpull import SoftPull
from medpfl.methods.start import Start, Started
from medpfl.models.dynunet import DynUNet
from medpfl.models.tabnet import TabNet
from medpfl.models.unet import UNet
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.pretrain import pretrain
from medpfl.rounds.simulate import simulate
from small_jobs import small_job
from tools import assert_same, exchange, normed, outcome, pieces, round_of, run, write_job

SETTINGS: dict[str, Any] = {"lr": 0.05, "batch_size": 8}


def weights(seed: int = 5) -> dict[str, Tensor]:
    """Of the tables' network: Linear "0", BatchNorm "1", ReLU, Linear "3"."""
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    network(torch.randn(20, 3))  # so that its statistics are not those of a new layer
    return dict(network.state_dict())


def declare(sites: dict[str, Path], tensors: dict[str, Tensor], kind: str = "checkpoint") -> None:
    for site, file in sites.items():
        content = {**yaml.safe_load(file.read_text()), "checkpoints": {"known": f"{site}.safetensors"}}
        file.write_text(yaml.safe_dump(content))
        store.save(file.with_name(f"{site}.safetensors"), tensors, {"kind": kind})


def job(method: Method, **settings: Any) -> Job:
    slots = {"mixed": Mean()} if isinstance(method, L2GD) else method.components()
    mixers: dict[str, Mixer] = {"local": Identity(), "fedavg": Mean()} if not isinstance(method, FedAvg) else {}
    return small_job(mixers={**mixers, **slots}, method=method, task=normed(), **settings)  # type: ignore[dict-item]


def own(runner: SiteRunner, name: str) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in runner.models[name].state_dict().items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [SoftPull, FedBN, Ditto, APFL, Local, Scaffold, Moon, FedSM])
def test_every_network_of_the_task_starts_with_it(
    kind: type[Method], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    tensors = weights()
    declare(table_sites, tensors)
    method = kind(start=Start("known"), **SETTINGS)
    _, runners = begin(job(method), table_sites, tmp_path)
    runner = runners["berta"]
    alike = 0
    for name, network in runner.models.items():
        state = network.state_dict()
        if state.keys() == tensors.keys():  # not a control variate, a gate, a selector
            alike += 1
            assert all(torch.equal(state[key], tensors[key]) for key in state), name
    assert alike >= 3 - isinstance(method, Local)  # the references beside it, too


def test_hospitals_with_other_tensors_take_no_part(table_sites: dict[str, Path], tmp_path: Path) -> None:
    declare(table_sites, weights())
    store.save(table_sites["clara"].with_name("clara.safetensors"), weights(6), {"kind": "checkpoint"})
    coordinator, _ = begin(job(FedAvg(start=Start("known"), **SETTINGS)), table_sites, tmp_path)
    assert coordinator.joined == ["anna", "berta", "dora"]
    (event,) = [event.event for event in coordinator.record.events if event.site == "clara"]
    assert "clara has checkpoint 'known' of SHA-256" in event


@pytest.mark.slow
def test_a_jobs_model_and_a_resumed_run(table_sites: dict[str, Path], tmp_path: Path) -> None:
    run(job(FedAvg(**SETTINGS), rounds=2), table_sites, tmp_path / "first")
    model = tmp_path / "first" / "home" / "anna" / "small" / "models" / "fedavg-last.safetensors"
    for file in table_sites.values():
        content = {**yaml.safe_load(file.read_text()), "checkpoints": {"known": str(model)}}
        file.write_text(yaml.safe_dump(content))
    second = job(SoftPull(start=Start("known", frozen=("0", "1")), **SETTINGS), rounds=3)
    _, runners = begin(second, table_sites, tmp_path / "second")
    before = load_deployed(model).networks["fedavg"].state_dict()
    assert all(torch.equal(value, before[key]) for key, value in own(runners["dora"], "model").items())
    whole = run(second, table_sites, tmp_path / "whole")
    simulate(second, table_sites, tmp_path / "a", tmp_path / "home", stop_after=1)
    simulate(second, table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))


FREEZABLE: list[Method] = [
    kind(start=Start("known", frozen=("0", "1")), **SETTINGS)
    for kind in (FedAvg, SoftPull, Ditto, APFL, Local, Scaffold, Moon, L2GD, PerFedAvg, PFedMe)
]


@pytest.mark.parametrize(
    "method",
    [pytest.param(one, marks=[] if isinstance(one, SoftPull | Scaffold) else pytest.mark.slow) for one in FREEZABLE],
    ids=lambda method: type(method).__name__,
)
def test_frozen_layers_neither_train_nor_travel(method: Method, table_sites: dict[str, Path], tmp_path: Path) -> None:
    tensors = weights()
    declare(table_sites, tensors)
    coordinator, runners = pieces(job(method), table_sites, tmp_path)
    replies = exchange(runners, coordinator.init_messages())
    sent = {key for slot in replies["anna"].slots.values() for key in slot}
    assert sent or isinstance(method, Local)
    assert not any(key.split(".")[1:2] in (["0"], ["1"]) and not key.startswith("control") for key in sent)
    coordinator, runners = begin(job(method), table_sites, tmp_path / "run")
    round_of(coordinator, runners, 1)
    for runner in runners.values():
        networks = [own(runner, name) for name in runner.models if own(runner, name).keys() == tensors.keys()]
        for state in networks:
            assert all(torch.equal(value, tensors[key]) for key, value in state.items() if key[0] in "01")
        assert any(not torch.equal(state["3.weight"], tensors["3.weight"]) for state in networks)


@pytest.mark.parametrize(
    ("kind", "words"), [(FedRep, "FedRep trains the head by itself"), (FedRoD, "FedRoD trains a head beside")]
)
def test_a_head_that_is_trained_by_itself_cannot_be_frozen(
    kind: type[Method], words: str, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    declare(table_sites, weights())
    with pytest.raises(ConfigError, match=f"{words}.*frozen"):
        begin(job(kind(start=Start("known", frozen=("3",)), **SETTINGS)), table_sites, tmp_path)


def test_a_slot_that_is_frozen_as_a_whole_is_refused(table_sites: dict[str, Path], tmp_path: Path) -> None:
    """It was said to be empty, as no tensor had been selected for it."""
    declare(table_sites, weights())
    frozen = FedPer(start=Start("known", frozen=("0", "1")), **SETTINGS)
    with pytest.raises(ConfigError, match=r"^start's frozen leaves nothing of FedPer's slot 'model' to travel"):
        begin(job(frozen), table_sites, tmp_path)


def test_models_that_must_begin_differently_take_no_start() -> None:
    with pytest.raises(ConfigError, match="IFCA takes no start weights: its models must begin differently"):
        IFCA(start=Start("known"), **SETTINGS)


@pytest.mark.slow
def test_the_models_of_frozen_networks_are_whole(table_sites: dict[str, Path], tmp_path: Path) -> None:
    tensors = weights()
    declare(table_sites, tensors)
    run(job(FedAvg(start=Start("known", frozen=("0",)), **SETTINGS), rounds=1), table_sites, tmp_path)
    (model,) = (tmp_path / "home" / "berta" / "small" / "models").glob("fedavg-last.safetensors")
    state = load_deployed(model).networks["fedavg"].state_dict()
    assert state.keys() == tensors.keys() and torch.equal(state["0.weight"], tensors["0.weight"])
    assert not torch.equal(state["3.weight"], tensors["3.weight"])


def started(network: nn.Module, tensors: dict[str, Tensor], **how: Any) -> nn.Module:
    return Started(Start("known", **how), tensors).put_into(network)


def states(architecture: UNet | DynUNet, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return architecture.build((1, 16, 16), outputs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture",
    [UNet((2, 4)), UNet((2, 4), residual_units=1), DynUNet((2, 2, 2, 2), deep_supervision=True)],
    ids=str,
)
def test_a_new_head_where_the_classes_differ(architecture: UNet | DynUNet) -> None:
    theirs, ours = states(architecture, 5, 1).state_dict(), states(architecture, 3, 2)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(
        ConfigError, match=r"has another number of classes: '.*\(\[.*3.*\] here, \[.*5.*\] there\).*head 'new'"
    ):
        started(copy.deepcopy(ours), dict(theirs))
    after = started(ours, dict(theirs), head="new").state_dict()
    for key, value in after.items():
        same = value.shape == theirs[key].shape
        assert torch.equal(value, theirs[key] if same else before[key]), key
    assert any(value.shape != theirs[key].shape for key, value in after.items())


@pytest.mark.parametrize(
    ("change", "how", "words"),
    [
        (lambda t: t.pop("1.bias"), {}, "is of another network than the job's Sequential: it lacks '1.bias'"),
        (lambda t: t.update(more=torch.zeros(1)), {}, "it has 'more', which the network has not"),
(
            lambda t: t.update({"0.weight": torch.zeros(4, 7)}),
            {"head": "new"},
            r"does not fit .*'0.weight' \(.4, 3. here, .4, 7.",
        ),
        (lambda t: t.update({"0.bias": torch.full((4,), torch.nan)}), {}, "'0.bias' is not of finite numbers"),
        (lambda t: t.update({"0.bias": torch.zeros(4, dtype=torch.int64)}), {}, "or of another type: torch.int64"),
        (lambda t: None, {"frozen": ["4"]}, "has no module '4'; its children are: 0, 1, 2, 3"),
        (lambda t: None, {"frozen": [""]}, "has no module ''"),
        (lambda t: None, {"frozen": ["2"]}, "module '2' of Sequential holds no weights"),
        (lambda t: None, {"frozen": ["0", "1", "3"]}, "leaves nothing of Sequential to train"),
        (
            lambda t: t.update({"3.weight": torch.zeros(2, 4), "3.bias": torch.zeros(2)}),
            {"head": "new", "frozen": ["3"]},
            "'3' holds '3.bias', '3.weight', which starts with random weights",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit(change: Callable[[dict[str, Tensor]], Any], how: dict[str, Any], words: str) -> None:
    tensors = weights()
    change(tensors)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(ConfigError, match=words):
        started(network, tensors, **how)


def test_frozen_batch_norm_stands_still() -> None:
    network = started(
        nn.Sequential(*[nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1)]), weights(), frozen=("1",)
    )
    mean = network.state_dict()["1.running_mean"].clone()
    for again in (network, copy.deepcopy(network)):
        again.train()(torch.randn(8, 3) + 5)
        assert torch.equal(again.state_dict()["1.running_mean"], mean)
        assert frozen_entries(nn.ModuleDict({"model": again})) == {f"model.1.{key}" for key in again[1].state_dict()}  # type: ignore[index]


def test_tensors_that_layers_share() -> None:
    """TabNet's first layers belong to several transformers."""
    network = TabNet(width=2).build((3,), 2)
    tensors = dict(TabNet(width=2).build((3,), 2).state_dict())
    assert all(torch.equal(value, tensors[key]) for key, value in started(network, tensors).state_dict().items())
    with pytest.raises(
        ConfigError, match=r"'transformers.0.layers.0.linear.weight' and 'transformers.1.* are one tensor"
    ):
        started(network, tensors, frozen=("transformers.0",))


def test_a_model_of_several_networks(table_sites: dict[str, Path]) -> None:
    declare(table_sites, {"global.w": torch.zeros(1), "personal.w": torch.zeros(1)}, kind="model")
    with pytest.raises(SiteFileError, match="expected a model of one network, this one has: global, personal"):
        load_site_file(table_sites["anna"], "anna").checkpoint("known")


def test_weights_that_are_not_numbers_are_no_start(table_sites: dict[str, Path]) -> None:
    broken = weights(5)
    name = next(iter(broken))
    broken[name] = broken[name].clone().fill_(float("nan"))
    declare(table_sites, broken)
    with pytest.raises(SiteFileError, match=f"checkpoint 'known': its entry '{name}' holds values that are not num"):
        load_site_file(table_sites["anna"], "anna").checkpoint("known")


def test_in_a_job(tmp_path: Path) -> None:
    method = FedAvg(start=Start("known", "new", ("0",)))
    folder = write_job(job(method), tmp_path / "job")
    loaded = load_job(folder)
    assert isinstance(loaded, Job) and loaded.method == method
    with pytest.raises(ConfigError, match="FedSM takes no frozen layers: its model of all hospitals' models"):
        FedSM(start=Start("known", frozen=("0",)))
    spec: Any = spec_of(method)
    spec["args"]["start"]["args"]["head"] = "nwe"
    with pytest.raises(ConfigError, match="must be 'kept' or 'new', got 'nwe'; did you mean 'new'"):
        build(spec, Method, "method")


def test_a_personaliser_takes_it_from_fedsm() -> None:
    whole = FedSMPersonalised(start=Start("known"))
    assert whole.personaliser.start == whole.start and whole.declared_checkpoints() == ["known"]


def test_pretraining_begins_with_it(table_sites: dict[str, Path]) -> None:
    """A rate that moves no weight leaves the checkpoint's; what is frozen is in the new checkpoint as it was."""
    declare(table_sites, weights())
    still, _ = pretrain(job(FedAvg(start=Start("known"), lr=1e-30, batch_size=8)), table_sites, 1.0, 1)
    trained = {"0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"}  # not BatchNorm's statistics
    assert still.keys() == weights().keys()
    assert all(torch.allclose(still[key], weights()[key], rtol=0, atol=1e-20) for key in trained)
    part, _ = pretrain(job(FedAvg(start=Start("known", frozen=("0", "1")), **SETTINGS)), table_sites, 1.0, 1)
    assert part.keys() == weights().keys()
    for key, tensor in part.items():
        assert torch.equal(tensor, weights()[key]) == (key[0] in "01"), key


def test_pretraining_that_diverges_gives_no_checkpoint(table_sites: dict[str, Path]) -> None:
    with pytest.raises(MedPFLError, match="training diverged: weights are not numbers"):
        pretrain(job(FedAvg(lr=1e30, optimizer="sgd", batch_size=8)), table_sites, 1.0, 3)


def test_pretraining_refuses_what_is_not_the_same_everywhere(table_sites: dict[str, Path]) -> None:
    given = job(FedAvg(start=Start("known"), **SETTINGS))
    with pytest.raises(SiteFileError, match="which this hospital does not declare"):
        pretrain(given, table_sites, 1.0, 1)
    declare(table_sites, weights())
    store.save(table_sites["clara"].with_name("clara.safetensors"), weights(6), {"kind": "checkpoint"})
    with pytest.raises(DataError, match="checkpoint 'known' of clara holds other tensors than that of anna"):
        pretrain(given, table_sites, 1.0, 1)


def in_another_order(file: Path) -> None:
    """The same three columns of numbers, the first two of them exchanged."""
    content = yaml.safe_load(file.read_text())
    content["datasets"]["blood"]["features"] = {"b": "number", "a": "number", "c": "number"}
    file.write_text(yaml.safe_dump(content, sort_keys=False))


def test_pretraining_pools_no_tables_whose_features_differ(table_sites: dict[str, Path]) -> None:
    in_another_order(table_sites["clara"])
    with pytest.raises(DataError, match="clara's input 1 is 'b: number', anna's 'a: number': the same features stand"):
        pretrain(job(FedAvg(**SETTINGS)), table_sites, 1.0, 1)


@pytest.mark.slow
def test_a_model_of_other_inputs_or_classes_is_no_start(table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Its weights would fit by their shapes alone, as they do where the features have only changed places."""
    simulate(job(FedAvg(**SETTINGS), rounds=1), table_sites, tmp_path / "results", tmp_path / "home")
    left = tmp_path / "home" / "anna" / "small" / "models" / "fedavg-best.safetensors"
    trained, about = pretrain(job(FedAvg(**SETTINGS)), table_sites, 1.0, 1)
    store.save(tmp_path / "pretrained.safetensors", trained, about.model_dump())
    for file in table_sites.values():
        file.write_text(file.read_text().replace("site:", "checkpoints: {known: start.safetensors}\nsite:"))
    again, runners = pieces(job(FedAvg(start=Start("known"), **SETTINGS)), table_sites, tmp_path / "again")
    begun, asked = runners["anna"], again.init_messages()["anna"]
    start, said = table_sites["anna"].with_name("start.safetensors"), table_sites["anna"].read_text()
    for model in (left, tmp_path / "pretrained.safetensors"):
        table_sites["anna"].write_text(said)
        start.write_bytes(model.read_bytes())
        begun.handle(asked)
        in_another_order(table_sites["anna"])
        words = "checkpoint 'known' does not fit the data: the site file's input 1 is 'b: number', the model's 'a: numb"
        with pytest.raises(DataError, match=words):
            begun.handle(asked)
        table_sites["anna"].write_text(said.replace("'no'", "'x'").replace("'yes'", "'no'").replace("'x'", "'yes'"))
        with pytest.raises(DataError, match="it was trained for the classes no, yes; the site file has yes, no"):
            begun.handle(asked)
