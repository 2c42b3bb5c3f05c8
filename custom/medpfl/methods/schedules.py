# SPDX-License-Identifier: Apache-2.0
"""The learning rate over a job: a function of the round and the step within it, so that there is nothing to resume."""

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError


class Schedule(Checked):
    """What the learning rate is multiplied by as time goes on."""

    @abstractmethod
    def factor(self, passed: float, rounds: float) -> float:
        """In [0, 1].

        Args:
            passed: rounds since the beginning, in [0, ``rounds``]; a step counts as a part of its round.
            rounds: of the whole span, > 0.
        """


@dataclass(frozen=True, kw_only=True)
class Constant(Schedule):
    """The learning rate stays as it is."""

    def factor(self, passed: float, rounds: float) -> float:
        return 1.0


@dataclass(frozen=True, kw_only=True)
class Polynomial(Schedule):
    """(1 - t / T)^power; nnU-Net's (Isensee et al., Nature Methods 2021), there epoch by epoch.

    Args:
        power: > 0; 1 falls in a straight line.
    """

    power: float = 0.9

    def __post_init__(self) -> None:
        if self.power <= 0:
            raise ConfigError(f"Polynomial's power must be above 0, got {self.power}")

    def factor(self, passed: float, rounds: float) -> float:
        return float((1 - passed / rounds) ** self.power)


@dataclass(frozen=True, kw_only=True)
class Cosine(Schedule):
    """(1 + cos(pi t / T)) / 2; Loshchilov and Hutter, "SGDR", ICLR 2017, without restarts."""

    def factor(self, passed: float, rounds: float) -> float:
        return (1 + math.cos(math.pi * passed / rounds)) / 2


@dataclass(frozen=True, kw_only=True)
class StepDown(Schedule):
    """The learning rate falls at once where a part of the rounds is over.

    Args:
        at: these parts, ascending, each in (0, 1).
        by: what the rate is multiplied by each time, in (0, 1).
    """

    at: tuple[float, ...] = (0.5, 0.75)
    by: float = 0.1

    def __post_init__(self) -> None:
        if not self.at or not all(0 < part < 1 for part in self.at) or list(self.at) != sorted(set(self.at)):
            raise ConfigError(f"StepDown's at must be parts of the rounds, ascending, in (0, 1), got {list(self.at)}")
        if not 0 < self.by < 1:
            raise ConfigError(f"StepDown's by must be in (0, 1), got {self.by}")

    def factor(self, passed: float, rounds: float) -> float:
        # Not part * rounds: 0.55 * 100 is a little more than 55.
        return float(self.by ** sum(passed / rounds >= part for part in self.at))


@dataclass(frozen=True, kw_only=True)
class WarmUp(Schedule):
    """The learning rate rises in a straight line, and then follows another schedule over the rounds that are left
    (Goyal et al., "Accurate, Large Minibatch SGD", 2017).

    Args:
        rounds: how long it rises, > 0; half a round, say, is 0.5. What is longer than the job never gets to ``then``.
        start: factor at the beginning, in (0, 1].
        then: "constant", "polynomial", "cosine" or a component.
    """

    rounds: float = 1.0
    start: float = 0.1
    then: Literal["constant", "polynomial", "cosine"] | Schedule = "constant"

    def __post_init__(self) -> None:
        if self.rounds <= 0:
            raise ConfigError(f"WarmUp's rounds must be above 0, got {self.rounds}")
        if not 0 < self.start <= 1:
            raise ConfigError(f"WarmUp's start must be in (0, 1], got {self.start}")

    def factor(self, passed: float, rounds: float) -> float:
        if passed < self.rounds:
            return self.start + (1 - self.start) * passed / self.rounds
        left = rounds - self.rounds
        return schedule_of(self.then).factor(passed - self.rounds, left) if left > 0 else 1.0


SCHEDULES: Mapping[str, Schedule] = {"constant": Constant(), "polynomial": Polynomial(), "cosine": Cosine()}
"""The short names."""


def schedule_of(given: str | Schedule) -> Schedule:
    """The component, or the one that a short name stands for."""
    return SCHEDULES[given] if isinstance(given, str) else given
