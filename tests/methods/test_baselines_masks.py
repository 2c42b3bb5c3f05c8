# SPDX-License-Identifier: Apache-2.0
"""FedBN, FedPer, FedRep and LG-FedAvg: what travels is mixed as in FedAvg, what stays is trained as locally, and the
private part is never on the wire."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.groups import base_and_head
from medpfl.core.mixers import Identity, Mean, Mixer
from medpfl.methods.contract import Method, Site
from medpfl.methods.fedbn import FedBN
from medpfl.methods.fedper import FedPer
from medpfl.methods.fedrep import FedRep
from medpfl.methods.lg_fedavg import LGFedAvg
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Message
from tools import Make, exchange, normed, pieces, ready

HEAD = {"model.3.weight", "model.3.bias"}
NORM = {f"model.1.{entry}" for entry in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
FIRST = {"model.0.weight", "model.0.bias"}
STAYS: dict[type[Method], set[str]] = {FedBN: NORM, FedPer: HEAD, FedRep: HEAD, LGFedAvg: FIRST | NORM}
ALL = FIRST | NORM | HEAD


def settings(**more: Any) -> dict[str, Any]:
    return {"lr": 0.05, "batch_size": 8, **more}


def mixers() -> dict[str, Mixer]:
    return {"local": Identity(), "fedavg": Mean(), "model": Mean()}


def first_round(make_job: Make, sites: dict[str, Path], folder: Path, method: Method) -> tuple[Any, ...]:
    """Round 1 of a method with both references beside it; returns coordinator, hospitals and every message."""
    job = make_job(mixers=mixers(), method=method, task=normed())
    coordinator, runners = pieces(job, sites, folder)
    messages = [exchange(runners, coordinator.init_messages())]
    coordinator.take_init(messages[0])
    messages.append(exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined)))
    trained = {site: copy.deepcopy(runner.models.state_dict()) for site, runner in runners.items()}
    coordinator.rounds.take_train(1, messages[1])
    messages.append(coordinator.rounds.train_messages(2, coordinator.joined))
    return coordinator, runners, messages, trained


def as_reference(key: str, reference: str) -> str:
    return key.replace("model.", f"{reference}.", 1)


@pytest.mark.parametrize("kind", STAYS, ids=lambda kind: kind.__name__)
def test_the_private_part_is_never_on_the_wire(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: type[Method]
) -> None:
    _, runners, messages, _ = first_round(make_job, table_sites, tmp_path, kind(**settings()))
    answers: list[Message] = [message for batch in messages for message in batch.values()]
    assert len(answers) == 12
    for message in answers:
        assert set(message.slots["model"]) == ALL - STAYS[kind]
    kept = {key for key in runners["anna"].models.state_dict() if key.startswith("model.")}
    assert kept == ALL


@pytest.mark.parametrize("kind", [FedBN, FedPer, LGFedAvg], ids=lambda kind: kind.__name__)
@pytest.mark.slow
def test_round_one_is_fedavg_where_it_travels_and_local_where_it_stays(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: type[Method]
) -> None:
    _, runners, messages, trained = first_round(make_job, table_sites, tmp_path, kind(**settings()))
    for site, message in messages[2].items():
        for key, tensor in message.slots["model"].items():
            assert torch.equal(tensor, message.slots["fedavg"][as_reference(key, "fedavg")]), key
        exchange(runners, {site: message})  # loads what came back, and trains round 2
        for key in STAYS[kind]:
            assert torch.equal(trained[site][key], trained[site][as_reference(key, "local")]), key


@pytest.mark.parametrize("kind", STAYS, ids=lambda kind: kind.__name__)
@pytest.mark.slow
def test_round_two_starts_from_the_shared_part_and_the_own_part(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: type[Method]
) -> None:
    """Running statistics included: what travels is loaded with its buffers, what stays keeps its own."""
    coordinator, runners, _, trained = first_round(make_job, table_sites, tmp_path, kind(**settings()))
    coordinator.done = 1
    exchange(runners, coordinator.end.validate_messages(coordinator.joined))
    states = {site: runner.models.state_dict() for site, runner in runners.items()}
    for key in ALL:
        if key in STAYS[kind]:
            assert all(torch.equal(states[site][key], trained[site][key]) for site in states), key
            if states["anna"][key].is_floating_point():
                assert not torch.equal(states["anna"][key], states["berta"][key])
        elif states["anna"][key].is_floating_point():
            assert all(torch.equal(state[key], states["anna"][key]) for state in states.values()), key


def test_lg_fedavg_is_the_complement_of_fedper() -> None:
    models = nn.ModuleDict({"model": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))})
    base, head = FedPer().slots(models)["model"], LGFedAvg().slots(models)["model"]
    assert set(base) | set(head) == set(models.state_dict()) == ALL and not set(base) & set(head)
    assert FedRep().slots(models)["model"] == base
    assert (base, head) == base_and_head(models, "model")


@pytest.mark.parametrize("kind", [FedPer, FedRep, LGFedAvg], ids=lambda kind: kind.__name__)
def test_another_head_can_be_named(kind: Any) -> None:
    models = nn.ModuleDict({"model": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))})
    named = set(kind(head="2").slots(models)["model"])
    inside = {"model.2.weight", "model.2.bias"}
    assert named == (inside if kind is LGFedAvg else set(models.state_dict()) - inside)
    with pytest.raises(ConfigError, match=r"no module 'model\.tail'"):
        kind(head="tail").slots(models)


def test_a_head_of_several_parts() -> None:
    models = nn.ModuleDict({"model": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))})
    method = build({"path": "medpfl.methods.lg_fedavg.LGFedAvg", "args": {"head": ["2", "3"]}}, Method, "method")
    inside = {f"model.{layer}.{kind}" for layer in (2, 3) for kind in ("weight", "bias")}
    assert set(method.slots(models)["model"]) == inside
    assert set(FedPer(head=("2", "3")).slots(models)["model"]) == set(models.state_dict()) - inside
    assert build(spec_of(method), Method, "method") == method


def test_no_batch_norm_no_fedbn(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={"model": Mean()}, method=FedBN())
    coordinator, runners = pieces(job, table_sites, tmp_path)
    with pytest.raises(ConfigError, match="found no BatchNorm layer"):
        exchange(runners, coordinator.init_messages())


def fedrep_by_hand(runner: SiteRunner, start: dict[str, Tensor], method: FedRep) -> nn.Module:
    """Both phases of Algorithm 1 with plain torch: SGD on the head alone, then on the base alone."""
    net = normed().network(runner.data)
    net.load_state_dict({key.removeprefix("model."): value for key, value in start.items() if key in ALL})
    head, base = net[3], nn.ModuleList([net[0], net[1]])
    site = runner.rounds.site(method, 1)
    for part, epochs in ((head, method.head_epochs), (base, method.epochs)):
        optimizer = torch.optim.SGD(part.parameters(), lr=method.lr)
        net.eval()
        part.train()
        for batch in site.training_batches(epochs):
            net.zero_grad()
            nn.functional.binary_cross_entropy_with_logits(net(batch.inputs)[:, 0], batch.targets.float()).backward()
            optimizer.step()
    return net


@pytest.mark.slow
def test_fedrep_trains_the_head_then_the_base(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    method = FedRep(**settings(optimizer="sgd", epochs=2, head_epochs=3))
    job = make_job(mixers={"model": Mean()}, method=method, task=normed())
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    start = copy.deepcopy(runners["anna"].models.state_dict())
    exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    for runner in runners.values():
        expected = fedrep_by_hand(runner, start, method).state_dict()
        for key, value in expected.items():
            torch.testing.assert_close(runner.models.state_dict()[f"model.{key}"], value, atol=1e-6, rtol=0)
            # A bias before BatchNorm has no gradient.
            assert key == "0.bias" or not torch.equal(start[f"model.{key}"], value), key
        # The base's BatchNorm saw the batches of its own phase only.
        batches = len(list(runner.rounds.site(method, 1).training_batches(method.epochs)))
        assert runner.models.state_dict()["model.1.num_batches_tracked"] == batches
        assert all(parameter.requires_grad for parameter in runner.models.parameters())


@pytest.mark.parametrize("steps", [{"head_steps": 5, "steps": 2}, {"head_epochs": 2, "epochs": 1}])
def test_fedrep_phases_have_their_own_lengths(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, steps: dict[str, int]
) -> None:
    moved: list[tuple[bool, bool]] = []
    method = FedRep(**settings(**steps))
    job = make_job(mixers={"model": Mean()}, method=method, task=normed())
    coordinator, runners = pieces(job, {"anna": table_sites["anna"], "berta": table_sites["berta"]}, tmp_path)
    ready(coordinator, runners)
    original = Site.step

    def watched(self: Site, model: str, loss: Tensor) -> None:
        before = copy.deepcopy(self.models.state_dict())
        original(self, model, loss)
        after = self.models.state_dict()
        if self.name == "anna":
            base, head = ({k for k in keys if not torch.equal(before[k], after[k])} for keys in (FIRST, HEAD))
            moved.append((bool(base), bool(head)))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Site, "step", watched)
        exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    per_epoch = len(list(runners["anna"].rounds.site(method, 1).training_batches(1)))
    heads = steps.get("head_steps") or steps["head_epochs"] * per_epoch
    bases = steps.get("steps") or steps["epochs"] * per_epoch
    assert moved == [(False, True)] * heads + [(True, False)] * bases


@pytest.mark.parametrize("wrong", [{"head_epochs": 0}, {"head_steps": 0}])
def test_fedrep_refuses_empty_phases(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=f"FedRep's {next(iter(wrong))} must be at least 1, got 0"):
        FedRep(**wrong)  # type: ignore[arg-type]
