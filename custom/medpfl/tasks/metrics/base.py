# SPDX-License-Identifier: Apache-2.0
"""What a metric is: a name, which values are better, a unit, and how it is computed of a split or case by case."""

import math
from abc import ABC, abstractmethod
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from medpfl.data.samples import Samples

Direction = Literal["higher", "lower"]
"""Which values are better."""


def better(direction: Direction, one: float, other: float) -> bool:
    """Whether ``one`` is better than ``other``; equal values are not, and nothing is better than NaN or worse."""
    return one > other if direction == "higher" else one < other


def worst(direction: Direction) -> float:
    """What every finite value is better than."""
    return -math.inf if direction == "higher" else math.inf


class Metric(ABC):
    """A number that says how good decisions about a split are.

    Attributes:
        name: as jobs, files and tables have it.
        direction: which values are better.
        unit: of the values; "" for shares and the like.
    """

    name: ClassVar[str]
    direction: ClassVar[Direction] = "higher"
    unit: ClassVar[str] = ""

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
