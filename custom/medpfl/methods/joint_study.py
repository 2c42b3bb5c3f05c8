# SPDX-License-Identifier: Apache-2.0
"""What hospitals tell of a joint model (``base.JointModel``), and what is found from it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Score = Annotated[float, Field(allow_inf_nan=False, ge=-1e100, le=1e100)] | None
"""Sums of such over all hospitals, weighted by ``Count`` cases, are finite still."""
Count = Annotated[int, Field(ge=0, lt=2**53)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Point(_Strict):
    """``gamma``: the threshold (None: the choice has no need of one); ``score``: of the joint model with it;
    ``counts``: cases served by the common model, then by each hospital's personal model (where all serve together,
    cases in which that model has the largest weight)."""

    gamma: Annotated[float, Field(ge=0, le=1)] | None
    score: Score
    counts: list[Count]


class SplitStudy(_Strict):
    """``cases``: their number; ``alone``: score of the common model, then of each hospital's personal model."""

    cases: Annotated[Count, Field(ge=1)]
    alone: list[Score]
    points: Annotated[list[Point], Field(min_length=1)]


class Study(_Strict):
    """What a hospital tells of a joint model: numbers only, no case. ``validation``: None where it has none."""

    validation: SplitStudy | None
    test: SplitStudy

    def scores(self) -> Iterator[float]:
        """All that are told."""
        for split in (self.validation, self.test):
            if split is not None:
                told = [*split.alone, *(point.score for point in split.points)]
                yield from (score for score in told if score is not None)


@dataclass(frozen=True)
class Line:
    """One hospital's test: scores (None: not defined) and where its cases went.

    Attributes:
        served: number of cases served by the common model, then by each hospital's personal model.
        own: score of the hospital's own personal model; None also for a hospital that took no part in training.
    """

    hospital: str
    cases: int
    global_: float | None
    own: float | None
    super_: float | None
    served: list[int]


@dataclass(frozen=True)
class Found:
    """``gamma``: the chosen threshold (None: the choice needs none); ``validation``: its pooled score; ``lines``: the
    hospitals' tests with it."""

    gamma: float | None
    validation: float
    lines: list[Line]
