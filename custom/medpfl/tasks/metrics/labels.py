# SPDX-License-Identifier: Apache-2.0
"""Metrics of class probabilities, N x C, against N class indices."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.base import Metric


def _right(decisions: Tensor, samples: Samples) -> NDArray[np.bool_]:
    """Whether each sample's most probable class is the right one. (scikit-learn's accuracy and recall are these means
    after checks of 3 ms, which was a third of a small hospital's round.)"""
    found: NDArray[np.bool_] = decisions.numpy().argmax(axis=1) == samples.targets[:].numpy()
    return found


class Accuracy(Metric):
    """Share of the samples whose most probable class is the right one."""

    name = "accuracy"
    range = (0.0, 1.0)

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return float(np.mean(_right(decisions, samples)))


class BalancedAccuracy(Metric):
    """Mean recall of the classes that are there."""

    name = "balanced_accuracy"
    range = (0.0, 1.0)

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        truth, right = samples.targets[:].numpy(), _right(decisions, samples)
        return float(np.mean([np.mean(right[truth == one]) for one in np.unique(truth)]))


class AUC(Metric):
    """Area under the ROC curve of the second class, with more than 2 classes the mean of each one against the rest; a
    class that no sample has is left out. NaN where all samples are of one class or a probability is NaN."""

    name = "auc"
    range = (0.0, 1.0)

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        from sklearn.metrics import roc_auc_score

        truth, probability = samples.targets[:].numpy(), decisions.numpy()
        present = np.unique(truth)
        if len(present) < 2 or not np.isfinite(probability).all():
            return float("nan")
        against_rest = present if probability.shape[1] > 2 else present[1:]
        return float(np.mean([roc_auc_score(truth == one, probability[:, one]) for one in against_rest]))


LABEL_METRICS: tuple[Metric, ...] = (Accuracy(), BalancedAccuracy(), AUC())
