# SPDX-License-Identifier: Apache-2.0
"""Which round is a model's best one where hospitals cannot always give a score."""

from medpfl.results.line import MetricLine
from medpfl.results.record import Record
from medpfl.results.schema import ValidationLine
from medpfl.rounds.server.best import BestRounds
from medpfl.tasks.metrics.measure import Measure

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
