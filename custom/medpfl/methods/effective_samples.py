# SPDX-License-Identifier: Apache-2.0
"""Whose samples are behind what a network learnt in a round.

How many different samples training has seen is not enough to know: a pull back to the start, a decay or a schedule can
undo all steps but one, and weights of classes can leave one sample of a batch. So every sample is counted by its weight
in the change: a step adds its learning rate, parted among its samples as the loss weighs them, and takes back a part of
what the steps before it did.
"""

import torch
from torch import Tensor


class EffectiveSamples:
    """The weights of the training samples in one network's change.

    Args:
        samples: of the training part.
    """

    def __init__(self, samples: int):
        self._weights = torch.zeros(samples, dtype=torch.float64)
        self._step: list[tuple[Tensor, Tensor]] = []

    def batch(self, rows: Tensor, weights: Tensor) -> None:
        """A batch of the step that is to come.

        Args:
            rows: B numbers of samples.
            weights: B, >= 0, of each in the step's gradient.
        """
        self._step.append((rows, weights.double()))

    def moved(self, rate: float, taken_back: float) -> None:
        """The step was made.

        Args:
            rate: its learning rate, >= 0.
            taken_back: part of the change until then that it undoes, >= 0; above 1 it overshoots.
        """
        if taken_back:
            self._weights *= abs(1 - taken_back)
        for rows, weights in self._step:
            self._weights.index_add_(0, rows, rate * weights)
        self._step.clear()

    @property
    def effective(self) -> float:
        """How many samples of equal weight would be as many (Kish, "Survey Sampling", 1965): (sum w)^2 / sum w^2.
        Infinity: the change is not of training samples at all; 0: their weights are beyond all numbers."""
        largest = float(self._weights.max()) if len(self._weights) else 0.0
        if largest == 0:
            return float("inf")
        scaled = self._weights / largest
        found = float(scaled.sum() ** 2 / scaled.square().sum())
        return found if found >= 1 else 0.0  # NaN is not
