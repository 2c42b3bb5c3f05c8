# SPDX-License-Identifier: Apache-2.0
"""FedProx and Ditto: their limits are FedAvg and local training bit for bit, and the proximal term is squared."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, Mixer
from medpfl.methods.ditto import Ditto
from medpfl.methods.fedprox import FedProx
from medpfl.methods.proximal import Proximal
from medpfl.tasks.tabular import Tabular
from tools import Make, entries, exchange, normed, pieces, ready, round_of, same, train

SETTINGS: dict[str, Any] = {"lr": 0.05, "batch_size": 8}


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.slow
def test_fedprox_without_its_term_is_fedavg(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, optimizer: str
) -> None:
    for mu, equal in ((0.0, True), (0.3, False)):
        method = FedProx(mu=mu, optimizer=optimizer, **SETTINGS)
        _, slots = train(make_job, table_sites, tmp_path / str(mu), method, "model", Mean(), task=normed())
        assert same(slots["model"], slots["fedavg"]) is equal


@pytest.mark.slow
def test_fedprox_holds_the_hospital_near_what_it_received(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The drift of round 2 from the model as received shrinks with mu."""
    drifts = []
    for mu in (0.0, 1.0, 10.0):
        job = make_job(mixers={"model": Mean()}, method=FedProx(mu=mu, optimizer="sgd", epochs=4, **SETTINGS))
        coordinator, runners = pieces(job, table_sites, tmp_path / str(mu))
        ready(coordinator, runners)
        round_of(coordinator, runners, 1)
        messages = coordinator.rounds.train_messages(2, coordinator.joined)
        sent = {key: value.clone() for key, value in messages["anna"].slots["model"].items()}
        got = exchange(runners, messages)["anna"].slots["model"]
        drifts.append(sum(float((got[key] - sent[key]).square().sum()) for key in sent) ** 0.5)
    assert drifts[0] > drifts[1] > drifts[2] > 0


def test_the_term_is_over_parameters_only_and_reaches_those_without_a_loss() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    model[0].bias.requires_grad_(False)
    anchor = [parameter.detach().clone() for parameter in model.parameters()]
    term = Proximal(model, 0.5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
        model[1].running_mean += 100
    term()
    for parameter, a in zip(model.parameters(), anchor, strict=True):
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, 0.5 * (parameter.detach() - a))
        else:
            assert parameter.grad is None


@pytest.mark.parametrize(("kind", "slot"), [(FedProx, "model"), (Ditto, "global")])
def test_two_steps_by_hand(make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: Any, slot: str) -> None:
    """Logistic regression, full batches, SGD: w <- w - lr (grad F(w) + strength (w - a))."""
    strength, lr = 0.4, 0.5
    name = "mu" if kind is FedProx else "lam"
    method = kind(**{name: strength}, lr=lr, batch_size=1000, optimizer="sgd", epochs=2)
    mixers: dict[str, Mixer] = {slot: Mean()}
    coordinator, runners = pieces(
        make_job(mixers=mixers, method=method, task=Tabular(dataset="blood")), table_sites, tmp_path
    )
    ready(coordinator, runners)
    runner = runners["clara"]
    model = slot if kind is FedProx else "personal"
    start = {key: value.clone().double() for key, value in entries(runner, model).items()}
    exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    data = runner.data.splits["train"]
    x = torch.cat([data.inputs[:], torch.ones(len(data), 1)], dim=1).double()
    y = data.targets[:].double()
    a = torch.cat([start[f"{model}.0.weight"][0], start[f"{model}.0.bias"]])
    w = a.clone()
    for _ in range(2):
        gradient = x.T @ ((x @ w).sigmoid() - y) / len(y)
        w = w - lr * (gradient + strength * (w - a))
    after = entries(runner, model)
    got = torch.cat([after[f"{model}.0.weight"][0], after[f"{model}.0.bias"]]).double()
    torch.testing.assert_close(got, w, atol=1e-6, rtol=0)


@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.slow
def test_dittos_limits(make_job: Make, table_sites: dict[str, Path], tmp_path: Path, optimizer: str) -> None:
    for lam, equal in ((0.0, True), (0.5, False)):
        method = Ditto(lam=lam, optimizer=optimizer, **SETTINGS)
        runners, slots = train(make_job, table_sites, tmp_path / str(lam), method, "global", Mean(), task=normed())
        assert same(slots["global"], slots["fedavg"])  # whatever lam is
        for runner in runners.values():
            assert same(entries(runner, "personal"), entries(runner, "local")) is equal


def test_dittos_anchor_is_the_common_model_as_received(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """In round 2 the personal model is pulled to what was received, not to what the hospital made of it."""
    lr, lam = 0.05, 3.0
    method = Ditto(lam=lam, lr=lr, batch_size=1000, optimizer="sgd")
    coordinator, runners = pieces(make_job(mixers={"global": Mean()}, method=method), table_sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    messages = coordinator.rounds.train_messages(2, coordinator.joined)
    received = {key: value.clone() for key, value in messages["anna"].slots["global"].items()}
    runner = runners["anna"]
    before = {key: value.clone() for key, value in entries(runner, "personal").items()}
    net = runner.task.network(runner.data)
    net.load_state_dict({key.removeprefix("personal."): value for key, value in before.items()})
    data = runner.data.splits["train"]
    runner.task.loss(net(data.inputs[:]), data.targets[:]).backward()  # type: ignore[no-untyped-call]
    exchange(runners, messages)
    for key, gradient in ((f"personal.{name}", parameter.grad) for name, parameter in net.named_parameters()):
        anchor = received[key.replace("personal", "global")]
        expected = before[key] - lr * (gradient + lam * (before[key] - anchor))
        torch.testing.assert_close(entries(runner, "personal")[key], expected, atol=1e-6, rtol=0)


def test_dittos_personal_model_never_travels(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    coordinator, runners = pieces(make_job(mixers={"global": Mean()}, method=Ditto(**SETTINGS)), table_sites, tmp_path)
    replies = exchange(runners, coordinator.init_messages())
    coordinator.take_init(replies)
    trained = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    for message in [*replies.values(), *trained.values()]:
        assert set(message.slots) == {"global"}
        assert set(message.slots["global"]) == set(entries(runners["anna"], "global"))


@pytest.mark.parametrize(("kind", "name"), [(FedProx, "mu"), (Ditto, "lam")])
def test_ranges(kind: Any, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{kind.__name__}'s {name} must be at least 0, got -0.1"):
        kind(**{name: -0.1})


@pytest.mark.parametrize("strength", [0.0, 0.37, 1.0])
def test_the_term_adds_what_autograd_would(strength: float) -> None:
    """It goes past autograd for speed: the gradients are those of strength/2 ||w - a||^2 written out."""
    torch.manual_seed(0)
    model, anchor, inputs = nn.Linear(5, 3), nn.Linear(5, 3), torch.randn(7, 5)
    pairs = list(zip(model.parameters(), anchor.parameters(), strict=True))
    plain = strength / 2 * sum((weight - a.detach()).square().sum() for weight, a in pairs)
    wanted = torch.autograd.grad(model(inputs).square().mean() + plain, list(model.parameters()))
    model(inputs).square().mean().backward()
    Proximal(model, strength, anchor)()
    for one, parameter in zip(wanted, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, one, rtol=1e-6, atol=1e-7)
