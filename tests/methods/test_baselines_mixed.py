# SPDX-License-Identifier: Apache-2.0
"""APFL, pFedMe and Per-FedAvg: their limits are FedAvg and local training, and their steps are the papers'."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, Mixer, RelaxedMean, RoundInfo
from medpfl.data.samples import SiteData
from medpfl.deployed.export import export
from medpfl.methods.apfl import APFL
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.methods.pfedme import PFedMe
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.tasks.tabular import Tabular
from one_slot import OneSlot
from tools import Make, entries, exchange, normed, pieces, ready, round_of, run, same, train

SETTINGS: dict[str, Any] = {"lr": 0.05, "batch_size": 8}
LINEAR = Tabular(dataset="blood")


class Logistic:
    """One hospital's logistic regression in float64: gradients worked out by hand on [x, 1]."""

    def __init__(self, inputs: Tensor, targets: Tensor):
        self.x = torch.cat([inputs, torch.ones(len(inputs), 1)], dim=1).double()
        self.y = targets.double()

    def gradient(self, w: Tensor) -> Tensor:
        return self.x.T @ ((self.x @ w).sigmoid() - self.y) / len(self.y)

    def hessian(self, w: Tensor) -> Tensor:
        p = (self.x @ w).sigmoid()
        return (self.x.T * (p * (1 - p))) @ self.x / len(self.y)


def vector(state: dict[str, Tensor], model: str) -> Tensor:
    return torch.cat([state[f"{model}.0.weight"][0], state[f"{model}.0.bias"]]).double().clone()


def start(
    make_job: Make, sites: dict[str, Path], folder: Path, method: Any, mixers: dict[str, Mixer]
) -> tuple[Coordinator, dict[str, SiteRunner]]:
    coordinator, runners = pieces(make_job(mixers=mixers, method=method, task=LINEAR), sites, folder)
    ready(coordinator, runners)
    return coordinator, runners


def train_data(runner: SiteRunner) -> Logistic:
    data = runner.data.splits["train"]
    return Logistic(data.inputs[:], data.targets[:])


# -- APFL ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.slow
def test_apfl_with_alpha_one_is_local(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, optimizer: str
) -> None:
    method = APFL(alpha=1.0, alpha_lr=0.0, optimizer=optimizer, **SETTINGS)
    runners, slots = train(make_job, table_sites, tmp_path, method, "global", Mean(), task=normed())
    assert same(slots["global"], slots["fedavg"])
    for runner in runners.values():
        assert same(entries(runner, "personal"), entries(runner, "local"))


@pytest.mark.slow
def test_apfl_with_alpha_zero_predicts_as_fedavg(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    mixers: dict[str, Mixer] = {"fedavg": Mean(), "global": Mean()}
    method = APFL(alpha=0.0, alpha_lr=0.0, **SETTINGS)
    result = run(make_job(mixers=mixers, method=method), table_sites, tmp_path)
    by_model: dict[str, list[Any]] = {}
    for line in result["scores"]:
        if line["site"] != "mean":
            by_model.setdefault(line["model"], []).append([line["site"], line["round"], line["metrics"]])
    assert by_model["personal"] == by_model["fedavg"] == by_model["global"]


def test_apfl_by_hand(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Three full-batch steps of Algorithm 1 in round 2, where v and w already differ."""
    lr, alpha_lr = 0.5, 0.8
    method = APFL(alpha=0.3, alpha_lr=alpha_lr, lr=lr, batch_size=1000, optimizer="sgd", epochs=3)
    coordinator, runners = start(make_job, table_sites, tmp_path, method, {"global": Mean()})
    round_of(coordinator, runners, 1)
    messages = coordinator.rounds.train_messages(2, coordinator.joined)
    runner = runners["berta"]
    f, w = train_data(runner), vector(messages["berta"].slots["global"], "global")
    v = vector(entries(runner, "personal"), "personal")
    alpha = entries(runner, "alpha")["alpha.value"].double().clone()
    assert 0 < alpha < 1 and alpha != 0.3 and not torch.equal(v, w)
    exchange(runners, messages)
    for _ in range(3):
        slope = f.gradient(alpha * v + (1 - alpha) * w)
        v, w, alpha = v - lr * alpha * slope, w - lr * f.gradient(w), alpha - alpha_lr * slope @ (v - w)
    torch.testing.assert_close(vector(entries(runner, "global"), "global"), w, atol=1e-6, rtol=0)
    torch.testing.assert_close(vector(entries(runner, "personal"), "personal"), v, atol=1e-6, rtol=0)
    torch.testing.assert_close(entries(runner, "alpha")["alpha.value"].double(), alpha, atol=1e-6, rtol=0)


def test_apfls_alpha_stays_home_in_its_range_and_is_told(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    method = APFL(alpha=0.5, alpha_lr=1000.0, **SETTINGS)
    coordinator, runners = pieces(make_job(mixers={"global": Mean()}, method=method), table_sites, tmp_path)
    ready(coordinator, runners)
    for number in (1, 2):
        replies = exchange(runners, coordinator.rounds.train_messages(number, coordinator.joined))
        assert all(set(reply.slots["global"]) == set(entries(runners["anna"], "global")) for reply in replies.values())
        coordinator.rounds.take_train(number, replies)
    told = [line for line in replies["anna"].header.metrics if line.model == "alpha"]
    assert len(told) == 1 and 0 <= (told[0].metrics["alpha"] or 0) <= 1
    assert all(entries(runner, "alpha")["alpha.value"] in (0.0, 1.0) for runner in runners.values())


@pytest.mark.parametrize("kind", ["torchscript", "onnx"])
@pytest.mark.slow
def test_apfls_mixture_can_be_exported(make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: str) -> None:
    run(make_job(mixers={"global": Mean()}, method=APFL(**SETTINGS), task=normed()), table_sites, tmp_path)
    model = tmp_path / "home" / "anna" / "small" / "models" / "personal-last.safetensors"
    export(model, tmp_path / "given", kind)  # compares the outputs itself


# -- pFedMe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.slow
def test_pfedme_where_w_becomes_theta_is_fedavg(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, optimizer: str
) -> None:
    """One inner step from theta = w feels no pull, and outer_lr lam = 1 makes it w; beta = 1 is the mean."""
    for outer_lr, beta, equal in ((0.25, 1.0, True), (0.25, 0.5, False), (0.1, 1.0, False)):
        method = PFedMe(lam=4.0, inner_steps=1, outer_lr=outer_lr, optimizer=optimizer, **SETTINGS)
        folder = tmp_path / f"{outer_lr}-{beta}"
        _, slots = train(make_job, table_sites, folder, method, "global", RelaxedMean(beta=beta), task=normed())
        assert same(slots["global"], slots["fedavg"]) is equal


def test_pfedme_by_hand(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Algorithm 1 with full batches: K inner steps, then the step of w; twice, and the server's beta."""
    lam, inner_lr, outer_lr, beta, inner = 3.0, 0.1, 0.2, 0.6, 4
    method = PFedMe(
        lam=lam, lr=inner_lr, outer_lr=outer_lr, inner_steps=inner, epochs=2, batch_size=1000, optimizer="sgd"
    )
    mixers: dict[str, Mixer] = {"global": RelaxedMean(uniform=True, beta=beta)}
    coordinator, runners = start(make_job, table_sites, tmp_path, method, mixers)
    expected = vector(entries(runners["anna"], "global"), "global")
    for number in (1, 2):  # the second round needs the server's memory of the first
        round_of(coordinator, runners, number)
        ends = []
        for runner in runners.values():
            f, w, theta = train_data(runner), expected, expected
            for _ in range(2):
                for _ in range(inner):
                    theta = theta - inner_lr * (f.gradient(theta) + lam * (theta - w))
                w = w - outer_lr * lam * (w - theta)
            ends.append(w)
            torch.testing.assert_close(vector(entries(runner, "personal"), "personal"), theta, atol=1e-6, rtol=0)
        expected = (1 - beta) * expected + beta * torch.stack(ends).mean(0)
        got = coordinator.rounds.train_messages(number + 1, ["anna"])["anna"].slots["global"]
        torch.testing.assert_close(vector(got, "global"), expected, atol=1e-6, rtol=0)


def about(present: tuple[bool, bool] = (True, True)) -> RoundInfo:
    return RoundInfo(("a", "b"), np.array([30.0, 10.0]), present)


def test_relaxed_mean_remembers_and_is_restored() -> None:
    def states(a: float, b: float) -> list[dict[str, Tensor]]:
        return [{"w": torch.tensor([value]), "n": torch.tensor(int(value))} for value in (a, b)]

    server = OneSlot(RelaxedMean(beta=0.25), {"w": torch.tensor([8.0]), "n": torch.tensor(0)}, {"a": 30.0, "b": 10.0})
    new, matrix = server.mix(states(4.0, 8.0))  # 0.75 * 8 + 0.25 * (0.75 * 4 + 0.25 * 8)
    assert matrix is None and [state["w"].item() for state in new] == [7.25, 7.25]
    assert [state["n"].item() for state in new] == [4, 8]  # integers are not averaged
    for one in (
        server.restarted(RelaxedMean(beta=0.25)),
        server,
    ):  # one absent hospital: the mean is the other's, and both get the result
        new, _ = one.mix(states(1.0, 99.0), (True, False))
        assert [state["w"].item() for state in new] == [0.75 * 7.25 + 0.25] * 2


@pytest.mark.parametrize("uniform", [False, True])
def test_relaxed_mean_with_beta_one_is_the_mean(uniform: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    old = [{"w": torch.randn(50, generator=generator)} for _ in range(2)]
    start = {"w": torch.randn(50, generator=generator)}
    relaxed, _ = OneSlot(RelaxedMean(uniform=uniform, beta=1.0), start, {"a": 30.0, "b": 10.0}).mix(old)
    plain, _ = Mean(uniform=uniform).mix(old, about())
    assert torch.equal(relaxed[0]["w"], plain[0]["w"]) and torch.equal(relaxed[1]["w"], plain[1]["w"])


# -- Per-FedAvg ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.slow
def test_per_fedavg_without_adapting_is_fedavg(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, variant: Any, optimizer: str
) -> None:
    for inner_lr, equal in ((0.0, True), (0.2, False)):
        method = PerFedAvg(inner_lr=inner_lr, variant=variant, optimizer=optimizer, **SETTINGS)
        _, slots = train(
            make_job, table_sites, tmp_path / str(inner_lr), method, "model", Mean(), task=normed()
        )  # BatchNorm's statistics too
        assert same(slots["model"], slots["fedavg"]) is equal


@pytest.mark.parametrize(("variant", "tolerance"), [("first-order", 1e-6), ("hessian-free", 2e-4)])
def test_per_fedavg_by_hand(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, variant: Any, tolerance: float
) -> None:
    """Every step of a round against the formula; the Hessian-free one against the exact Hessian."""
    lr, inner = 0.3, 0.5
    method = PerFedAvg(lr=lr, inner_lr=inner, variant=variant, batch_size=8, optimizer="sgd")
    coordinator, runners = start(make_job, table_sites, tmp_path, method, {"model": Mean()})
    runner = runners["anna"]
    begin = w = vector(entries(runner, "model"), "model")
    exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    batches = [Logistic(batch.inputs, batch.targets) for batch in runner.rounds.site(method, 1).training_batches()]
    assert len(batches) >= 3
    exact = 0.0
    for number, main in enumerate(batches):
        adapt, curve = (batches[(number + step) % len(batches)] for step in (1, 2))
        gradient = main.gradient(w - inner * adapt.gradient(w))
        if variant == "hessian-free":
            second = inner * curve.hessian(w) @ gradient
            exact = max(exact, float(second.abs().max()))
            gradient = gradient - second
        w = w - lr * gradient
    torch.testing.assert_close(vector(entries(runner, "model"), "model"), w, atol=tolerance, rtol=0)
    assert float((w - begin).abs().max()) > 0.05
    assert variant == "first-order" or exact > 0.01  # the second-order part is no rounding


@dataclass(frozen=True)
class Dropping(Tabular):
    """A perceptron with dropout, for tables."""

    def network(self, data: SiteData) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 1))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("task", [Dropping("blood"), Tabular("blood", hidden=(16,))], ids=["dropout", "none"])
def test_the_hessian_free_part_is_neither_dropout_nor_rounding(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, task: Tabular, precision: Any
) -> None:
    """Of one step, what the variant adds: delta ten times as large must give about the same."""
    ends = {}
    for variant, delta in (("first-order", 1e-3), ("hessian-free", 1e-3), ("hessian-free", 1e-2)):
        method = PerFedAvg(
            lr=1.0, inner_lr=0.5, variant=variant, delta=delta, steps=1, batch_size=8, optimizer="sgd",
            precision=precision,
        )  # fmt: skip
        folder = tmp_path / f"{variant}-{delta}"
        coordinator, runners = pieces(make_job(mixers={"model": Mean()}, method=method, task=task), table_sites, folder)
        ready(coordinator, runners)
        exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
        state = entries(runners["anna"], "model")
        ends[variant, delta] = torch.cat([tensor.flatten().double() for tensor in state.values()])
    small, large = (ends["hessian-free", delta] - ends["first-order", 1e-3] for delta in (1e-3, 1e-2))
    assert 1e-3 < float(large.norm()) < 1
    assert float((small - large).norm()) < 0.05 * float(large.norm())


def test_per_fedavg_deploys_one_step_on_the_local_training_data(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    method = PerFedAvg(inner_lr=0.7, batch_size=8, lr=0.05)
    coordinator, runners = start(make_job, table_sites, tmp_path, method, {"model": Mean()})
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    assert all(set(reply.slots["model"]) == {"model.0.weight", "model.0.bias"} for reply in replies.values())
    coordinator.rounds.take_train(1, replies)
    messages = coordinator.end.validate_messages(coordinator.joined)
    common = vector(messages["anna"].slots["model"], "model")
    exchange(runners, messages)
    adapted = {site: vector(entries(runner, "personal"), "personal") for site, runner in runners.items()}
    for site, runner in runners.items():
        expected = common - 0.7 * train_data(runner).gradient(common)
        torch.testing.assert_close(adapted[site], expected, atol=1e-6, rtol=0)
        assert torch.equal(vector(entries(runner, "model"), "model"), common)
    assert not torch.equal(adapted["anna"], adapted["berta"])


@pytest.mark.parametrize("size", [1000, 20])
def test_per_fedavg_with_one_or_two_batches(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, size: int
) -> None:
    method = PerFedAvg(inner_lr=0.1, lr=0.05, batch_size=size)
    coordinator, runners = start(make_job, table_sites, tmp_path, method, {"model": Mean()})
    before = vector(entries(runners["anna"], "model"), "model")
    exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    assert not torch.equal(vector(entries(runners["anna"], "model"), "model"), before)


@pytest.mark.parametrize(
    ("kind", "wrong", "sentence"),
    [
        (APFL, {"alpha": 1.1}, r"APFL's alpha must be in \[0, 1\], got 1\.1"),
        (APFL, {"alpha_lr": -1.0}, "APFL's alpha_lr must be at least 0, got -1"),
        (PFedMe, {"lam": 0.0}, "PFedMe's lam must be above 0, got 0"),
        (PFedMe, {"inner_steps": 0}, "PFedMe's inner_steps must be at least 1, got 0"),
        (PFedMe, {"outer_lr": 0.1}, "PFedMe's outer_lr must be above 0 and at most 1/lam, got 0.1"),
        (RelaxedMean, {"beta": 0.0}, "RelaxedMean's beta must be above 0, got 0"),
        (PerFedAvg, {"inner_lr": -1.0}, "PerFedAvg's inner_lr must be at least 0, got -1"),
        (PerFedAvg, {"delta": 0.0}, "PerFedAvg's delta must be above 0, got 0"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_ranges(kind: Any, wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        kind(**wrong)
