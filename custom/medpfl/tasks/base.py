# SPDX-License-Identifier: Apache-2.0
"""What a task is: how declared data become samples, and what network, loss and metrics go with them."""

import dataclasses
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn

from medpfl.component import build
from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import SiteFile
from medpfl.models.base import Architecture
from medpfl.models.by_hospital import OwnChoice


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model on one split.

    Attributes:
        metrics: metric name to its value; NaN where it is not defined (AUC with one class).
        cases: one row a case with its own metrics or prediction; stays at the hospital.
    """

    metrics: dict[str, float]
    cases: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class NewCase:
    """A case to predict.

    Attributes:
        name: its file (and row).
        inputs: N x ... samples, prepared as in training; several for slices of a volume or windows of a recording.
        save: writes a segmentation from the network's outputs (N x C x ...) into a folder, in the input's geometry, on
            request with probabilities, and returns what to tell about it; None for tasks with one class a case.
    """

    name: str
    inputs: Tensor
    save: Callable[[Tensor, Path, list[str], bool], dict[str, Any]] | None = None


class Task(Checked):
    """A frozen dataclass whose fields are the job's arguments; ``dataset`` names a dataset the site file declares."""

    dataset: str
    score: str
    """Name of the metric that chooses the best round; higher is better."""
    scores: ClassVar[tuple[str, ...]]
    """Names of all metrics that ``evaluate`` returns."""

    def at(self, site: str) -> "Task":
        """The task as this hospital does it: with its own network, where the job gives hospitals different ones."""
        architecture = getattr(self, "architecture", None)
        if not isinstance(architecture, Architecture):
            return self
        return dataclasses.replace(self, architecture=architecture.at(site))  # type: ignore[type-var]

    def chosen(self, site_file: SiteFile) -> "Task":
        """The task with the network of the hospital's own choice, where the job leaves it to hospitals.

        Raises:
            SiteFileError: the site file names none for the dataset, or one that cannot be used.
        """
        if not isinstance(getattr(self, "architecture", None), OwnChoice):
            return self
        spec = site_file.network(self.dataset)
        try:
            network = build(spec, Architecture, "the network")
            if network.differs:
                raise ConfigError(f"expected one network, got {network}")
            return dataclasses.replace(self, architecture=network)  # type: ignore[type-var]
        except ConfigError as error:
            raise site_file.unusable_network(self.dataset, error) from error

    @property
    def networks_differ(self) -> bool:
        """Whether hospitals have different networks, whose weights cannot be averaged."""
        architecture = getattr(self, "architecture", None)
        return isinstance(architecture, Architecture) and architecture.differs

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

    def new_cases(self, path: Path, preparation: dict[str, Any]) -> Iterator[NewCase]:
        """Cases to predict: a file or folder without a site file, prepared as the training data were.

        Args:
            preparation: what ``SiteData.preparation`` held when the model was trained.

        Raises:
            DataError: a file cannot be read, with the file, expected and got.
        """
        raise ConfigError(f"{type(self).__name__} cannot read new cases")

    @abstractmethod
    def evaluate(self, decisions: Tensor, samples: Samples) -> Evaluation:
        """Metrics of the decisions about a non-empty split."""
