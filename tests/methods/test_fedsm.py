# SPDX-License-Identifier: Apache-2.0
"""FedSM's training: its three slots do not disturb each other, and the selector is trained as if all data were in one
place (algorithms: FedSM, Algorithm 1; the selector by server-side Adam)."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean, Mixer, RoundInfo, ServerAdam, SoftPull
from medpfl.job import Job
from medpfl.methods.fedsm import FedSM
from medpfl.methods.softpull import SoftPull as SoftPullMethod
from medpfl.models.contract import Architecture
from medpfl.models.selector import Signature, SmallCnn
from medpfl.rounds.simulate import simulate
from small_jobs import on_its_own
from tools import assert_same, outcome, pieces, ready, round_of, run

Make = Callable[..., Job]


def slots() -> dict[str, Mixer]:
    return {"global": Mean(), "personal": SoftPull(lam=0.5), "selector": ServerAdam(lr=0.02)}


def fedsm(**settings: float) -> FedSM:
    return FedSM(lr=0.05, batch_size=8, **settings)  # type: ignore[arg-type]


@pytest.mark.slow
def test_global_is_fedavg_and_personal_is_softpull(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    both = run(make_job(mixers=slots(), method=fedsm()), table_sites, tmp_path / "1")
    method = SoftPullMethod(lr=0.05, batch_size=8)
    alone = run(
        make_job(mixers={"fedavg": Mean(), "model": SoftPull(lam=0.5)}, method=method), table_sites, tmp_path / "2"
    )
    for slot, other in (("global", "fedavg"), ("personal", "model")):
        for key, tensor in both["slots"][slot].items():
            assert torch.equal(tensor, alone["slots"][other][key.replace(f"::{slot}.", f"::{other}.")])


@pytest.mark.parametrize("uniform", [False, True])
@pytest.mark.slow
def test_selector_equals_centralised_full_batch_adam(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, uniform: bool
) -> None:
    rounds, steps = 4, 5
    mixers = {**slots(), "selector": ServerAdam(lr=0.02, uniform=uniform)}
    job = make_job(rounds=rounds, mixers=mixers, method=fedsm(selector_steps=steps))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    central = Signature().build((3,), 4)
    start = coordinator.rounds.train_messages(1, ["anna"])["anna"].slots["selector"]
    central.load_state_dict({key.removeprefix("selector."): value.clone() for key, value in start.items()})
    adam = torch.optim.Adam(central.parameters(), lr=0.02)
    parts = [runners[site].data.splits["train"].inputs[:] for site in coordinator.roster]
    shares = torch.cat(
        [torch.full((len(p),), 1 / (4 * len(p)) if uniform else 1 / sum(map(len, parts))) for p in parts]
    )
    classes = torch.cat([torch.full((len(part),), index) for index, part in enumerate(parts)])
    for number in range(1, rounds + 1):
        round_of(coordinator, runners, number)
        for _ in range(steps):
            adam.zero_grad()
            losses = torch.nn.functional.cross_entropy(central(torch.cat(parts)), classes, reduction="none")
            (losses * shares).sum().backward()
            adam.step()
    after = coordinator.rounds.train_messages(rounds + 1, ["anna"])["anna"].slots["selector"]
    for key, value in central.state_dict().items():
        torch.testing.assert_close(after[f"selector.{key}"], value, atol=2e-5, rtol=0)
        assert not torch.equal(value, start[f"selector.{key}"])


@pytest.mark.slow
def test_resuming_keeps_the_moments(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    whole = run(make_job(rounds=4, mixers=slots(), method=fedsm()), table_sites, tmp_path / "whole")
    job = make_job(rounds=4, mixers=slots(), method=fedsm())
    simulate(job, table_sites, tmp_path / "a", tmp_path / "home", stop_after=2)
    simulate(make_job(rounds=4, mixers=slots(), method=fedsm()), table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))


@pytest.mark.parametrize("answering", [["clara"], ["anna", "dora"]])
def test_only_those_who_answer_move_the_selector(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, answering: list[str]
) -> None:
    job = make_job(mixers=slots(), method=fedsm(), min_clients=1)
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1, answering)
    messages = coordinator.rounds.train_messages(2, list(coordinator.roster))
    for message in messages.values():  # everybody, absent or not, gets the same new selector
        for key, tensor in message.slots["selector"].items():
            assert torch.equal(tensor, messages["anna"].slots["selector"][key]) and torch.isfinite(tensor).all()
    round_of(coordinator, runners, 2)  # those who were away are back
    assert coordinator.done == 2


def test_one_hospital_alone(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    alone = {**slots(), "personal": SoftPull(lam=1.0)}  # with K = 1 the range [1/K, 1] is 1
    job = make_job(mixers=alone, method=fedsm(), min_clients=1)
    result = run(job, {"anna": on_its_own(table_sites["anna"])}, tmp_path)
    for key, tensor in result["slots"]["global"].items():
        assert torch.equal(tensor, result["slots"]["personal"][key.replace("global", "personal")])


def test_one_adam_step_by_hand() -> None:
    mixer = ServerAdam(lr=0.1, beta1=0.9, beta2=0.99)
    mixer.start({"w": torch.tensor([1.0, -2.0])})
    info = RoundInfo(("a", "b"), np.array([30.0, 10.0]), (True, True))
    gradients = [{"w": torch.tensor([2.0, 0.0])}, {"w": torch.tensor([-2.0, 4.0])}]
    states, matrix = mixer.mix(gradients, info)  # the mean gradient is [1, 1]; Adam's first step is lr * sign
    assert matrix is None
    torch.testing.assert_close(states[0]["w"], torch.tensor([0.9, -2.1]))
    assert torch.equal(states[0]["w"], states[1]["w"]) and states[0]["w"] is not states[1]["w"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [({"lr": 0.0}, "lr must be above 0"), ({"beta1": 1.0}, r"beta1 must be in \[0, 1\)"), ({"beta2": -0.1}, "beta2")],
)
def test_arguments_out_of_range(arguments: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerAdam(**arguments)


def test_integer_weights_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"'n' is torch\.int64"):
        ServerAdam().start({"n": torch.tensor(3)})


@pytest.mark.parametrize("kind", [Signature(), SmallCnn()])
def test_the_selectors_are_small_and_see_images_and_series(kind: Architecture) -> None:
    image, series = kind.build((1, 48, 48), 4), kind.build((6, 100), 4)
    assert image(torch.rand(2, 1, 48, 48)).shape == image(torch.rand(2, 1, 57, 40)).shape == (2, 4)
    assert series(torch.rand(3, 6, 100)).shape == (3, 4)
    assert sum(p.numel() for p in image.parameters()) * 4 < 200_000  # bytes
    assert not list(image.buffers())
    assert kind != Signature() or kind.build((13,), 3)(torch.zeros(5, 13)).shape == (5, 3)
