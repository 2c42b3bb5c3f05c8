# SPDX-License-Identifier: Apache-2.0
"""Several labels a case, each of which it may have or not: findings of a radiograph, say."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from medpfl.data.samples import SiteData
from medpfl.data.target import Target
from medpfl.tasks.any_input import AnyInput
from medpfl.tasks.losses.contract import Loss
from medpfl.tasks.losses.labels import BinaryCrossEntropy
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.several import SEVERAL_METRICS


@dataclass(frozen=True, kw_only=True)
class MultiLabel(AnyInput):
    """Of each label a probability of its own. What is not known of a case counts neither in the loss nor in metrics.

    Args:
        score: metric that chooses the best round: macro_auc, macro_f1 or exact_match.
        loss: what training descends.
    """

    score: str = "macro_auc"
    loss: Loss = BinaryCrossEntropy()  # noqa: RUF009 (it is frozen)
    metrics: ClassVar[tuple[Metric, ...]] = SEVERAL_METRICS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss.suits(Target.LABELS, type(self).__name__)

    @property
    def target(self) -> Target:
        return Target.LABELS

    def outputs(self, data: SiteData) -> int:
        return len(data.class_names)

    def decide(self, outputs: Tensor) -> Tensor:
        """N x C probabilities."""
        return outputs.float().sigmoid()
