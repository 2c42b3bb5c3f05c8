# SPDX-License-Identifier: Apache-2.0
"""Metrics of several labels a case: N x C probabilities against N x C ones and zeros, NaN where a label is not known.
NaN where a probability is none."""

import math
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.contract import Metric, ThresholdMetric
from medpfl.tasks.metrics.roc import area_under_roc

_THRESHOLDS = [number / 20 for number in (10, 11, 9, 12, 8, 13, 7, 14, 6, 15, 5, 16, 4, 17, 3, 18, 2, 19, 1)]
"""What validation chooses from: the nearest to 1/2 first, which equal ones are decided by."""

Values = NDArray[np.float64]


def _given(decisions: Tensor, samples: Samples) -> tuple[Values, Values] | None:
    """Probabilities and truth, N x C; None where a probability is no number."""
    found = decisions.double().numpy()
    return (found, samples.targets[:].double().numpy()) if np.isfinite(found).all() else None


class MacroAUC(Metric):
    """The mean over the labels of the area under the ROC curve; a label that no case has, or every case, is left out.
    NaN where none is left."""

    name = "macro_auc"
    range = (0.0, 1.0)

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        if (given := _given(decisions, samples)) is None:
            return math.nan
        areas = []
        for found, truth in zip(given[0].T, given[1].T, strict=True):
            known = ~np.isnan(truth)
            if len(np.unique(truth[known])) == 2:
                areas.append(area_under_roc(truth[known] == 1, found[known]))
        return float(np.mean(areas)) if areas else math.nan


class _AtThreshold(ThresholdMetric):
    """Of decisions at one threshold for all labels: that of 0.05, 0.10, ... 0.95 at which macro F1 is largest on the
    validation cases, of equal ones the nearest to 1/2."""

    range = (0.0, 1.0)

    def __init__(self, threshold: float = 0.5):
        self.threshold = threshold

    def at(self, threshold: float) -> Self:
        return type(self)(threshold)

    def choose(self, decisions: Tensor, samples: Samples) -> float:
        if (given := _given(decisions, samples)) is None:
            return 0.5
        values = [_macro_f1(given[0] >= one, given[1]) for one in _THRESHOLDS]
        best = max((value for value in values if not math.isnan(value)), default=math.nan)
        return 0.5 if math.isnan(best) else _THRESHOLDS[values.index(best)]


class MacroF1(_AtThreshold):
    """The mean of F1 = 2 TP / (2 TP + FP + FN) over the labels that some case has or is said to have. NaN where no
    case has any: what is said there could only be wrong, and who rightly says nothing would alone have no value."""

    name = "macro_f1"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        given = _given(decisions, samples)
        return math.nan if given is None else _macro_f1(given[0] >= self.threshold, given[1])


class ExactMatch(_AtThreshold):
    """Share of the cases whose labels are all decided rightly, of those that are known; cases of which none is known
    are left out. NaN where no case is left."""

    name = "exact_match"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        if (given := _given(decisions, samples)) is None:
            return math.nan
        known = ~np.isnan(given[1])
        right = ((given[0] >= self.threshold) == (given[1] == 1)) | ~known
        there = known.any(axis=1)
        return float(right.all(axis=1)[there].mean()) if there.any() else math.nan


def _macro_f1(said: NDArray[np.bool_], truth: Values) -> float:
    """scikit-learn's ``f1_score`` label by label over the known cases; it takes a second for 19 thresholds."""
    there, known = truth == 1, ~np.isnan(truth)
    twice: Any = 2 * (said & there).sum(axis=0)
    whole = twice + (said & ~there & known).sum(axis=0) + (~said & there).sum(axis=0)
    return float((twice[whole > 0] / whole[whole > 0]).mean()) if there.any() else math.nan


SEVERAL_METRICS: tuple[Metric, ...] = (MacroAUC(), MacroF1(), ExactMatch())
