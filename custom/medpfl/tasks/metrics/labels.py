# SPDX-License-Identifier: Apache-2.0
"""Metrics of class probabilities, N x C, against N class indices."""

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.data.samples import Samples, SiteData
from medpfl.tasks.metrics.calibration import Calibration, calibration
from medpfl.tasks.metrics.contract import Metric, ThresholdMetric
from medpfl.tasks.metrics.measure import Direction
from medpfl.tasks.metrics.roc import area_under_roc


def _right(decisions: Tensor, samples: Samples) -> NDArray[np.float64]:
    """1 of each sample whose most probable class is the right one, 0 of the others; NaN of all where a probability is
    NaN, whose place NumPy's argmax returns: of a model that broke, the first class. (scikit-learn's accuracy and recall
    are these means after checks of 3 ms, which was a third of a small hospital's round.)"""
    probability = decisions.numpy()
    if not np.isfinite(probability).all():
        return np.full(len(probability), np.nan)
    right: NDArray[np.bool_] = probability.argmax(axis=1) == samples.targets[:].numpy()
    return right.astype(np.float64)


def _share(counts: NDArray[np.int64], right: NDArray[np.float64]) -> NDArray[np.float64]:
    """Of each of B resamples, B x N counts, the share of what is right; NaN of an empty one."""
    return _ratio(counts @ right, counts.sum(axis=1))


def _ratio(part: NDArray[np.float64], whole: NDArray[np.float64]) -> NDArray[np.float64]:
    found: NDArray[np.float64] = np.divide(part, whole, out=np.full(len(whole), np.nan), where=whole > 0)
    return found


def _mean_of_known(each: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    """Mean of the values that are there, resample by resample; NaN where none is."""
    values = np.stack(each)
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0).sum(axis=0), known.sum(axis=0))


def _areas(
    probability: NDArray[np.float32], positive: NDArray[np.bool_], counts: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Area under the ROC curve of each of B resamples, B x N counts: the share of the pairs of a positive and a
    negative in which the positive has the higher probability, equal ones counting half (Mann and Whitney)."""
    order = np.argsort(probability, kind="stable")
    starts = np.unique(probability[order], return_index=True)[1]
    chosen, sign = counts[:, order].astype(np.float64), positive[order]
    above = np.add.reduceat(chosen * sign, starts, axis=1)
    below = np.add.reduceat(chosen * ~sign, starts, axis=1)
    won = (above * (below.cumsum(axis=1) - 0.5 * below)).sum(axis=1)
    return _ratio(won, above.sum(axis=1) * below.sum(axis=1))


class Accuracy(Metric):
    """Share of the samples whose most probable class is the right one. NaN where a probability is NaN."""

    name = "accuracy"
    range = (0.0, 1.0)

    quick = True

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return float(np.mean(_right(decisions, samples)))

    def of_resamples(self, decisions: Tensor, samples: Samples, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        return _share(counts, _right(decisions, samples))


class BalancedAccuracy(Metric):
    """Mean recall of the classes that are there. NaN where a probability is NaN."""

    name = "balanced_accuracy"
    range = (0.0, 1.0)
    quick = True

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        truth, right = samples.targets[:].numpy(), _right(decisions, samples)
        return float(np.mean([np.mean(right[truth == one]) for one in np.unique(truth)]))

    def of_resamples(self, decisions: Tensor, samples: Samples, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        truth, right = samples.targets[:].numpy(), _right(decisions, samples)
        recalls = [_share(counts[:, truth == one], right[truth == one]) for one in np.unique(truth)]
        return _mean_of_known(recalls)


class AUC(Metric):
    """Area under the ROC curve of the second class, with more than 2 classes the mean of each one against the rest; a
    class that no sample has is left out. NaN where all samples are of one class or a probability is NaN."""

    name = "auc"
    range = (0.0, 1.0)
    quick = True

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return _one_against_rest(area_under_roc, decisions, samples)

    def of_resamples(self, decisions: Tensor, samples: Samples, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        truth, probability = samples.targets[:].numpy(), decisions.numpy()
        present = np.unique(truth)
        if len(present) < 2 or not np.isfinite(probability).all():
            return np.full(len(counts), np.nan)
        against_rest = present if probability.shape[1] > 2 else present[1:]
        return _mean_of_known([_areas(probability[:, one], truth == one, counts) for one in against_rest])


class AUPRC(Metric):
    """Area under the precision-recall curve (average precision) of the second class, with more than 2 classes the mean
    of each one against the rest, as ``AUC``: a class that no sample has is left out. Of chance it is the share of the
    class, not 1/2. NaN where all samples are of one class or a probability is NaN."""

    name = "auprc"
    range = (0.0, 1.0)

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        from sklearn.metrics import average_precision_score

        return _one_against_rest(average_precision_score, decisions, samples)


def _one_against_rest(area: Callable[..., float], decisions: Tensor, samples: Samples) -> float:
    truth, probability = samples.targets[:].numpy(), decisions.numpy()
    present = np.unique(truth)
    if len(present) < 2 or not np.isfinite(probability).all():
        return float("nan")
    against_rest = present if probability.shape[1] > 2 else present[1:]
    return float(np.mean([area(truth == one, probability[:, one]) for one in against_rest]))


class Brier(Metric):
    """Brier score: the mean squared distance of the probabilities from what was there. Of two classes that of the
    second one, in [0, 1]; of more the sum over the classes, in [0, 2]. NaN where a probability is NaN."""

    name = "brier"
    direction: ClassVar[Direction] = "lower"
    range = (0.0, 2.0)

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        found = _calibration(decisions, samples)
        return float("nan") if found is None else found.brier


class ECE(Metric):
    """Expected calibration error (Guo et al., ICML 2017) of the chosen class's probability, in 10 equal bins. NaN where
    a probability is NaN."""

    name = "ece"
    direction: ClassVar[Direction] = "lower"
    range = (0.0, 1.0)

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        found = _calibration(decisions, samples)
        return float("nan") if found is None else found.ece


def _calibration(decisions: Tensor, samples: Samples) -> Calibration | None:
    return calibration(samples.targets[:].numpy(), decisions.numpy())


class _OfTwoClasses(ThresholdMetric):
    """The share of the samples of one class on whose side of the threshold the second class's probability lies."""

    range = (0.0, 1.0)

    def __init__(self, threshold: float = 0.5):
        self.threshold = threshold

    def at(self, threshold: float) -> Self:
        return type(self)(threshold)

    def suits(self, data: SiteData) -> None:
        if len(data.class_names) != 2:
            raise ConfigError(
                f"{self.name} is a metric of two classes, of which the second is looked for; there are "
                f"{len(data.class_names)}: {', '.join(data.class_names)}"
            )

    def choose(self, decisions: Tensor, samples: Samples) -> float:
        """Where sensitivity + specificity is largest (Youden, Cancer 1950); of equal ones the highest threshold."""
        from sklearn.metrics import roc_curve

        truth, probability = samples.targets[:].numpy(), decisions[:, 1].double().numpy()
        if len(np.unique(truth)) < 2 or not np.isfinite(probability).all():
            return 0.5
        wrong, right, thresholds = roc_curve(truth, probability)
        chosen = float(thresholds[int(np.argmax(right - wrong))])
        return chosen if math.isfinite(chosen) else 0.5  # infinite: no threshold separates anything

    def _share(self, decisions: Tensor, samples: Samples, looked_for: int) -> float:
        mine = decisions[samples.targets[:] == looked_for, 1].double()
        if not len(mine) or not bool(mine.isfinite().all()):
            return float("nan")
        above = float((mine >= self.threshold).double().mean())
        return above if looked_for else 1 - above


class Sensitivity(_OfTwoClasses):
    """Share of the second class's samples whose probability of it is at least the threshold that validation chose. NaN
    where no sample is of that class or a probability is NaN."""

    name = "sensitivity"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return self._share(decisions, samples, 1)


class Specificity(_OfTwoClasses):
    """Share of the first class's samples whose probability of the second is below the threshold that validation chose.
    NaN where no sample is of that class or a probability is NaN."""

    name = "specificity"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return self._share(decisions, samples, 0)


LABEL_METRICS: tuple[Metric, ...] = (Accuracy(), BalancedAccuracy(), AUC())
MORE_LABEL_METRICS: tuple[Metric, ...] = (AUPRC(), Brier(), ECE(), Sensitivity(), Specificity())
