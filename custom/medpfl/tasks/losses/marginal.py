# SPDX-License-Identifier: Apache-2.0
"""The loss of a hospital whose label maps show some of the classes only. No job names it: ``PartlyLabelled`` does."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from medpfl.core.devices import moved
from medpfl.data.target import Target
from medpfl.tasks.losses.contract import Loss


@dataclass(frozen=True)
class Marginal(Loss):
    """Another loss, of fewer classes: those that are annotated, and the background with all others in it.

    With logits z the background's is log(exp z_0 + sum over the other classes of exp z_k), so that its softmax is the
    sum of their probabilities (Fang and Yan, IEEE TMI 2020).

    Args:
        loss: the other one.
        annotated: numbers of the annotated classes, ascending, without the background.
    """

    answers: ClassVar = (Target.MASK,)

    loss: Loss
    annotated: tuple[int, ...]

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        others = [number for number in range(outputs.shape[1]) if number not in self.annotated]
        apart, own = (moved(torch.tensor(each, dtype=torch.long), outputs.device) for each in (others, self.annotated))
        background = torch.logsumexp(outputs[:, apart], dim=1, keepdim=True)
        numbers = torch.zeros(outputs.shape[1], dtype=torch.long, device=targets.device)
        for place, number in enumerate(self.annotated, start=1):
            numbers[number] = place
        merged = torch.cat([background, outputs[:, own]], dim=1)
        return self.loss.of(merged, numbers[targets.long()])
