# SPDX-License-Identifier: Apache-2.0
"""What a metric is: a name, which values are better, a unit, and how it is computed of a split or case by case."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.measure import Direction, Measure


class Metric(ABC):
    """A number that says how good decisions about a split are.

    Attributes:
        name: as jobs, files and tables have it.
        direction: which values are better.
        unit: of the values; "" for shares and the like.
        range: the least and the largest value that it can have.
    """

    name: ClassVar[str]
    direction: ClassVar[Direction] = "higher"
    unit: ClassVar[str] = ""
    range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    @property
    def measure(self) -> Measure:
        """What tables and choices need to know of it."""
        return Measure(direction=self.direction, unit=self.unit)

    @abstractmethod
    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        """The value for a non-empty split; NaN where it is not defined.

        Args:
            decisions: N x ..., on the CPU; what ``Task.decide`` gave.
        """


class CaseMetric(Metric):
    """A metric of every case; that of a split is the mean over its cases."""

    @abstractmethod
    def of_cases(self, decisions: Tensor, samples: Samples) -> list[float]:
        """The value of each of ``samples.names``."""

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return float(np.mean(self.of_cases(decisions, samples)))
