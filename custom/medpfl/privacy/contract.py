# SPDX-License-Identifier: Apache-2.0
"""What a job may ask of a hospital's noise, and the words in which what it has cost is told."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError

Level = Literal["record", "update"]
MOST_EPSILON = 1e100
"""What an epsilon is at most: noise that hides nothing costs more than any number."""
SHORTEST = 1e-18
"""The least length to which anything is shortened. A gradient of the largest length whose square float32 holds is
multiplied by 5e-38 then; factors below 1.2e-38 are rounded so much that it would count up to twice."""


class Mechanism(NamedTuple):
    """Gaussian noise on a sum over a random part of the cases, ``steps`` times.

    Attributes:
        noise_multiplier: standard deviation of the noise over the most that one case can change the sum by, > 0.
        sample_rate: probability with which each case is in the part, in (0, 1].
        steps: how often, >= 1.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int


class Spent(BaseModel):
    """What a hospital's noise has cost in the job so far.

    Attributes:
        level: "record": of a case; "update": of all of the hospital's data together, which every message has hidden.
        epsilon: at this ``delta``, of everything that was sent; redone rounds and those that were not used included.
        delta: in (0, 1).
        releases: how many messages with noise were sent.
        fixed: the noise of a message was made from a seed that others may know, so that it protects nothing.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    level: Level
    epsilon: Annotated[FiniteFloat, Field(ge=0, le=MOST_EPSILON)]
    delta: Annotated[FiniteFloat, Field(gt=0, lt=1)]
    releases: Annotated[int, Field(ge=0, lt=2**53)]
    fixed: bool = False

    def __str__(self) -> str:
        protected = "each case" if self.level == "record" else "the hospital's data as a whole"
        return f"epsilon {self.epsilon:.3f} at delta {self.delta:g} for {protected}, in {self.releases} messages" + (
            "; the noise was made from a fixed seed and protects nothing" if self.fixed else ""
        )


@dataclass(frozen=True, kw_only=True)
class Privacy(Checked):
    """Noise on what a hospital sends, which it adds itself.

    Args:
        delta: at which epsilon is told, in (0, 1); well below one over the number of cases.
    """

    delta: float = 1e-5

    level: ClassVar[Level]

    @property
    @abstractmethod
    def told(self) -> str:
        """What is done to what leaves, for the list of what leaves."""

    def __post_init__(self) -> None:
        self._above_zero("delta")
        if self.delta >= 1:
            raise ConfigError(f"{type(self).__name__}'s delta must be below 1, got {self.delta}")

    def _length(self, name: str) -> None:
        self._above_zero(name)
        if getattr(self, name) < SHORTEST:
            raise ConfigError(
                f"{type(self).__name__}'s {name} must be at least {SHORTEST:g}, got {getattr(self, name)}"
            )

    def _above_zero(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError(f"{type(self).__name__}'s {name} must be above 0, got {value}")


@dataclass(frozen=True)
class Cover:
    """What differential privacy does for a method; every method says it for itself.

    Args:
        record: why it cannot be had for single records; None: it can.
        update: why it cannot be had for updates; None: it can.
        at_home: networks that never leave and on which nothing that leaves depends. At record level their steps are
            ordinary ones, without noise.
        derived: networks that are sent and are made, without steps, of weights that had noise, of what the server sent
            and of public data alone. At record level no other network may be sent that steps with noise have not moved.
    """

    record: str | None = None
    update: str | None = None
    at_home: tuple[str, ...] = ()
    derived: tuple[str, ...] = ()

    def check(self, method: str, level: Level) -> None:
        """Raises ConfigError: the method cannot be protected so."""
        why = self.record if level == "record" else self.update
        if why is not None:
            kind = {"record": "DPSGD (record level)", "update": "ClippedNoise (update level)"}[level]
            raise ConfigError(f"{method} cannot be trained with {kind}: {why}")


UNKNOWN = "its class does not say which of its networks stay at the hospital (Method.cover)"
"""Of a method of another package that says nothing."""
