# SPDX-License-Identifier: Apache-2.0
"""What a method and its server component may exchange besides a round's weights: statistics of the hospitals' data
before a round, and further exchanges of a slot within one."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baselines import assert_resumes
from exchanging import Asked, ByMean, slots
from medpfl.core.errors import ConfigError, OutOfMemory
from medpfl.job import Job
from medpfl.methods.contract import Build
from medpfl.methods.site import Site
from medpfl.results.schema import TrainingLine
from medpfl.rounds.hospital import local_rounds
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Message, Slots
from medpfl.rounds.privacy import Guard
from medpfl.rounds.protocol.replies import Reply, StatisticsReply
from medpfl.rounds.protocol.requests import RefineRequest, Request
from medpfl.rounds.server.quorum import QuorumLost
from medpfl.rounds.simulate import simulate
from tools import exchange, pieces, ready, run

Make = Callable[..., Job]


@pytest.mark.slow
def test_statistics_reach_the_component_before_the_round(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(rounds=3, mixers=slots(), method=Asked(batch_size=8))
    run(job, table_sites, tmp_path)
    with np.load(tmp_path / "results" / "mixing.npz") as stored:
        first = stored["model/00001"]
    coordinator, runners = pieces(make_job(method=Asked(), mixers=slots()), table_sites, tmp_path / "2")
    ready(coordinator, runners)
    means = [runners[s].data.splits["train"].inputs[:].double().mean(dim=0) for s in coordinator.roster]
    near = torch.exp(-torch.cdist(torch.stack(means), torch.stack(means)))
    np.testing.assert_allclose(first, near / near.sum(dim=1, keepdim=True), atol=1e-12)


@pytest.mark.slow
def test_refined_slots_go_round_again(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    rounds = 2
    result = run(make_job(rounds=rounds, mixers=slots(), method=Asked(batch_size=8)), table_sites, tmp_path)
    coordinator, runners = pieces(make_job(method=Asked(), mixers=slots()), table_sites, tmp_path / "2")
    ready(coordinator, runners)
    sizes = np.array([coordinator.sizes[site]["train"] for site in coordinator.roster])
    step = float((sizes / sizes.sum()) @ np.arange(1, 5))  # the mean of what the hospitals add in step 1
    # Training sets the note to zero; then steps 1, 2 (and 3, in the last round) each add step times the mean.
    note = result["slots"]["note"]["*::note.weight"].item()
    assert note == pytest.approx((1 + 2 + 3) * step, rel=1e-6)
    traffic = json.loads((tmp_path / "results" / "bytes.json").read_text())
    weights = sum(p.numel() for p in runners["anna"].models["model"].parameters())
    for number, times in ((1, 3), (2, 4)):  # the model once, the note of one float with every exchange
        lines = [line for line in traffic if line["round"] == number and line["site"] == "anna"]
        assert [line["raw"] for line in lines] == [4 * (weights + times)] * 2
    before = [line for line in traffic if line["round"] == 0 and line["direction"] == "from_site"]
    assert [line["raw"] for line in before] == [3 * 8] * 4  # three float64 means


@dataclass(frozen=True, kw_only=True)
class WithItsOwn(Asked):
    """Also changes, in every exchange, a network that never leaves."""

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {**super().models(build), "own": nn.Linear(1, 1, bias=False)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {slot: keys for slot, keys in super().slots(models).items() if slot != "own"}

    def refine(self, site: Site, step: int) -> None:
        super().refine(site, step)
        with torch.no_grad():
            site.models["own"].weight += 1


def test_what_an_exchange_changed_is_kept_once_its_noise_is_counted(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a round's training: a hospital that is killed between the two, and goes on from its file, holds nothing
    that no account of noise has."""
    order: list[str] = []
    release, save = Guard.release, local_rounds.save_refined

    def released(self: Guard, sent: Slots, received: Slots, header: Any, step: int = 0) -> Slots:
        order.append(f"counted {step}")
        return release(self, sent, received, header, step)

    def saved(files: Any, round_number: int, private: Any, scalers: Any) -> None:
        order.append("kept")
        save(files, round_number, private, scalers)

    monkeypatch.setattr(Guard, "release", released)
    monkeypatch.setattr(local_rounds, "save_refined", saved)
    run(make_job(rounds=1, mixers=slots(), method=WithItsOwn(batch_size=8)), table_sites, tmp_path)
    of_each = [order[k : k + 2] for k in range(len(table_sites), len(order), 2)]
    assert order[: len(table_sites)] == ["counted 0"] * len(table_sites)
    assert sorted(of_each) == [[f"counted {step}", "kept"] for step in (1, 2, 3) for _ in table_sites]


@pytest.mark.slow
def test_resuming_keeps_statistics_and_refined_slots(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    assert_resumes(lambda: make_job(rounds=4, mixers=slots(), method=Asked(batch_size=8)), table_sites, tmp_path)


def begun(make_job: Make, sites: dict[str, Path], folder: Path, least: int = 2) -> tuple[Any, Any]:
    job = make_job(rounds=3, mixers=slots(), method=Asked(batch_size=8), min_clients=least)
    coordinator, runners = pieces(job, sites, folder)
    ready(coordinator, runners)
    return coordinator, runners


def test_a_hospital_that_fails_in_between_is_left_out(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begun(make_job, table_sites, tmp_path)
    coordinator.rounds.take_statistics(
        1, exchange(runners, coordinator.rounds.statistics_messages(1, coordinator.joined))
    )
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    del replies["dora"]
    assert coordinator.rounds.take_train(1, replies) == ["anna", "berta", "clara"]
    assert coordinator.done == 0
    messages = coordinator.rounds.refine_messages()
    assert list(messages) == ["anna", "berta", "clara"]
    assert list(messages["anna"].slots) == ["note"] and messages["anna"].header.step == 1
    replies = exchange(runners, messages)
    del replies["berta"]
    replies["clara"].slots["note"]["note.weight"][0] = torch.nan
    with pytest.raises(QuorumLost, match=r"1 of 4 hospitals sent a usable update \(anna\).*NaN"):
        coordinator.rounds.take_refined(replies)


def test_statistics_that_cannot_be_right_are_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begun(make_job, table_sites, tmp_path, least=1)
    replies = exchange(runners, coordinator.rounds.statistics_messages(1, coordinator.joined))
    replies["berta"].slots["means"]["mean"][0] = torch.inf
    replies["clara"].slots["means"]["mean"] = torch.zeros(5).double()
    replies["dora"] = Message(StatisticsReply(), {"other": {}})
    coordinator.rounds.take_statistics(1, replies)
    told = "; ".join(event.event for event in coordinator.record.events)
    assert "berta: statistic 'means::mean' must hold finite float64 values only" in told
    assert "clara: entry 'means::mean': expected shape [3] torch.float64, got [5]" in told
    assert "dora: expected the statistics means, got other" in told
    with pytest.raises(QuorumLost, match="0 of 4 hospitals sent usable statistics"):
        coordinator.rounds.take_statistics(1, {})


def test_a_method_without_such_statistics_says_so(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={"model": ByMean()})
    with pytest.raises(ConfigError, match="wants the statistics 'means', which SoftPull does not have"):
        run(job, table_sites, tmp_path)


def test_who_fails_in_between_misses_the_rest_of_the_round_in_one_process_too(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds nothing of the round any more, and says so at the next exchange; the other hospitals go on."""
    handle = SiteRunner.handle

    def short(runner: SiteRunner, message: Message[Request]) -> Message[Reply]:
        header = message.header
        if runner.name == "berta" and isinstance(header, RefineRequest) and (header.round, header.step) == (1, 1):
            raise OutOfMemory("this hospital's memory does not suffice")
        return handle(runner, message)

    monkeypatch.setattr(SiteRunner, "handle", short)
    job = make_job(rounds=2, mixers=slots(), method=Asked(batch_size=8))
    found = simulate(job, table_sites, tmp_path / "results", tmp_path / "home", test=False)
    assert found.done == 2
    events = [event.event for event in found.record.events if event.site == "berta"]
    assert events[0] == "failed: this hospital's memory does not suffice"
    assert "failed: berta is asked for exchange 2 of round 1, of which it holds nothing now" in events[1]
    trained = [line.site for line in found.record.lines if isinstance(line, TrainingLine) and line.round == 2]
    assert trained == found.joined
