# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD, MOON and FedRoD: limits that are another method, steps by hand, what stays, and resuming."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from baselines import Normed, assert_resumes, begin, close, combine, held, play, same, served, slope
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import ControlVariates, Mean, Mixer
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.methods.contract import Build
from medpfl.methods.features import with_features
from medpfl.methods.fedrod import FedRoD, balanced_loss
from medpfl.methods.moon import Moon, contrast
from medpfl.methods.scaffold import Scaffold
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from one_slot import OneSlot
from tools import run

Make = Callable[..., Job]


def controls() -> dict[str, Mixer]:
    return {"fedavg": Mean(uniform=True), "model": Mean(uniform=True), "control": ControlVariates()}


# -- SCAFFOLD ---------------------------------------------------------------------------------------------------------


def test_scaffold_with_zero_controls_is_fedavg(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers=controls(), method=Scaffold(lr=0.1, batch_size=8), task=Normed("blood"))
    coordinator, runners = begin(job, table_sites, tmp_path)
    play(coordinator, runners, 1)
    assert same(served(coordinator, "model"), served(coordinator, "fedavg"))
    play(coordinator, runners, 2)
    assert not close(served(coordinator, "model"), served(coordinator, "fedavg"), atol=1e-3)


def test_the_common_control_is_the_mean_of_the_hospitals(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(rounds=4, mixers=controls(), method=Scaffold(lr=0.1, batch_size=8), min_clients=1)
    coordinator, runners = begin(job, table_sites, tmp_path)
    for number, answering in enumerate([["anna", "clara"], None, ["dora"], None], start=1):
        play(coordinator, runners, number, answering)
        own = [held(runner, "own") for runner in runners.values()]  # zero where a hospital never trained
        mean = combine(*((0.25, state) for state in own))
        for site in table_sites:
            assert close(served(coordinator, "control", site), mean)
        assert max(t.abs().max() for t in mean.values()) > 1e-3


def test_the_controls_of_the_absent_survive_a_restart() -> None:
    sent = [{"c": torch.tensor([4.0])}, {"c": torch.tensor([-1.0])}]
    server = OneSlot(ControlVariates(), {"c": torch.zeros(1)}, {"a": 30.0, "b": 10.0})
    new, _ = server.mix(sent)
    assert [state["c"].item() for state in new] == [1.5, 1.5]
    for one in (server.restarted(ControlVariates()), server):  # b is away: what it was sent last counts for nothing
        new, _ = one.mix([{"c": torch.tensor([6.0])}, {"c": torch.tensor([99.0])}], (True, False))
        assert [state["c"].item() for state in new] == [2.5, 2.5]


def test_scaffold_two_rounds_by_hand(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    lr, steps = 0.2, 2
    job = make_job(mixers=controls(), method=Scaffold(lr=lr, batch_size=100, steps=steps))
    coordinator, runners = begin(job, table_sites, tmp_path)
    x = served(coordinator, "model")
    zero = combine((0.0, x))
    c, own = zero, dict.fromkeys(runners, zero)
    for number in (1, 2):
        ends, new = [], {}
        for site, runner in runners.items():
            y = x
            for _ in range(steps):
                y = combine((1, y), (-lr, slope(runner, y)), (lr, own[site]), (-lr, c))
            new[site] = combine((1, own[site]), (-1, c), (1 / (steps * lr), x), (-1 / (steps * lr), y))
            ends.append(y)
        x, own = combine(*((0.25, y) for y in ends)), new
        c = combine(*((0.25, c_i) for c_i in own.values()))
        play(coordinator, runners, number)
        assert close(served(coordinator, "model"), x)
        for site, runner in runners.items():
            for found, expected in zip(held(runner, "own").values(), own[site].values(), strict=True):
                torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
        for found, expected in zip(served(coordinator, "control").values(), c.values(), strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.slow
def test_scaffold_resumes(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(
        lambda: make_job(rounds=4, mixers=controls(), method=Scaffold(lr=0.1, batch_size=8)), table_sites, tmp_path
    )


def test_scaffold_refuses_adam() -> None:
    with pytest.raises(ConfigError, match="Scaffold cannot train with Adam: its control variates are mean gradients"):
        Scaffold(optimizer="adam")


# -- MOON -------------------------------------------------------------------------------------------------------------


def moon(**settings: float) -> Moon:
    return Moon(lr=0.05, batch_size=8, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_moon_without_contrast_is_fedavg(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={"fedavg": Mean(), "model": Mean()}, method=moon(mu=0.0), task=Normed("blood"))
    coordinator, runners = begin(job, table_sites, tmp_path)
    for number in (1, 2, 3):
        play(coordinator, runners, number)
        assert same(served(coordinator, "model"), served(coordinator, "fedavg"))


def test_moon_contrasts_from_the_second_round(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """In round 1 the previous and the common model are one, and the contrast has no slope."""
    method = Moon(lr=0.1, batch_size=8, optimizer="sgd", mu=5.0)
    job = make_job(mixers={"fedavg": Mean(), "model": Mean()}, method=method)
    coordinator, runners = begin(job, table_sites, tmp_path)
    sent = play(coordinator, runners, 1)
    assert close(served(coordinator, "model"), served(coordinator, "fedavg"))
    for site, runner in runners.items():  # private, and what was sent
        assert sent[site].keys() == {"fedavg", "model"}
        assert not any("previous" in key for slot in sent[site].values() for key in slot)
        assert same(held(runner, "previous"), {k.partition(".")[2]: t for k, t in sent[site]["model"].items()})
    play(coordinator, runners, 2)
    assert not close(served(coordinator, "model"), served(coordinator, "fedavg"), atol=1e-3)


def test_contrast_by_hand() -> None:
    z, common, previous = torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 3.0]])
    near, far = math.exp(math.sqrt(0.5) / 0.5), math.exp(0.0)
    assert float(contrast(z, common, previous, 0.5)) == pytest.approx(-math.log(near / (near + far)))
    z.requires_grad_()
    contrast(z, common, previous, 0.5).backward()
    moved = (z - 0.1 * z.grad).detach()  # type: ignore[operator]
    margins = [torch.cosine_similarity(at, common) - torch.cosine_similarity(at, previous) for at in (z, moved)]
    assert margins[1] > margins[0]
    maps = torch.randn(2, 3, 4, 4)  # feature maps: all values of a sample
    flat = [t.flatten(1) for t in (maps, maps + 1, maps - 1)]
    assert float(contrast(maps, maps + 1, maps - 1, 1.0)) == pytest.approx(float(contrast(*flat, 1.0)))


def test_features_are_the_input_of_the_head() -> None:
    network = nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 1)).eval()
    outputs, features = with_features(network, torch.randn(2, 1, 5, 5))
    assert features.shape == (2, 3, 5, 5)
    assert torch.equal(network[3](features), outputs)
    assert not network[3]._forward_pre_hooks


@pytest.mark.slow
def test_moon_resumes(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(lambda: make_job(rounds=4, mixers={"model": Mean()}, method=moon()), table_sites, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "words"), [({"mu": -1.0}, "mu must be at least 0"), ({"temperature": 0.0}, "must be above 0")]
)
def test_moon_arguments_out_of_range(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        moon(**arguments)


# -- FedRoD -----------------------------------------------------------------------------------------------------------


def rod(**settings: float) -> FedRoD:
    return FedRoD(lr=0.05, batch_size=8, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_generic_part_without_balancing_is_fedavg(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Also shows that nothing of the personal loss reaches the generic network."""
    method = FedRoD(lr=0.05, batch_size=8, optimizer="sgd", gamma=0.0)
    job = make_job(mixers={"fedavg": Mean(), "generic": Mean()}, method=method, task=Normed("blood"))
    coordinator, runners = begin(job, table_sites, tmp_path)
    for number in (1, 2, 3):
        sent = play(coordinator, runners, number)
        assert close(served(coordinator, "generic"), served(coordinator, "fedavg"))
    for site, runner in runners.items():
        assert sent[site].keys() == {"fedavg", "generic"}
        assert held(runner, "head")["weight"].abs().max() > 0.01  # trained, and never sent
        assert not any(key.startswith("head") for slot in sent[site].values() for key in slot)


def test_balanced_loss_by_hand() -> None:
    outputs, targets = torch.tensor([[0.2, -1.0, 0.5]]), torch.tensor([1])
    prior = torch.tensor([0.5, 0.2, 0.3])
    weights = [0.5 * math.exp(0.2), 0.2 * math.exp(-1.0), 0.3 * math.exp(0.5)]
    assert float(balanced_loss(outputs, targets, prior)) == pytest.approx(-math.log(weights[1] / sum(weights)))
    one = torch.tensor([[0.7]])  # two classes: the output is their difference
    positive = 0.9 * math.exp(0.7)
    assert float(balanced_loss(one, torch.tensor([1]), torch.tensor([0.1, 0.9]))) == pytest.approx(
        -math.log(positive / (positive + 0.1))
    )


def test_balanced_classes_change_nothing_and_absent_ones_are_left_out() -> None:
    outputs, targets = torch.randn(6, 3), torch.tensor([0, 1, 2, 2, 1, 0])
    torch.testing.assert_close(
        balanced_loss(outputs, targets, torch.full((3,), 1 / 3)), nn.functional.cross_entropy(outputs, targets)
    )
    for width, prior in ((1, [0.0, 1.0]), (3, [0.0, 0.25, 0.75])):
        given = torch.randn(4, width, requires_grad=True)
        loss = balanced_loss(given, torch.ones(4, dtype=torch.long), torch.tensor(prior))
        loss.backward()
        assert torch.isfinite(loss) and given.grad is not None and torch.isfinite(given.grad).all()


@pytest.mark.slow
def test_the_personal_model_is_the_sum_and_survives_saving(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    result = run(make_job(mixers={"generic": Mean()}, method=rod()), table_sites, tmp_path)
    assert {line["model"] for line in result["test"]} == {"personal", "generic"}
    models = tmp_path / "home" / "berta" / "small" / "models"
    personal, generic = (load_deployed(models / f"{name}-last.safetensors") for name in ("personal", "generic"))
    rows = torch.randn(5, 3)
    networks = personal.networks
    features = networks["generic"][:-1](rows)  # type: ignore[index]
    torch.testing.assert_close(personal(rows), generic(rows) + networks["head"](features))
    assert not torch.allclose(personal(rows), generic(rows), atol=1e-3)
    export(models / "personal-last.safetensors", tmp_path / "exported", "torchscript")  # checks its own outputs


def test_fedrod_does_not_balance_balanced_batches_again(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Where every class is drawn alike, the balanced softmax is cross-entropy."""
    task = Tabular("blood", hidden=(4,), sampling="balanced")
    slots: dict[str, Mixer] = {"fedavg": Mean(), "generic": Mean()}
    job = make_job(mixers=slots, method=FedRoD(lr=0.05, batch_size=8, optimizer="sgd"), task=task)
    coordinator, runners = begin(job, table_sites, tmp_path)
    for number in (1, 2):
        play(coordinator, runners, number)
    assert close(served(coordinator, "generic"), served(coordinator, "fedavg"))


@pytest.mark.slow
def test_fedrod_resumes(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    assert_resumes(lambda: make_job(rounds=4, mixers={"generic": Mean()}, method=rod()), table_sites, tmp_path)


def test_fedrod_needs_classes(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    _, runners = begin(make_job(mixers={"generic": Mean()}, method=rod()), table_sites, tmp_path)
    build = Build(Segmentation(dataset="scans"), runners["anna"].data, ("anna",), 0)
    with pytest.raises(ConfigError, match="FedRoD learns one class a case; the answer of Segmentation is a class"):
        rod().models(build)
    with pytest.raises(ConfigError, match="gamma must be at least 0"):
        rod(gamma=-0.5)
