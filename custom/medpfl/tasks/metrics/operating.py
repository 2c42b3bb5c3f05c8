# SPDX-License-Identifier: Apache-2.0
"""Sensitivity at a fixed specificity: a threshold that validation cases chose, tried on test cases."""

import math
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from medpfl.data.target import Target
from medpfl.tasks.metrics.certainty import LEVEL
from medpfl.tasks.metrics.sheet import Sheet

SPECIFICITY = 0.9
LEAST = 10
"""Validation patients without the finding; of fewer no threshold could let just a tenth of them pass."""

Unit = Annotated[float, Field(ge=0, le=1)]


class Share(BaseModel):
    """How many of the test cases of a kind were told rightly.

    Attributes:
        value: the share of the cases.
        patients: whose they are.
        low, high: its 95 % interval, which counts patients and not their images, and patients with many more than
            others as the fewer that they weigh like.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: Unit
    patients: NonNegativeInt
    low: Unit
    high: Unit


class OperatingPoint(BaseModel):
    """The rule "it has the finding where its probability is above ``threshold``".

    Attributes:
        label: number of the class (against all others) or of the label that is found.
        negatives: validation patients without it.
        threshold: the least above which at most a tenth of the validation cases without it lie; None where there are
            fewer such patients than ``LEAST``.
        sensitivity, specificity: of the test cases; None without a threshold, or without test cases of that kind.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    label: NonNegativeInt
    negatives: NonNegativeInt
    threshold: Unit | None = None
    sensitivity: Share | None = None
    specificity: Share | None = None


def operating_points(target: Target, validation: Sheet, test: Sheet) -> tuple[OperatingPoint, ...]:
    """Of the second of two classes, of each of more classes, or of each label; none of other answers, or where a
    probability is not finite."""
    if target not in (Target.CLASS, Target.LABELS):
        return ()
    if not all(sheet.answers.ndim == 2 and bool(sheet.answers.isfinite().all()) for sheet in (validation, test)):
        return ()
    return tuple(_points(target, validation, test))


def _points(target: Target, validation: Sheet, test: Sheet) -> Iterator[OperatingPoint]:
    classes = validation.truth.classes
    for label in [1] if target is Target.CLASS and classes == 2 else range(classes):
        has, given, patient = _seen(target, validation, label)
        negatives = len(np.unique(patient[~has]))
        if negatives < LEAST:
            yield OperatingPoint(label=label, negatives=negatives)
            continue
        highest = np.sort(given[~has])[::-1]
        threshold = float(highest[math.floor((1 - SPECIFICITY) * len(highest) + 1e-9)])
        has, given, patient = _seen(target, test, label)
        found = given > threshold
        yield OperatingPoint(
            label=label,
            negatives=negatives,
            threshold=threshold,
            sensitivity=_share(found[has], patient[has]),
            specificity=_share(~found[~has], patient[~has]),
        )


def _seen(target: Target, sheet: Sheet, label: int) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.int64]]:
    """Of the cases of which it is known: whether they have the finding, its probability, and whose they are."""
    truth = sheet.truth.targets[:].numpy()
    column = truth == label if target is Target.CLASS else truth[:, label]
    known = np.isfinite(column)
    given = sheet.answers[:, label].numpy().astype(np.float64)
    return column[known] > 0, given[known], sheet.patient[known]


def _share(right: NDArray[np.bool_], patient: NDArray[np.int64]) -> Share | None:
    """With the exact interval of Clopper and Pearson (Biometrika 26(4), 1934), as if each patient were one case. Where
    some have more cases than others, the share is rather theirs, as of fewer patients: (sum m)^2 / sum m^2 of them
    (Kish, Survey Sampling, 1965) with m cases each."""
    from scipy.special import betaincinv

    if not len(right):
        return None
    cases = np.unique(patient, return_counts=True)[1].astype(np.float64)
    value, patients = float(right.mean()), float(cases.sum() ** 2 / (cases**2).sum())
    hits, misses, tail = value * patients, (1 - value) * patients, (1 - LEVEL) / 2
    low = float(betaincinv(hits, misses + 1, tail)) if hits else 0.0
    high = float(betaincinv(hits + 1, misses, 1 - tail)) if misses else 1.0
    return Share(value=value, patients=len(cases), low=low, high=high)
