# SPDX-License-Identifier: Apache-2.0
"""A metric from somebody else's package, and the task of MedPFL's that is scored by it too."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.contract import Direction, Metric
from medpfl.tasks.tabular import Tabular


class Brier(Metric):
    """Mean squared distance of the second class's probability from what was there."""

    name = "brier"
    direction: ClassVar[Direction] = "lower"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return (decisions[:, 1].double() - samples.targets[:].double()).square().mean().item()


@dataclass(frozen=True)
class Sure(Tabular):
    """As ``Tabular``; the best round is that whose probabilities can best be taken at their word."""

    score: str = "brier"
    metrics: ClassVar[tuple[Metric, ...]] = (*Tabular.metrics, Brier())
