# SPDX-License-Identifier: Apache-2.0
"""What the tests of the baselines share: rounds by hand, and full-batch gradients computed apart from the package."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from medpfl.data.samples import SiteData
from medpfl.job import Job
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from medpfl.tasks.tabular import Tabular
from tools import assert_same, exchange, outcome, pieces, ready, run

State = dict[str, Tensor]


@dataclass(frozen=True)
class Normed(Tabular):
    """A perceptron with BatchNorm, for tables."""

    def network(self, data: SiteData) -> nn.Module:
        width = data.splits["train"].inputs.shape[1]
        return nn.Sequential(nn.Linear(width, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))


def begin(job: Job, sites: dict[str, Path], folder: Path) -> tuple[Coordinator, dict[str, SiteRunner]]:
    coordinator, runners = pieces(job, sites, folder)
    ready(coordinator, runners)
    return coordinator, runners


def play(
    coordinator: Coordinator, runners: dict[str, SiteRunner], number: int, sites: Sequence[str] | None = None
) -> dict[str, dict[str, State]]:
    """One round with the given hospitals (None: all); returns what each sent, slot by slot."""
    messages = coordinator.rounds.train_messages(number, list(sites or coordinator.roster))
    replies = exchange(runners, messages)
    sent = {site: {s: {k: t.clone() for k, t in v.items()} for s, v in r.slots.items()} for site, r in replies.items()}
    assert coordinator.rounds.take_train(number, replies) == sorted(replies)
    return sent


def served(coordinator: Coordinator, slot: str, site: str = "anna") -> State:
    """What the hospital is sent next, without the slot's name in front."""
    message = coordinator.rounds.train_messages(coordinator.done + 1, [site])[site]
    return {key.partition(".")[2]: tensor.clone() for key, tensor in message.slots[slot].items()}


def held(runner: SiteRunner, model: str) -> State:
    """A hospital's own copy of a network."""
    return {key: tensor.clone() for key, tensor in runner.models[model].state_dict().items()}


def same(one: State, other: State) -> bool:
    assert one.keys() == other.keys() and one
    return all(torch.equal(one[key], other[key]) for key in one)


def close(one: State, other: State, atol: float = 1e-6) -> bool:
    assert one.keys() == other.keys() and one
    return all(torch.allclose(one[key], other[key], atol=atol, rtol=0) for key in one)


def slope(runner: SiteRunner, at: State) -> State:
    """Gradient at ``at`` of the mean logistic loss on all training rows, for the small tables' 3-4-1 perceptron."""
    weights = {key: tensor.detach().clone().requires_grad_() for key, tensor in at.items()}
    rows, classes = runner.data.splits["train"].inputs[:], runner.data.splits["train"].targets[:]
    hidden = torch.relu(rows @ weights["0.weight"].T + weights["0.bias"])
    scores = (hidden @ weights["2.weight"].T + weights["2.bias"])[:, 0]
    loss = torch.log1p(torch.exp(torch.where(classes == 1, -scores, scores))).mean()
    return dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))


def combine(*terms: tuple[float, State]) -> State:
    """Sum of factor times state."""
    return {key: sum((factor * state[key] for factor, state in terms), torch.zeros(())) for key in terms[0][1]}


def assert_resumes(make: Callable[[], Job], sites: dict[str, Path], folder: Path) -> None:
    """Killed after rounds 1 and 2 and started again, a job of 4 rounds ends as one that was never killed. (Two of the
    hospitals: what is kept at each, and at the server, says the same of more.)"""
    sites = dict(sorted(sites.items())[:2])
    whole = run(make(), sites, folder / "whole")
    for stop, start in itertools.pairwise([0, 1, 2]):
        simulate(make(), sites, folder / f"after{stop}", folder / "home", stop_after=start)
    simulate(make(), sites, folder / "end", folder / "home")
    assert_same(whole, outcome(folder / "end"))
