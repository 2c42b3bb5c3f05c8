# SPDX-License-Identifier: Apache-2.0
"""The loss of several labels a case."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from medpfl.data.target import Target
from medpfl.tasks.losses.contract import Loss


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """The mean of the binary cross-entropy over all labels of a batch that are known; 0 (and its gradient) where
    none is."""

    answers: ClassVar = (Target.LABELS,)

    def importance(self, targets: Tensor) -> Tensor | None:
        """By how many of its labels are known; nothing of a sample of which none is."""
        known = (~targets.isnan()).sum(dim=1)
        return None if bool((known == targets.shape[1]).all()) else known * (len(known) / known.sum().clamp(min=1))

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of outputs B x C (logits) and targets B x C (1, 0, or NaN where a label is not known)."""
        known = ~targets.isnan()
        wanted = targets.nan_to_num().to(outputs.dtype)
        each = nn.functional.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
        return (each * known).sum() / known.sum().clamp(min=1)
