# SPDX-License-Identifier: Apache-2.0
"""How far a classifier's probabilities can be taken at their word."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BINS = 10


@dataclass(frozen=True)
class Calibration:
    """Calibration of class probabilities on one split.

    Attributes:
        ece: expected calibration error in [0, 1]: the mean distance between the probability given to the chosen class
            and how often that class was right, over ``BINS`` equal bins of that probability (Guo et al., ICML 2017).
        brier: Brier score: in [0, 1] for two classes, in [0, 2] for more; lower is better.
        samples: how many samples both were measured on.
    """

    ece: float
    brier: float
    samples: int


def calibration(truth: NDArray[np.int64], probability: NDArray[np.float32]) -> Calibration | None:
    """Calibration of N x C probabilities against N class indices; None when a probability is not finite."""
    if not np.isfinite(probability).all():
        return None
    top = probability.max(axis=1).astype(np.float64)
    right = probability.argmax(axis=1) == truth
    share, hits, given_sum = reliability(top, right)
    gap = np.abs(hits - given_sum)
    # scikit-learn's brier_score_loss to the last bit, without its checks of 2 ms: of two classes it takes the second
    # one and its complement, and of more what sums to 1.
    if probability.shape[1] == 2:
        given = np.stack([1 - probability[:, 1], probability[:, 1]], axis=1)
    else:
        given = probability / probability.sum(axis=1, keepdims=True)
    there = np.eye(probability.shape[1], dtype=given.dtype)[truth]
    brier = np.average(np.sum((there - given) ** 2, axis=1)) * (0.5 if probability.shape[1] == 2 else 1)
    return Calibration(float(gap.sum() / share.sum()), float(brier), len(truth))


def reliability(
    top: NDArray[np.float64], right: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
    """Bin by bin: how many samples, how often the chosen class was right, and the sum of its probabilities.

    Args:
        top: N probabilities of the chosen class.
        right: whether it was right.
    """
    # Bins are (0, 0.1], (0.1, 0.2], ...
    place = np.clip(np.ceil(top * BINS).astype(int) - 1, 0, BINS - 1)
    count = np.bincount(place, minlength=BINS).astype(np.int64)
    hits, total = (np.bincount(place, weights, BINS).astype(np.float64) for weights in (right, top))
    return count, hits, total
