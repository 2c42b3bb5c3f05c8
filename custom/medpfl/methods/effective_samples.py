# SPDX-License-Identifier: Apache-2.0
"""Whose samples are behind what a network learnt in a round.

How many different samples training has seen is not enough to know: a pull back to the start, a decay or a schedule can
undo all steps but one, and weights of classes can leave one sample of a batch. So every sample is counted by its weight
in the change: a step adds its learning rate, parted among its samples as the loss weighs them, and takes back a part of
what the steps before it did.
"""

import numpy as np
from torch import Tensor

_AT_ONCE = 64
"""Batches that are added up together: each for itself takes longer than a small network's optimiser."""
_FAR = 1e100
"""Beyond this, and below one part in this, the common factor of the weights goes into them."""


class EffectiveSamples:
    """The weights of the training samples in one network's change.

    Args:
        samples: of the training part.
    """

    def __init__(self, samples: int):
        self._weights = np.zeros(samples)
        self._kept = 1.0
        """What all weights are yet to be multiplied by: a step that takes back a part of all of them is one product."""
        self._step: list[tuple[Tensor, Tensor | None]] = []
        self._made: list[tuple[Tensor, Tensor | None, float]] = []
        """Rows, weights, and learning rate by ``_kept``, of steps that are not in the weights yet."""
        self._open: list[tuple[list[tuple[Tensor, Tensor | None]], float, float, Tensor]] = []

    def batch(self, rows: Tensor, weights: Tensor | None) -> None:
        """A batch of the step that is to come.

        Args:
            rows: B numbers of samples.
            weights: B, >= 0, of each in the step's gradient; None: 1 / B of each.
        """
        self._step.append((rows, weights))

    def moved(self, rate: float, taken_back: float, left_out: Tensor | None = None) -> None:
        """The step was made.

        Args:
            rate: its learning rate, >= 0.
            taken_back: part of the change until then that it undoes, >= 0; above 1 it overshoots.
            left_out: not 0 where it was not made after all; a scalar that may lie on the GPU, so that it is read with
                the result only. None: it was.
        """
        step, self._step = self._step, []
        if left_out is None:
            self._settle()
            self._take(step, rate, taken_back)
        else:
            self._open.append((step, rate, taken_back, left_out))

    def _settle(self) -> None:
        for step, rate, taken_back, left_out in self._open:
            if not bool(left_out):
                self._take(step, rate, taken_back)
        self._open.clear()

    def _take(self, step: list[tuple[Tensor, Tensor | None]], rate: float, taken_back: float) -> None:
        if taken_back:
            self._kept *= abs(1 - taken_back)
            if not 1 / _FAR < self._kept < _FAR:
                self._add()
                with np.errstate(over="ignore", invalid="ignore"):  # told as 0 effective samples
                    self._weights *= self._kept
                self._kept = 1.0
        rate /= self._kept
        self._made += [(rows, weights, rate) for rows, weights in step]
        if len(self._made) >= _AT_ONCE:
            self._add()

    def _add(self) -> None:
        if not self._made:
            return
        made, self._made = self._made, []
        rates = [rate if weights is not None else rate / max(len(rows), 1) for rows, weights, rate in made]
        each = np.repeat(rates, [len(rows) for rows, _, _ in made])
        if any(weights is not None for _, weights, _ in made):
            each *= np.concatenate(
                [np.ones(len(rows)) if weights is None else weights.numpy() for rows, weights, _ in made]
            )
        np.add.at(self._weights, np.concatenate([rows.numpy() for rows, _, _ in made]), each)  # in the steps' order

    @property
    def effective(self) -> float:
        """How many samples of equal weight would be as many (Kish, "Survey Sampling", 1965): (sum w)^2 / sum w^2.
        Infinity: the change is not of training samples at all; 0: their weights are beyond all numbers."""
        self._settle()
        self._add()
        largest = float(self._weights.max()) if len(self._weights) else 0.0  # the common factor cancels
        if largest == 0:
            return float("inf")
        with np.errstate(invalid="ignore"):  # infinity by itself
            scaled = self._weights / largest
        found = float(scaled.sum() ** 2 / (scaled @ scaled))
        return found if found >= 1 else 0.0  # NaN is not
