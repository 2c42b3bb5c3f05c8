# SPDX-License-Identifier: Apache-2.0
"""What a hospital's page says of its test cases, from the file of them that lies beside the chosen model."""

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medpfl.core.errors import MedPFLError
from medpfl.tasks.metrics.calibration import BINS, reliability
from medpfl.tasks.metrics.decision import Decided, decision_curve
from medpfl.tasks.metrics.measure import Measure

SHOWN = 5
"""Cases that are listed."""
THRESHOLDS = tuple(number / 20 for number in range(1, 20))
_LABELLED = ("case", "class", "predicted", "probability")
Row = Mapping[str, str]


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
        worst: where it failed: the worst score first, or the wrong answer that it was surest of.
        middle, best: of cases with a score of their own; None of others.
        bins: of a classifier, those that hold cases; ``decisions``: of two classes.
    """

    worst: tuple[Listed, ...] = ()
    middle: Listed | None = None
    best: Listed | None = None
    bins: tuple[Bin, ...] = ()
    decisions: tuple[Decided, ...] = ()


def read_cases(path: Path, score: str, measure: Measure, classes: list[str]) -> Cases:
    """What the file tells; nothing of a kind of answer that it knows no picture of, and where there is no file.

    Args:
        score: the metric by which models were chosen.

    Raises:
        MedPFLError: the file cannot be read, or is not what was written.
    """
    if not path.is_file():
        return Cases()
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        if rows and tuple(rows[0]) == _LABELLED:
            return _labelled(rows, classes)
        return _scored([row for row in rows if score in row], score, measure)
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise MedPFLError(f"{path}: not the test cases that a job wrote ({type(error).__name__})") from error


def _scored(rows: Sequence[Row], score: str, measure: Measure) -> Cases:
    """Of tasks whose score is one of cases."""
    values = {row["case"]: float(row[score]) for row in rows}
    known = sorted(
        (name for name in values if math.isfinite(values[name])), key=lambda name: -measure.rank(values[name])
    )
    if not known:
        return Cases()
    listed = [Listed(name, measure.text(values[name])) for name in known]
    return Cases(worst=tuple(listed[:SHOWN]), middle=listed[len(listed) // 2], best=listed[-1])


def _labelled(rows: Sequence[Row], classes: list[str]) -> Cases:
    top = np.array([float(row["probability"]) for row in rows])
    truth, found = (np.array([int(row[name]) for row in rows]) for name in ("class", "predicted"))
    if not np.isfinite(top).all():
        return Cases()
    surest = [place for place in np.argsort(-top, kind="stable").tolist() if truth[place] != found[place]]
    worst = [
        Listed(rows[place]["case"], f"{classes[found[place]]} with {top[place]:.2f}, is {classes[truth[place]]}")
        for place in surest[:SHOWN]
    ]
    counts, hits, given = reliability(top, truth == found)
    bins = [
        Bin(int(counts[place]), float(given[place] / counts[place]), float(hits[place] / counts[place]))
        for place in range(BINS)
        if counts[place]
    ]
    decisions: list[Decided] = []
    if len(classes) == 2:
        decisions = decision_curve(truth == 1, np.where(found == 1, top, 1 - top), THRESHOLDS)
    return Cases(worst=tuple(worst), bins=tuple(bins), decisions=tuple(decisions))
