# SPDX-License-Identifier: Apache-2.0
"""What a task is: how declared data become samples, and what network, loss and metrics go with them."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medpfl.sites.site_file import SiteFile


@dataclass(frozen=True)
class Samples:
    """One split, ready for training.

    Attributes:
        inputs: N x ... float32.
        targets: N x ... integer.
        case: N indices into ``names``; several samples (slices) may belong to one case (volume).
        names: the cases' names at the hospital; they never leave it.
        classes: number of declared classes, whether or not each occurs in this split.
    """

    inputs: Tensor
    targets: Tensor
    case: NDArray[np.int64]
    names: list[str]
    classes: int = 2

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class SiteData:
    """A hospital's samples of a task, split by split ("validation" may be empty), and the classes' names."""

    splits: dict[str, Samples]
    class_names: list[str]


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model on one split.

    Attributes:
        metrics: metric name to its value; NaN where it is not defined (AUC with one class).
        cases: one row a case with its own metrics or prediction; stays at the hospital.
    """

    metrics: dict[str, float]
    cases: list[dict[str, Any]] = field(default_factory=list)


class Task(ABC):
    """A frozen dataclass whose fields are the job's arguments; ``dataset`` names a dataset the site file declares."""

    dataset: str
    score: str
    """Name of the metric that chooses the best round; higher is better."""
    scores: ClassVar[tuple[str, ...]]
    """Names of all metrics that ``evaluate`` returns."""

    @abstractmethod
    def load(self, site_file: SiteFile) -> SiteData:
        """Read the hospital's data.

        Raises:
            SiteFileError: the dataset is not declared or of the wrong kind.
            DataError: the data are not as declared.
        """

    @abstractmethod
    def network(self, data: SiteData) -> nn.Module:
        """A new network; its weights come from torch's global generator, which the caller seeds."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Scalar training loss of a batch; ``outputs`` are the network's."""

    @abstractmethod
    def decide(self, outputs: Tensor) -> Tensor:
        """What is kept of a batch's outputs for evaluation (class indices or probabilities), N x ..."""

    @abstractmethod
    def evaluate(self, decisions: Tensor, samples: Samples) -> Evaluation:
        """Metrics of the decisions about a non-empty split."""


def empty_like(samples: Samples) -> Samples:
    """A split without samples, of the same shapes."""
    return Samples(samples.inputs[:0], samples.targets[:0], samples.case[:0], [], samples.classes)


def to_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor of ``dtype``."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
