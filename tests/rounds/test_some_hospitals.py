# SPDX-License-Identifier: Apache-2.0
"""Rounds that ask only some of the hospitals."""

import dataclasses
import json
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from medpfl.core.codecs import STC
from medpfl.core.errors import ConfigError, PolicyRefused
from medpfl.core.mixers import CoordinateMedian, Mixer, StatisticsDistance, TrimmedMean
from medpfl.data.policy import Policy
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.job.sampling import asked_per_round, drawn
from medpfl.job.settings import Settings
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedbn import FedBN
from medpfl.results.files import read_mixing, read_training
from medpfl.results.presence import presence
from medpfl.rounds.hospital import policy
from medpfl.rounds.protocol.requests import InitRequest
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from tools import assert_same, normed, outcome, run

Make = Callable[..., Job]
SITES = [f"site-{number:02d}" for number in range(20)]


def test_the_draw_depends_on_seed_and_round_alone_and_asks_each_equally_often() -> None:
    rounds = [drawn(SITES, 5, 0, number, SITES) for number in range(1, 2001)]
    assert rounds[6] == drawn(list(SITES), 5, 0, 7, SITES[::-1])
    assert rounds[6] != drawn(SITES, 5, 1, 7, SITES) and rounds[6] != rounds[7]
    assert all(len(set(one)) == 5 and one == sorted(one) for one in rounds)
    often = [sum(site in one for one in rounds) for site in SITES]
    assert min(often) > 430 and max(often) < 570  # 500 expected, standard deviation 19


def test_who_cannot_be_reached_is_replaced_and_nobody_else() -> None:
    first = drawn(SITES, 5, 0, 1, SITES)
    second = drawn(SITES, 5, 0, 1, [site for site in SITES if site != first[0]])
    assert len(second) == 5 and set(first[1:]) < set(second)
    assert drawn(SITES, 5, 0, 1, first[:2]) == first[:2]


@pytest.mark.parametrize(("given", "least", "expected"), [(None, 2, None), (7, 2, 7), (0.25, 2, 5), (0.01, 3, 3)])
def test_how_many_are_asked(given: int | float | None, least: int, expected: int | None) -> None:
    assert asked_per_round(Settings(rounds=1, hospitals_per_round=given), least, 20) == expected


@pytest.mark.parametrize("given", [0, -1, 0.0, 1.0, 2.5])
def test_other_numbers_are_refused(given: float) -> None:
    with pytest.raises(ConfigError, match="hospitals_per_round must be a whole number of at least 1, or a share"):
        Settings(rounds=1, hospitals_per_round=given)


def test_fewer_than_must_answer_are_refused(make_job: Make) -> None:
    with pytest.raises(ConfigError, match=r"hospitals_per_round is 1, and meta.json's min_clients, .* 2: ask more"):
        make_job(hospitals_per_round=1, min_clients=2)


@pytest.mark.parametrize("mixer", [CoordinateMedian(), TrimmedMean(0.25)], ids=repr)
@pytest.mark.parametrize(("asked", "told"), [(2, True), (0.1, True), (3, False)])
def test_a_median_of_rounds_that_ask_two_is_refused(
    mixer: Mixer, asked: int | float, told: bool, make_job: Make, tmp_path: Path
) -> None:
    """Of two hospitals it is the mean, which either can move as far as it likes; of a roster of two it was refused."""
    method = FedAvg(lr=0.1, batch_size=8)
    job = make_job(method=method, mixers={"fedavg": mixer}, hospitals_per_round=asked, min_clients=2)
    refused = rf"component 'fedavg': {type(mixer).__name__} needs at least 3 hospitals in a round, and .* asks 2: "
    with pytest.raises(ConfigError, match=refused) if told else nullcontext():
        Coordinator(job, SITES, tmp_path / "home", tmp_path / "results").close()


def test_without_it_a_run_keeps_its_key() -> None:
    assert "hospitals_per_round" not in Settings(rounds=1).of_run()
    assert Settings(rounds=1, hospitals_per_round=2).of_run()["hospitals_per_round"] == 2


def test_a_hospital_counts_those_that_a_round_asks() -> None:
    header = InitRequest(job="j", rounds=1, roster=("a", "b", "c"), seed=0, threads=1, slots={}, gradients=(), asked=2)
    policy.check_start(Policy(least_hospitals=2), header)
    with pytest.raises(PolicyRefused, match=r"least_hospitals.*at least 3 hospitals in a job; this job has 2"):
        policy.check_start(Policy(least_hospitals=3), header)


@pytest.mark.slow
def test_those_who_are_drawn_train_and_all_are_tested(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    result = run(make_job(rounds=5, hospitals_per_round=2, min_clients=2), table_sites, tmp_path)
    summary = read_training(tmp_path / "results")
    lines = [json.loads(text) for text in (tmp_path / "results" / "metrics.jsonl").read_text().splitlines()]
    asked = {line["round"]: line["asked"] for line in lines if line["split"] == "round"}
    assert asked == {number: drawn(sorted(table_sites), 2, 0, number, sorted(table_sites)) for number in range(1, 6)}
    trained = {number: sorted(one["site"] for one in lines if one["split"] == "train" and one["round"] == number)
               for number in asked}  # fmt: skip
    assert trained == asked
    assert {line["site"] for line in result["test"]} == set(table_sites)
    assert {found["round"] for found in result["best"].values()} == {5}  # rounds that some validate are nobody's best
    assert [event.event for event in summary.events] == ["every round asks 2 of 4 hospitals, drawn by the seed"]
    assert summary.asked == summary.trained
    assert all(text.endswith(" of 5") for text in presence(summary).values())
    matrices = read_mixing(tmp_path / "results")
    for number, sites in asked.items():  # nobody else moves: SoftPull's rows of who was not asked are the identity
        matrix = matrices[f"model/{number:05d}"]
        still = [site for row, site in enumerate(sorted(table_sites)) if matrix[row, row] == 1.0]
        assert still == [site for site in sorted(table_sites) if site not in sites]


@pytest.mark.slow
def test_the_same_folder_again_gives_the_same_run(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """A hospital that is first asked late must not take up what it kept of the earlier run."""
    job = make_job(
        method=FedBN(lr=0.1, batch_size=8), mixers={}, task=normed(), rounds=6, hospitals_per_round=2, min_clients=2
    )
    first = run(job, table_sites, tmp_path)
    assert_same(first, run(job, table_sites, tmp_path))


@pytest.mark.parametrize("killed_after", [1, 3])
@pytest.mark.slow
def test_resumed_equals_uninterrupted(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, killed_after: int
) -> None:
    job = make_job(rounds=5, hospitals_per_round=0.5, min_clients=1)
    whole = run(job, table_sites, tmp_path / "whole")
    simulate(job, table_sites, tmp_path / "a", tmp_path / "home", stop_after=killed_after)
    coordinator = simulate(job, table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))
    assert not any("starts anew" in event.event for event in coordinator.record.events)


@pytest.mark.slow
def test_statistics_are_asked_of_all(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """A graph or weights that are made once would else leave out for ever who is not in the first draw."""
    job = make_job(
        method=FedAP(lr=0.1, batch_size=8, batch_norm="shared"),
        mixers={"model": StatisticsDistance(statistics="head_inputs")},
        rounds=3,
        hospitals_per_round=2,
        min_clients=2,
    )
    coordinator = simulate(job, table_sites, tmp_path / "results", tmp_path / "home")
    weights = coordinator.copies.states()["model"]["distances"]
    assert bool(weights.isfinite().all())


@pytest.mark.slow
def test_codecs_that_remember_work_with_hospitals_that_are_not_asked(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(rounds=5, hospitals_per_round=2, min_clients=2)
    job = dataclasses.replace(job, codecs=Codecs(STC(), STC()))
    coordinator = simulate(job, table_sites, tmp_path / "results", tmp_path / "home")
    assert len(coordinator.record.events) == 1
