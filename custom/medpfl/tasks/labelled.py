# SPDX-License-Identifier: Apache-2.0
"""What all tasks with one class a case share: the loss, and accuracy, balanced accuracy and AUC."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.data.samples import Samples
from medpfl.data.target import Target
from medpfl.tasks.contract import Task
from medpfl.tasks.losses import CrossEntropy, Loss
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.labels import LABEL_METRICS, MORE_LABEL_METRICS


@dataclass(frozen=True, kw_only=True)
class Labelled(Task):
    """One class a sample. Networks have one output for two classes (logistic regression), else one a class.

    Args:
        loss: what training descends.
        sampling: "as they are": a pass takes every training sample once. "balanced": a pass draws as many samples with
            replacement, each class that the hospital has with the same probability (as torch's
            ``WeightedRandomSampler``).
        more_metrics: further metrics by which models are tested: auprc, brier, ece, sensitivity, specificity.
    """

    loss: Loss = CrossEntropy()  # noqa: RUF009 (it is frozen)
    sampling: Literal["as they are", "balanced"] = "as they are"
    more_metrics: tuple[str, ...] = ()
    metrics: ClassVar[tuple[Metric, ...]] = LABEL_METRICS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss.suits(Target.CLASS, type(self).__name__)
        if self.sampling == "balanced" and isinstance(self.loss, CrossEntropy) and self.loss.weights == "balanced":
            raise ConfigError(
                f"{type(self).__name__} balances the classes twice, by its sampling and by the weights of its loss; "
                "take one of them"
            )

    @property
    def offered(self) -> tuple[Metric, ...]:
        return MORE_LABEL_METRICS

    @staticmethod
    def outputs(class_names: list[str]) -> int:
        """Number of the network's outputs."""
        return 1 if len(class_names) == 2 else len(class_names)

    def order(self, samples: Samples, generator: torch.Generator) -> Tensor:
        if self.sampling == "as they are":
            return super().order(samples, generator)
        targets = samples.targets[:]
        weights = 1 / torch.bincount(targets, minlength=samples.classes)[targets].double()
        return torch.multinomial(weights, len(samples), replacement=True, generator=generator)

    def strata(self, samples: Samples) -> list[Tensor]:
        if self.sampling == "as they are":
            return super().strata(samples)
        targets = samples.targets[:]
        return [(targets == number).nonzero().flatten() for number in sorted(set(targets.tolist()))]

    def decide(self, outputs: Tensor) -> Tensor:
        """Class probabilities, N x C."""
        if outputs.shape[1] == 1:
            positive = outputs.float().sigmoid()
            return torch.cat([1 - positive, positive], dim=1)
        return outputs.float().softmax(dim=1)
