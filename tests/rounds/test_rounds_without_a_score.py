# SPDX-License-Identifier: Apache-2.0
"""Which round is a model's best one where hospitals cannot always give a score."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from medpfl.job import Job
from medpfl.results.line import MetricLine
from medpfl.results.record import Record
from medpfl.results.schema import ValidationLine
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.loop import Exchange, carry, one_round
from medpfl.rounds.messages import Message
from medpfl.rounds.server.best import BestRounds
from medpfl.tasks.metrics.measure import Measure
from tools import exchange, pieces, ready, retell

SCORES: list[dict[str, float | None]] = [
    {"a": 0.6, "b": 0.6, "c": None},
    {"a": 0.9, "b": None, "c": None},  # b's models broke
    {"a": 0.7, "c": None},  # b is away
]
"""Of rounds 1, 2 and 3, by hospital: ``c`` never had one, as where all its validation cases are of one class."""


def test_a_round_that_broke_a_hospitals_models_is_nobodys_best() -> None:
    record = Record("job", ("a", "b", "c"))
    rounds = BestRounds(record, "auc", Measure())
    for number, said in enumerate(SCORES, start=1):
        for site, value in said.items():
            line = MetricLine(model="personal", split="validation", round=number, metrics={"auc": value})
            rounds.take(site, [line])
        rounds.choose(number)
    means = {
        line.round: line.metrics["auc"]
        for line in record.lines
        if isinstance(line, ValidationLine) and line.site == "mean"
    }
    assert means == {1: 0.6, 3: (0.7 + 0.6) / 2}
    assert rounds.best["personal"].round == 3


LATE: list[dict[str, float | None]] = [
    {"a": 0.9, "b": 0.9},
    {"a": 0.92, "b": 0.92},
    {"a": 0.94, "b": 0.94, "c": 0.5},  # c has been away so far
    {"a": 0.94, "b": 0.94, "c": 0.7},
    {"a": 0.94, "b": 0.94, "c": 0.6},
]


def test_rounds_before_a_hospital_came_are_not_compared_with_those_after() -> None:
    """The mean of a and b alone, whose cases are easy, would be the best one for good, in a round of which c holds no
    model."""
    rounds = BestRounds(Record("job", ("a", "b", "c")), "auc", Measure())
    best = []
    for number, said in enumerate(LATE, start=1):
        for site, value in said.items():
            line = MetricLine(model="personal", split="validation", round=number, metrics={"auc": value})
            rounds.take(site, [line])
        rounds.choose(number)
        best.append(rounds.best["personal"].round)
    assert best == [1, 2, 3, 4, 4]


BROKE: list[dict[str, float | None]] = [
    {"anna": 0.9, "berta": 0.9, "clara": None},
    {"anna": 0.9, "berta": None, "clara": 0.5},  # clara has a first score where berta's models broke
    {"anna": 0.9, "berta": 0.9, "clara": 0.5},
    {"anna": 0.9, "berta": 0.9, "clara": 0.4},
]


def with_scores(
    asked: Exchange, runners: dict[str, SiteRunner], score: str, said: dict[str, float | None]
) -> dict[str, Message[Any]]:
    """The hospitals' answers, with these scores of every model."""
    replies = exchange(runners, asked.messages)
    for site, reply in replies.items():
        lines = [line.model_copy(update={"metrics": {score: said[site]}}) for line in reply.header.metrics]
        retell(reply, metrics=tuple(lines))
    return replies


@pytest.mark.parametrize("killed_after", [0, 2, 3, 4])
def test_so_it_is_in_a_run_that_was_taken_up(
    killed_after: int, make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job, sites = make_job(rounds=5), {name: table_sites[name] for name in BROKE[0]}
    coordinator, runners = pieces(job, sites, tmp_path)
    ready(coordinator, runners)
    for number, said in enumerate([{}, *BROKE], start=1):  # with a round's training come the scores of the one before
        answer = partial(with_scores, runners=runners, score=job.task.score, said=said)
        carry(one_round(coordinator, number, coordinator.joined), answer)
        if number == killed_after:
            for piece in (coordinator, *runners.values()):
                piece.close()
            coordinator, runners = pieces(job, sites, tmp_path)
            ready(coordinator, runners)
            assert coordinator.done == number
    assert {found.round for found in coordinator.best.values()} == {3}
