# SPDX-License-Identifier: Apache-2.0
"""What all tasks with one class a case share: the loss, and accuracy, balanced accuracy and AUC."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from medpfl.data.preparation import Row
from medpfl.data.samples import Samples
from medpfl.data.target import Target
from medpfl.tasks.base import Task
from medpfl.tasks.losses import CrossEntropy, Loss
from medpfl.tasks.metrics.base import Metric
from medpfl.tasks.metrics.labels import LABEL_METRICS


@dataclass(frozen=True, kw_only=True)
class Labelled(Task):
    """One class a sample. Networks have one output for two classes (logistic regression), else one a class.

    Args:
        loss: what training descends.
    """

    loss: Loss = CrossEntropy()  # noqa: RUF009 (it is frozen)
    metrics: ClassVar[tuple[Metric, ...]] = LABEL_METRICS

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss.suits(Target.CLASS, type(self).__name__)

    @staticmethod
    def outputs(class_names: list[str]) -> int:
        """Number of the network's outputs."""
        return 1 if len(class_names) == 2 else len(class_names)

    def decide(self, outputs: Tensor) -> Tensor:
        """Class probabilities, N x C."""
        if outputs.shape[1] == 1:
            positive = outputs.float().sigmoid()
            return torch.cat([1 - positive, positive], dim=1)
        return outputs.float().softmax(dim=1)

    def told(self, decisions: Tensor, samples: Samples) -> list[Row]:
        """The class, the most probable one and its probability."""
        truth, probability = samples.targets[:].numpy(), decisions.numpy()
        found = probability.argmax(axis=1)
        return [
            {
                "case": name,
                "class": int(truth[i]),
                "predicted": int(found[i]),
                "probability": float(probability[i].max()),
            }
            for i, name in enumerate(samples.names)
        ]
