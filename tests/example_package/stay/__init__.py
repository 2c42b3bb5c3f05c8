# SPDX-License-Identifier: Apache-2.0
"""A task without classes from somebody else's package: how many days patients stay, from a row of a table."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from medpfl.data.preparation import Spec
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import Target
from medpfl.tasks.contract import Task
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.measure import Direction


class MAE(Metric):
    """Mean distance of the predicted days from those that were."""

    name = "mae"
    direction: ClassVar[Direction] = "lower"
    unit = "days"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        # By torch: asked of a thousand resamples, scikit-learn would check arguments for longer than it counts.
        return float((samples.targets[:] - decisions).double().abs().mean())


@dataclass(frozen=True)
class Stay(Task):
    """A linear model of a table's rows, trained with the squared error.

    Args:
        dataset: name of a declared dataset of kind ``table`` with ``value``.
    """

    dataset: str
    score: str = "mae"
    metrics: ClassVar[tuple[Metric, ...]] = (MAE(),)

    @property
    def spec(self) -> Spec:
        return Spec(Target.VALUE, ("rows",))

    def network(self, data: SiteData) -> nn.Module:
        return nn.Linear(data.splits["train"].inputs.shape[1], 1)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.mse_loss(outputs[:, 0], targets)

    def decide(self, outputs: Tensor) -> Tensor:
        return outputs[:, 0].float()
