# SPDX-License-Identifier: Apache-2.0
"""The loss of regions that overlap: of each by itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.devices import moved
from medpfl.data.target import Target
from medpfl.tasks.losses.contract import Loss


def inside(labels: Tensor, regions: Sequence[Sequence[int]]) -> Tensor:
    """Whether each pixel or voxel is in each region: of labels B x ... truth values B x R x ..."""
    return torch.stack([torch.isin(labels, moved(torch.tensor(one), labels.device)) for one in regions], dim=1)


@dataclass(frozen=True)
class RegionDiceCE(Loss):
    """Dice loss (of each case and region by itself) plus binary cross-entropy, as nnU-Net's ``DC_and_BCE_loss``.

    Args:
        regions: the labels of each region, as the task has them; it gives them to its loss.
    """

    answers: ClassVar = (Target.MASK,)

    regions: tuple[tuple[int, ...], ...]

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Of outputs B x R x ... (logits) and labels B x ..."""
        from monai.losses import DiceLoss

        wanted = inside(targets.long(), self.regions).to(outputs.dtype)
        loss: Tensor = DiceLoss(sigmoid=True)(outputs, wanted)
        return loss + nn.functional.binary_cross_entropy_with_logits(outputs, wanted)
