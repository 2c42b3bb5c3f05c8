# SPDX-License-Identifier: Apache-2.0
"""What a hospital's page says of its test cases, from the file of them that lies beside the chosen model."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import MedPFLError
from medpfl.core.formulas import as_it_was
from medpfl.data.numbers import for_people
from medpfl.tasks.metrics.calibration import BINS, reliability
from medpfl.tasks.metrics.decision import Decided, decision_curve
from medpfl.tasks.metrics.digits import digits
from medpfl.tasks.metrics.measure import Measure

SHOWN = 5
"""Cases that are listed."""
THRESHOLDS = tuple(number / 20 for number in range(1, 20))
_LABELLED = ("case", "class", "predicted", "probability")
_CASE = "case"
"""The column that every task's file has."""
_LEAST = 1e-12
"""Probability of what is true that a loss is told of."""
Row = Mapping[str, str | float]


@dataclass(frozen=True)
class Bin:
    """Cases whose probabilities are alike: how many, their mean probability, and the share of right answers."""

    count: int
    given: float
    right: float


@dataclass(frozen=True)
class Listed:
    """A case of the list: its name at the hospital, and what is said of it."""

    case: str
    said: str


@dataclass(frozen=True)
class Cases:
    """Of the chosen model's test cases.

    Attributes:
        worst: where it failed: the worst score first, the largest error, or the wrong answer that it was surest of.
        middle, best: of cases with a score or an error of their own; None of one class a case.
        of: what the answers are; "score": cases have scores of their own.
        bins: of a classifier, those that hold cases, of several labels those that hold answers; ``decisions``: of two
            classes.
    """

    worst: tuple[Listed, ...] = ()
    middle: Listed | None = None
    best: Listed | None = None
    of: Literal["class", "labels", "value", "score"] = "score"
    bins: tuple[Bin, ...] = ()
    decisions: tuple[Decided, ...] = ()


def read_cases(path: Path, score: str, measure: Measure, classes: list[str], count: int | None = None) -> Cases:
    """What the file tells; nothing of a kind of answer that it knows no picture of, and where there is no file.

    Args:
        score: the metric by which models were chosen.
        count: of the test cases that the model tells of; None: it tells none.

    Raises:
        MedPFLError: the file cannot be read, or is not what was written: a program that shows tables may have saved it
            with another separator, or only the rows that it showed.
    """
    if not path.is_file():
        return Cases()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            rows = [{**row, _CASE: as_it_was(row[_CASE])} if row.get(_CASE) else row for row in reader]
        if _CASE not in (reader.fieldnames or ()):
            raise MedPFLError(f"{path}: not the test cases that a job wrote: its columns are {reader.fieldnames}")
        if count is not None and len(rows) != count:
            raise MedPFLError(f"{path}: not the test cases that a job wrote: expected {count}, got {len(rows)}")
        return _told(rows, score, measure, classes)
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise MedPFLError(f"{path}: not the test cases that a job wrote ({type(error).__name__})") from error


def ranked(rows: Sequence[Row], score: str, measure: Measure, classes: Sequence[str]) -> list[Listed]:
    """The cases of an evaluation, the worst first, each with what is said of it: by their score where the score is one
    of cases, else by how far the answer is from the truth. None where neither is told, as of survival.

    Args:
        rows: ``Evaluation.cases``, or the same read from their file.
        score: the metric by which models were chosen.
    """
    if not rows:
        return []
    match _kind(rows, score):
        case "class":
            found = [_of_class(row, classes) for row in rows]
        case "labels":
            found = [_of_labels(row, classes) for row in rows]
        case "value":
            found = [_of_value(row) for row in rows]
        case "score":
            scored = [(str(row["case"]), float(row[score])) for row in rows if score in row]
            d = digits(value for _, value in scored)
            found = [
                (measure.rank(value), case, measure.text(value, d)) for case, value in scored if math.isfinite(value)
            ]
    known = [one for one in found if math.isfinite(one[0])]
    return [Listed(case, said) for _, case, said in sorted(known, key=lambda one: -one[0])]


def _kind(rows: Sequence[Row], score: str) -> Literal["class", "labels", "value", "score"]:
    columns = rows[0].keys()
    if score in columns:
        return "score"
    if columns >= set(_LABELLED):  # metrics of cases may stand beside these
        return "class"
    if {"label_0", "p_0"} <= columns:
        return "labels"
    return "value" if {"value", "predicted"} <= columns else "score"


def _of_class(row: Row, classes: Sequence[str]) -> tuple[float, str, str]:
    """Wrong answers first, those that the model was surest of; then right ones, the surest last."""
    truth, found, given = int(row["class"]), int(row["predicted"]), float(row["probability"])
    if truth == found:
        return -given, str(row["case"]), f"{classes[found]} with {given:.2f}, right"
    return 1 + given, str(row["case"]), f"{classes[found]} with {given:.2f}, is {classes[truth]}"


def _of_labels(row: Row, classes: Sequence[str]) -> tuple[float, str, str]:
    """By the mean logarithmic loss over its known labels; what is said is of the one that is furthest off."""
    off = []
    for label, name in enumerate(classes):
        if str(row[f"label_{label}"]):
            there, given = float(row[f"label_{label}"]) > 0, float(row[f"p_{label}"])
            off.append((abs(there - given), f"{name} with {given:.2f}, is {'' if there else 'not '}there"))
    if not off:
        return math.nan, str(row["case"]), ""
    losses = [-math.log(max(1 - far, _LEAST)) for far, _ in off]
    return sum(losses) / len(losses), str(row["case"]), max(off)[1]


def _of_value(row: Row) -> tuple[float, str, str]:
    value, found = float(row["value"]), float(row["predicted"])
    return abs(value - found), str(row["case"]), f"{for_people(found)}, is {for_people(value)}"


def _told(rows: Sequence[Row], score: str, measure: Measure, classes: list[str]) -> Cases:
    listed = ranked(rows, score, measure, classes)
    if not listed:
        return Cases()
    kind = _kind(rows, score)
    if kind == "class":
        return _of_classes(rows, listed, classes)
    bins: tuple[Bin, ...] = ()
    if kind == "labels":
        pairs = [
            (float(row[f"p_{label}"]), float(row[f"label_{label}"]) > 0)
            for row in rows
            for label in range(len(classes))
            if str(row[f"label_{label}"])
        ]
        bins = _bins(np.array([given for given, _ in pairs]), np.array([there for _, there in pairs]))
    return Cases(tuple(listed[:SHOWN]), listed[len(listed) // 2], listed[-1], kind, bins)


def _of_classes(rows: Sequence[Row], listed: list[Listed], classes: list[str]) -> Cases:
    top = np.array([float(row["probability"]) for row in rows])
    truth, found = (np.array([int(row[name]) for row in rows]) for name in ("class", "predicted"))
    if not np.isfinite(top).all():
        return Cases()
    wrong = int((truth != found).sum())
    decisions: list[Decided] = []
    if len(classes) == 2:
        decisions = decision_curve(truth == 1, np.where(found == 1, top, 1 - top), THRESHOLDS)
    return Cases(
        worst=tuple(listed[: min(SHOWN, wrong)]),
        of="class",
        bins=_bins(top, truth == found),
        decisions=tuple(decisions),
    )


def _bins(given: NDArray[np.float64], right: NDArray[np.bool_]) -> tuple[Bin, ...]:
    counts, hits, total = reliability(given, right)
    return tuple(
        Bin(int(counts[place]), float(total[place] / counts[place]), float(hits[place] / counts[place]))
        for place in range(BINS)
        if counts[place]
    )
