# SPDX-License-Identifier: Apache-2.0
"""One model for patients from anywhere, made of what all hospitals' models became in a job: what it must know.

It holds a common model and every hospital's own, and chooses between them case by case; where the choice has a
threshold, the hospitals' validation cases say which.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Self

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from medpfl.data.samples import SiteData
from medpfl.methods.base import Method
from medpfl.tasks.base import Task
from medpfl.tasks.metrics.measure import Measure

Score = Annotated[float, Field(allow_inf_nan=False)] | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Point(_Strict):
    """``gamma``: the threshold (None: the choice has no need of one); ``score``: of the joint model with it;
    ``counts``: cases served by the common model, then by each hospital's personal model (where all serve together,
    cases in which that model has the largest weight)."""

    gamma: Annotated[float, Field(ge=0, le=1)] | None
    score: Score
    counts: list[Annotated[int, Field(ge=0)]]


class SplitStudy(_Strict):
    """``cases``: their number; ``alone``: score of the common model, then of each hospital's personal model."""

    cases: Annotated[int, Field(ge=1)]
    alone: list[Score]
    points: Annotated[list[Point], Field(min_length=1)]


class Study(_Strict):
    """What a hospital tells of a joint model: numbers only, no case. ``validation``: None where it has none."""

    validation: SplitStudy | None
    test: SplitStudy


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


@dataclass(frozen=True, kw_only=True)
class JointModel(Method):
    """It is not trained: it is put together from what a job left at the server.

    Args:
        trained: the method that trained its networks.
        hospitals: whose personal models it holds, in the roster's order.
        gamma: the threshold, in [0, 1]; None: the choice needs none.
    """

    by_case: ClassVar = True

    trained: Method
    hospitals: tuple[str, ...]
    gamma: float | None

    @property
    @abstractmethod
    def labels(self) -> list[str]:
        """What the models to choose from are called towards people: the common one, then the hospitals'."""

    @abstractmethod
    def sources(self) -> dict[str, tuple[str, str | None]]:
        """Network to where it comes from: the trained method's network (and slot) of that name, and whose of them;
        None: the one that all hospitals have."""

    @abstractmethod
    def with_gamma(self, gamma: float | None) -> Self:
        """The same with another threshold.

        Raises:
            ConfigError: it is not in [0, 1], or the choice needs none.
        """

    @abstractmethod
    def study(self, models: nn.ModuleDict, task: Task, data: SiteData, device: torch.device) -> Study:
        """Validation and test with every threshold that is tried, and of the networks alone.

        Raises:
            ConfigError: the test split is empty.
        """

    @abstractmethod
    def read_study(self, site: str, content: object) -> Study: ...

    @abstractmethod
    def choose_gamma(self, studies: Mapping[str, Study], measure: Measure) -> Found:
        """The threshold with the best validation score over the hospitals; no test counts.

        Args:
            measure: which scores are better.

        Raises:
            MedPFLError: no hospital that took part in training has validation cases.
        """
