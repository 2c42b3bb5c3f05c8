# SPDX-License-Identifier: Apache-2.0
"""Metrics of predicted numbers, N, against N numbers. NaN where a prediction is none.

They are numpy's means, not scikit-learn's functions of the same names, whose checks take longer than a small
hospital's round; a test compares them.
"""

import math
from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.measure import Direction, Measure

Numbers = NDArray[np.float64]


class NumberMetric(Metric):
    """Args: told: unit of the numbers."""

    def __init__(self, told: str = ""):
        self.told = told

    @property
    def measure(self) -> Measure:
        return super().measure.model_copy(update={"unit": self.told})

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        found, truth = decisions.double().numpy(), samples.targets[:].double().numpy()
        return self.of_numbers(found, truth) if np.isfinite(found).all() else math.nan

    @abstractmethod
    def of_numbers(self, found: Numbers, truth: Numbers) -> float:
        """The value for a non-empty split."""


class MAE(NumberMetric):
    """Mean distance of the predicted numbers from the true ones."""

    name = "mae"
    direction: ClassVar[Direction] = "lower"
    range = (0.0, math.inf)

    def of_numbers(self, found: Numbers, truth: Numbers) -> float:
        return float(np.abs(found - truth).mean())


class RMSE(NumberMetric):
    """Root of the mean squared distance."""

    name = "rmse"
    direction: ClassVar[Direction] = "lower"
    range = (0.0, math.inf)

    def of_numbers(self, found: Numbers, truth: Numbers) -> float:
        return float(np.sqrt(((found - truth) ** 2).mean()))


class R2(NumberMetric):
    """Share of the variance that is explained; 0 for always answering the split's mean, below 0 for worse. NaN where
    all true numbers are equal."""

    name = "r2"
    range = (-math.inf, 1.0)

    def of_numbers(self, found: Numbers, truth: Numbers) -> float:
        variance: Any = ((truth - truth.mean()) ** 2).sum()
        return float(1 - ((found - truth) ** 2).sum() / variance) if variance > 0 else math.nan


def number_metrics(unit: str) -> tuple[Metric, ...]:
    """All of them; R2 has no unit."""
    return MAE(unit), RMSE(unit), R2()
