# SPDX-License-Identifier: Apache-2.0
"""MH-pFLID's invariants: who gets gradients in which phase, what leaves a hospital, what the messenger can change."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from baselines import assert_resumes
from comparing import compared, plan_of
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Identity, Mean, Mixer
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Batch
from medpfl.methods.divergence import class_logits
from medpfl.methods.divergence import divergence as divergence_of
from medpfl.methods.mh_pflid import MHpFLID, Watched
from medpfl.models.by_hospital import ByHospital
from medpfl.models.contract import Architecture
from medpfl.models.lenet import LeNet5
from medpfl.models.messenger import Messenger
from medpfl.models.resnet import ResNet
from medpfl.models.split import body_shape, find_body
from medpfl.models.token_attention import TokenAttention
from medpfl.models.unet import UNet
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.store import read
from medpfl.tasks import Classification, Segmentation
from medpfl.tasks.contract import Task
from pictures import TABLE, declare, write_images
from small_jobs import declared, on_its_own
from tools import exchange, pieces, ready, run

TINY = ResNet(width=4, depth=10, pool=False)
SMALLER = LeNet5()
MIXED = ByHospital(anna=TINY, default=SMALLER)
SEGMENTATION = Segmentation("skin", size=(32, 32), architecture=UNet((4, 8, 8)))


def classification(architecture: Architecture = MIXED) -> Classification:
    return Classification("skin", size=(36, 36), architecture=architecture)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    files = {}
    for name, count in (("anna", 24), ("berta", 18)):
        folder = tmp_path_factory.mktemp(name)
        write_images(folder, count=count)
        files[name] = declare(folder, TABLE)
    return files


def job(task: Task | None = None, mixers: dict[str, Mixer] | None = None, rounds: int = 2, **method: Any) -> Job:
    mixers = mixers or {"messenger": Mean()}
    given = {"epochs": 2, "lr": 1e-3, "distill_lr": 1e-3, "batch_size": 6, **method}
    made = MHpFLID(**given)
    references, components = declared(mixers, made)
    settings = Settings(rounds=rounds, references=references, finetune=0)
    return Job("small", 1, settings, components, made, task or classification())


def begun(job: Job, sites: dict[str, Path], folder: Path) -> tuple[Any, dict[str, SiteRunner]]:
    coordinator, runners = pieces(job, sites, folder)
    ready(coordinator, runners)
    return coordinator, runners


# -- the parts --------------------------------------------------------------------------------------------------------


def weights(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def macs(network: nn.Module, inputs: Tensor) -> float:
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        network.eval()(inputs)
    return counter.get_total_flops() / 2


@pytest.mark.slow
def test_the_messenger_has_the_papers_size() -> None:
    """Table 5: 0.196 M weights for binary polyp segmentation; 0.070 and 0.012 G multiplications for classification of
    384 x 384 RGB and 256 x 256 grey images."""
    dense = Messenger((3, 384, 384), 1, dense=True)
    assert weights(dense) == 196_545
    assert dense(torch.zeros(1, 3, 64, 48)).shape == (1, 1, 64, 48)
    for shape, expected in (((3, 384, 384), 0.0710), ((1, 256, 256), 0.0127)):
        body = Messenger(shape, 2, dense=False).body
        assert macs(body, torch.zeros(1, *shape)) / 1e9 == pytest.approx(expected, abs=5e-5)
    assert Messenger((3, 64, 48), 7, dense=False)(torch.zeros(2, 3, 64, 48)).shape == (2, 7)
    assert Messenger((9, 128), 6, dense=False)(torch.zeros(2, 9, 128)).shape == (2, 6)


def test_the_features_are_as_the_body_gave_them() -> None:
    """An activation after it may write into them (torchvision's DenseNet does)."""
    body, inputs = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 8, 8)
    network = nn.Sequential(body, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(144, 2))
    outputs, features = Watched(network, "0").with_features(inputs)
    assert torch.equal(features, body(inputs)) and torch.equal(outputs, network(inputs))
    features.sum().backward()
    assert body.bias is not None and body.bias.grad is not None and bool((body.bias.grad == 2 * 36).all())


@pytest.mark.parametrize("queries", ["messenger", "local"])
def test_attention_does_not_mix_samples(queries: str) -> None:
    attention = TokenAttention(5, 8, queries).double()
    local, messenger = torch.randn(4, 5, 7, 6).double(), torch.randn(4, 8, 3, 2).double()
    whole = attention(local, messenger)
    assert whole.shape == messenger.shape
    for index in range(4):
        one = slice(index, index + 1)
        torch.testing.assert_close(attention(local[one], messenger[one]), whole[one], atol=1e-12, rtol=0)
    # Of one position the softmax is 1: the result would not depend on who asks. The method refuses such inputs.
    lone = messenger[:, :, :1, :1]
    if queries == "messenger":
        assert torch.equal(attention(local, lone), attention(local, 5 * lone))
    assert not torch.allclose(attention(local, messenger), attention(local, 5 * messenger))


def test_attention_by_hand() -> None:
    attention = TokenAttention(2, 4, "messenger").double()
    local, messenger = torch.randn(1, 2, 1, 3).double(), torch.randn(1, 4, 1, 3).double()
    mine = (attention.fit.weight @ local[0, :, 0] + attention.fit.bias[:, None]).T
    theirs = messenger[0, :, 0].T
    query, key, value = (
        theirs @ attention.query.weight.T,
        mine @ attention.key.weight.T,
        mine @ attention.value.weight.T,
    )
    expected = torch.stack([torch.softmax(key @ q / 2, dim=0) @ value for q in query])  # sqrt(D) = 2
    torch.testing.assert_close(attention(local, messenger)[0, :, 0].T, expected, atol=1e-12, rtol=0)


def divergence(local: Tensor, messenger: Tensor) -> Tensor:
    return divergence_of(class_logits(local.detach()).softmax(dim=1), class_logits(messenger))


@pytest.mark.parametrize("outputs", [1, 3])
def test_divergence(outputs: int) -> None:
    local, messenger = torch.randn(5, outputs).double(), torch.randn(5, outputs).double().requires_grad_()
    assert float(divergence(messenger.detach(), messenger).detach()) == pytest.approx(0, abs=1e-6)
    value = divergence(local, messenger)
    assert float(value) > 0
    (slope,) = torch.autograd.grad(value, messenger)
    if outputs == 1:
        expected = (messenger.sigmoid() - local.sigmoid()) / 5
    else:
        expected = (messenger.softmax(dim=1) - local.softmax(dim=1)) / 5
    torch.testing.assert_close(slope, expected.detach(), atol=1e-6, rtol=0)
    (none,) = torch.autograd.grad(divergence(messenger.detach(), messenger), messenger)
    assert float(none.abs().max()) < 1e-7


def test_where_bodies_end() -> None:
    resnet = ResNet(width=4).build((3, 64, 64), 2)
    assert find_body(resnet, (3, 64, 64)) == "layer4"
    assert body_shape(resnet, "layer2", (3, 64, 64)) == (8, 8, 8)
    state = {key: value.clone() for key, value in resnet.state_dict().items()}
    assert resnet.training and all(module.training for module in resnet.modules())
    assert all(torch.equal(value, state[key]) for key, value in resnet.state_dict().items())
    with pytest.raises(ConfigError, match="no module 'layer9' in ResNet"):
        body_shape(resnet, "layer9", (3, 64, 64))
    with pytest.raises(ConfigError, match=r"'fc' of ResNet cannot end its body: it gives \(2,\) for inputs of shape"):
        body_shape(resnet, "fc", (3, 64, 64))


# -- the round --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", [classification(), SEGMENTATION], ids=["classification", "segmentation"])
@pytest.mark.convolutions
def test_who_gets_gradients(task: Task, sites: dict[str, Path], tmp_path: Path) -> None:
    """Section 4.3's table; and what is frozen does not change, running statistics included."""
    given = job(task)
    _, runners = begun(given, sites, tmp_path)
    runner = runners["anna"]
    runner.run.optimizers = {}
    site = runner.rounds.site(given.method, 1)
    batch = next(iter(site.training_batches()))
    assert isinstance(given.method, MHpFLID)
    for phase, learning in (
        (given.method._inject, {"local_network", "receiver"}),
        (given.method._distill, {"messenger", "transmitter"}),
    ):
        runner.models.zero_grad(set_to_none=True)
        before = {key: value.clone() for key, value in runner.models.state_dict().items()}
        phase(site, Batch(batch.inputs, batch.targets))
        for name, network in runner.models.items():
            slopes = [p.grad for p in network.parameters()]
            if name in learning:
                assert all(slope is not None for slope in slopes), name
                assert sum(float(slope.abs().sum()) for slope in slopes if slope is not None) > 0
            else:
                assert all(slope is None for slope in slopes), name
                changed = [
                    key
                    for key, value in network.state_dict().items()
                    if not torch.equal(value, before[f"{name}.{key}"])
                ]
                assert not changed
            assert all(p.requires_grad for p in network.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [{"inject_messenger": 0.0}, {"warm_up": 2}], ids=str)
def test_without_the_messenger_it_is_local_training(
    arguments: dict[str, Any], sites: dict[str, Path], tmp_path: Path
) -> None:
    both = job(mixers={"local": Identity(), "messenger": Mean()}, **arguments)
    run(both, sites, tmp_path / "run")

    for site in sites:
        models = tmp_path / "run" / "home" / site / "small" / "models"
        alone, taught = read(models / "local-last.safetensors")[0], read(models / "personal-last.safetensors")[0]
        for key, value in alone.items():
            assert torch.equal(value, taught[key.replace("local.", "local_network.", 1)])


@pytest.mark.slow
def test_the_messenger_changes_the_local_models(sites: dict[str, Path], tmp_path: Path) -> None:
    one, other = (run(job(distill_lr=lr), sites, tmp_path / str(lr)) for lr in (1e-3, 1e-2))
    assert one["scores"] != other["scores"] or one["test"] != other["test"]


@pytest.mark.slow
def test_a_warm_up_ends(sites: dict[str, Path], tmp_path: Path) -> None:
    """The second of two rounds is the messenger's to be heard in."""
    one, other = (run(job(warm_up=rounds), sites, tmp_path / str(rounds)) for rounds in (1, 2))
    assert one["scores"] != other["scores"] or one["test"] != other["test"]


@pytest.mark.slow
def test_only_the_messenger_travels(sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begun(job(), sites, tmp_path)
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    for reply in replies.values():
        assert list(reply.slots) == ["messenger"]
        assert all(key.startswith("messenger.") for key in reply.slots["messenger"])
    kinds = [type(runners[site].models["local_network"]).__name__ for site in sorted(runners)]
    assert kinds == ["ResNet", "Sequential"]
    coordinator.rounds.take_train(1, replies)
    messages = coordinator.rounds.train_messages(2, coordinator.joined)
    for key, value in messages["anna"].slots["messenger"].items():
        assert torch.equal(value, messages["berta"].slots["messenger"][key])


@pytest.mark.parametrize("shared", ["body", "head"])
@pytest.mark.slow
def test_half_a_messenger(shared: str, sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begun(job(shared=shared), sites, tmp_path)
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    assert all(key.startswith(f"messenger.{shared}.") for key in replies["anna"].slots["messenger"])
    other = "head" if shared == "body" else "body"
    states = [runner.models.state_dict() for runner in runners.values()]
    assert any(
        not torch.equal(value, states[1][key])
        for key, value in states[0].items()
        if key.startswith(f"messenger.{other}")
    )


def test_prediction_needs_the_local_network_alone(sites: dict[str, Path], tmp_path: Path) -> None:
    given = job()
    _, runners = begun(given, sites, tmp_path)
    models, inputs = runners["anna"].models.eval(), torch.rand(3, 3, 36, 36)
    before = given.method.predict("personal", models, inputs)
    with torch.no_grad():
        for name in ("messenger", "receiver", "transmitter"):
            for parameter in models[name].parameters():
                parameter.normal_()
    assert torch.equal(given.method.predict("personal", models, inputs), before)


@pytest.mark.slow
def test_what_is_deployed_is_the_local_network_alone(sites: dict[str, Path], tmp_path: Path) -> None:
    given = job(rounds=1, bodies={"anna": "layer3"})
    run(given, sites, tmp_path)
    path = tmp_path / "home" / "anna" / "small" / "models" / "personal-last.safetensors"
    model = load_deployed(path)
    assert list(model.networks) == ["local_network"] and "anna" not in str(model.meta.recipe)
    assert model.meta.parameters == weights(TINY.build((3, 36, 36), 1))
    inputs = torch.rand(3, 3, 36, 36)
    assert torch.equal(model(inputs), model.networks["local_network"](inputs))
    export(path, tmp_path / "out", "torchscript")
    exported = torch.jit.load(str(tmp_path / "out" / "model.ts"))
    torch.testing.assert_close(exported(inputs), model(inputs), atol=1e-5, rtol=1e-4)
    assert sum(p.numel() for p in exported.parameters()) == model.meta.parameters


@pytest.mark.slow
def test_a_comparison_of_different_networks(sites: dict[str, Path], tmp_path: Path) -> None:
    """Local training with each hospital's own network, no FedAvg; each model tested at the others (Table 7)."""
    plain = {"path": "medpfl.methods.mh_pflid.MHpFLID", "args": {"distill_lr": 1e-3}}
    given = {"task": spec_of(classification()), "rounds": 1, "steps": None, "epochs": 1, "methods": {"MH-pFLID": plain}}
    _, found = compared(tmp_path, sites, **given)
    rows = {row.name: row for row in found.rows}
    assert list(rows) == ["Local", "MH-pFLID"]
    for row in rows.values():
        matrix = np.array(row.cross, dtype=float)
        assert matrix.shape == (2, 2) and np.isfinite(matrix).all()
        own = [row.hospitals[site].best.mean for site in sites]
        assert np.allclose(matrix.diagonal(), own, atol=1e-6)
    first = next((tmp_path / "results" / "runs").glob("*/home"))
    shapes = {site: load_deployed(next((first / site).rglob("*-best.safetensors"))).meta.parameters for site in sites}
    assert len(set(shapes.values())) == 2
    with pytest.raises(ConfigError, match="'pooled' trains one network"):
        plan_of(tmp_path, sites, **given, pooled=True)


def test_one_hospital_keeps_its_messenger(sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = begun(job(), {"anna": on_its_own(sites["anna"])}, tmp_path)
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    sent = {key: value.clone() for key, value in replies["anna"].slots["messenger"].items()}
    coordinator.rounds.take_train(1, replies)
    back = coordinator.rounds.train_messages(2, ["anna"])["anna"].slots["messenger"]
    assert all(torch.equal(value, back[key]) for key, value in sent.items())


@pytest.mark.slow
def test_resuming(sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(lambda: job(rounds=4), sites, tmp_path)


@pytest.mark.slow
def test_ablations_run(sites: dict[str, Path], tmp_path: Path) -> None:
    run(job(receiver="add", transmitter="add", rounds=1), sites, tmp_path)


# -- configuration ----------------------------------------------------------------------------------------------------


def test_networks_by_hospital() -> None:
    spec = spec_of(classification())
    again = build(spec, Task, "task")
    assert again == classification() and spec_of(again) == spec
    assert again.at("anna").architecture == TINY and again.at("zoe").architecture == SMALLER
    with pytest.raises(ConfigError, match="names no network for zoe, nor a default; it names anna"):
        ByHospital(anna=TINY).at("zoe")
    with pytest.raises(ConfigError, match="argument 'anna' of ByHospital must be an Architecture, got 3"):
        ByHospital(anna=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least one hospital"):
        ByHospital()


@pytest.mark.parametrize(
    ("task", "method", "words"),
    [
        (replace(classification(TINY), size=(32, 32)), {}, r"larger inputs: of \(3, 32, 32\) its map keeps a single"),
        (Segmentation("skin", size=(24, 24), architecture=UNet((4, 8))), {}, r"multiple of 16, got \(24, 24\)"),
        (classification(TINY), {"bodies": {"anna": "layer7"}}, "no module 'layer7' in ResNet"),
        (classification(TINY), {"bodies": {"anna": "fc"}}, "'fc' of ResNet cannot end its body"),
    ],
)
def test_what_does_not_fit(
    task: Task, method: dict[str, Any], words: str, sites: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=words):
        begun(job(task, **method), sites, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"distill_epochs": 0}, "distill_epochs must be at least 1, got 0"),
        ({"distill_lr": 0.0}, "distill_lr must be above 0"),
        ({"warm_up": -1}, "warm_up must be at least 0, got -1"),
        ({"inject_messenger": 1.5}, r"inject_messenger must be in \[0, 1\], got 1.5"),
        ({"distill_local": -0.1}, r"distill_local must be in \[0, 1\]"),
    ],
)
def test_arguments_out_of_range(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        MHpFLID(**arguments)
