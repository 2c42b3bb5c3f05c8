# SPDX-License-Identifier: Apache-2.0
"""What a metric is: a name, which values are better, a unit, and how it is computed of a split or case by case."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Self

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import ValidationError
from torch import Tensor

from medpfl.core.errors import ConfigError, shown
from medpfl.data.samples import Samples, SiteData
from medpfl.tasks.metrics.measure import Direction, Measure

LONGEST_NAME = 100
"""Letters of a metric's name: it is a column's heading and part of a sentence."""


class Metric(ABC):
    """A number that says how good decisions about a split are.

    Attributes:
        name: as jobs, files and tables have it.
        direction: which values are better.
        unit: of the values, at most 20 characters; "" for shares and the like.
        range: the least and the largest value that it can have.
    """

    name: str
    direction: ClassVar[Direction] = "higher"
    unit: ClassVar[str] = ""
    range: ClassVar[tuple[float, float]] = (-math.inf, math.inf)

    @property
    def measure(self) -> Measure:
        """What tables and choices need to know of it.

        Raises:
            ConfigError: its unit is too long for headings, or its direction is none.
        """
        try:
            return Measure(direction=self.direction, unit=self.unit)
        except ValidationError as error:
            (key,), said = error.errors()[0]["loc"], error.errors()[0]["msg"]
            raise ConfigError(f"metric '{self.name}': its {key}: {said}; got {getattr(self, str(key))!r}") from error

    def check(self) -> None:
        """Refuse a metric that tables could not name, or whose values nobody could check.

        Raises:
            ConfigError: naming the class and what it lacks.
        """
        kind, name, span = type(self).__name__, getattr(self, "name", None), self.range
        if not isinstance(name, str) or not 1 <= len(name) <= LONGEST_NAME or not name.isprintable():
            raise ConfigError(f"{kind} must have a 'name' of 1 to {LONGEST_NAME} letters, got {shown(name)}")
        if not isinstance(span, tuple | list) or [isinstance(one, int | float) for one in span] != [True, True]:
            raise ConfigError(f"metric '{name}': its range must be a least and a largest number, got {shown(span)}")

    def value_of(self, decisions: Tensor, samples: Samples) -> float:
        """What ``of_split`` gives, which may be NumPy's or torch's number, too.

        Raises:
            ConfigError: it is no number.
        """
        return self._number("of_split", self.of_split(decisions, samples))

    def _number(self, asked: str, found: object) -> float:
        try:
            return float(found)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._wrong(asked, "a number", found) from error

    def _wrong(self, asked: str, expected: str, found: object) -> ConfigError:
        said = " ".join(shown(found).split())
        return ConfigError(f"metric '{self.name}': '{asked}' of {type(self).__name__} must give {expected}, got {said}")

    def suits(self, data: SiteData) -> None:
        """Refuse data of which it cannot be computed; by default there are none.

        Raises:
            ConfigError: with the metric's name and what it is for.
        """

    @abstractmethod
    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        """The value for a non-empty split; NaN where it is not defined.

        Args:
            decisions: N x ..., on the CPU; what ``Task.decide`` gave.
        """

    quick: ClassVar[bool] = False
    """Whether ``of_resamples`` scores thousands of resamples at once."""

    def of_resamples(self, decisions: Tensor, samples: Samples, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """The value of each of B resamples of a split; NaN where it is not defined. By default one after another.

        Args:
            counts: B x N: how often each resample holds each sample, each at least one.
        """
        found = []
        for times in counts:
            drawn, mine = resampled(samples, times)
            found.append(self.of_split(decisions[drawn], mine))
        return np.array(found, dtype=np.float64)


def resampled(samples: Samples, times: NDArray[np.int64]) -> tuple[Tensor, Samples]:
    """The numbers of the samples of a resample, and what is known of these, without inputs. A case that is drawn twice
    is two cases, and so is its patient.

    Args:
        times: N: how often each sample is drawn.
    """
    drawn = np.repeat(np.arange(len(times)), times)
    again = np.arange(len(drawn)) - np.repeat(np.cumsum(times) - times, times)  # 0 for the first time, 1 for the second
    most = int(times.max(initial=1))
    of_draw, case = np.unique(samples.case[drawn] * most + again, return_inverse=True)
    of_case, turn = of_draw // most, of_draw % most
    owners = None
    if samples.owners is not None:
        owners = [str(one) for one in (samples.patients[of_case] * most + turn).tolist()]
    numbers = torch.from_numpy(drawn)
    return numbers, Samples(
        torch.empty(len(drawn), 0),
        samples.targets[numbers],
        case,
        [samples.names[one] for one in of_case],
        samples.classes,
        owners=owners,
    )


class CaseMetric(Metric):
    """A metric of every case; that of a split is the mean over its cases."""

    quick = True

    @abstractmethod
    def of_cases(self, decisions: Tensor, samples: Samples) -> list[float]:
        """The value of each of ``samples.names``."""

    def values_of(self, decisions: Tensor, samples: Samples) -> list[float]:
        """What ``of_cases`` gives, as ``value_of``.

        Raises:
            ConfigError: it is not a number of every case.
        """
        found: object = self.of_cases(decisions, samples)
        cases = len(samples.names)
        if not isinstance(found, Sequence | np.ndarray | Tensor) or len(found) != cases:
            raise self._wrong("of_cases", f"a list of {cases} numbers, one a case", found)
        return [self._number("of_cases", one) for one in found]

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return float(np.mean(self.of_cases(decisions, samples)))


class ThresholdMetric(Metric):
    """A metric of decisions that are made at a threshold, which the validation cases choose; before that it is 1/2."""

    threshold: float = 0.5

    @abstractmethod
    def choose(self, decisions: Tensor, samples: Samples) -> float:
        """The threshold that these decisions about a split suggest; 1/2 where they suggest none."""

    @abstractmethod
    def at(self, threshold: float) -> Self:
        """The metric with this threshold."""


def threshold_for(metrics: Sequence[Metric], decisions: Tensor, samples: Samples) -> float | None:
    """The threshold that all of them use, chosen on these decisions about a split; None where none uses one."""
    return next((one.choose(decisions, samples) for one in metrics if isinstance(one, ThresholdMetric)), None)


def at_threshold(metrics: Sequence[Metric], threshold: float | None) -> list[Metric]:
    """The metrics with this threshold."""
    return [one.at(threshold) if isinstance(one, ThresholdMetric) and threshold is not None else one for one in metrics]
