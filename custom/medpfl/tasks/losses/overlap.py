# SPDX-License-Identifier: Apache-2.0
"""Losses of masks that go by how far decision and truth overlap, class by class and without the background."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.data.target import Target
from medpfl.tasks.losses.contract import Loss, both
from medpfl.tasks.losses.entropy import Focal


@dataclass(frozen=True)
class DiceCE(Loss):
    """Dice loss (of each case by itself) plus cross-entropy, as MONAI's ``DiceCELoss``; nnU-Net's choice."""

    answers: ClassVar = (Target.MASK,)

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from monai.losses import DiceCELoss

        dice = DiceCELoss(to_onehot_y=True, softmax=True, include_background=False)
        loss: Tensor = dice(both(outputs), targets.unsqueeze(1))
        return loss


@dataclass(frozen=True)
class DiceFocal(Loss):
    """Dice loss (of each case by itself) plus ``Focal``; ``DiceCE`` with gamma = 0. Not MONAI's ``DiceFocalLoss``,
    whose focal part takes each channel's sigmoid for its probability where decisions are made by softmax.

    Args:
        gamma: the focal loss's exponent, in [0, 10]: the larger, the less counts what is right already.
    """

    answers: ClassVar = (Target.MASK,)

    gamma: float = 2.0

    def __post_init__(self) -> None:
        Focal(self.gamma)

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from monai.losses import DiceLoss

        dice = DiceLoss(to_onehot_y=True, softmax=True, include_background=False)
        loss: Tensor = dice(both(outputs), targets.unsqueeze(1)) + Focal(self.gamma).of(outputs, targets)
        return loss


@dataclass(frozen=True)
class Tversky(Loss):
    """A Dice loss that can weigh what was missed more than what was found wrongly (Salehi et al., MLMI 2017):
    1 - TP / (TP + alpha FP + beta FN). With both 0.5 it is the Dice loss.

    Args:
        alpha: weight of what is found and is not there (FP), >= 0.
        beta: weight of what is there and is not found (FN), >= 0; the paper recommends 0.7 for small lesions.
    """

    answers: ClassVar = (Target.MASK,)

    alpha: float = 0.3
    beta: float = 0.7

    def __post_init__(self) -> None:
        if not (self.alpha >= 0 and self.beta >= 0 and self.alpha + self.beta > 0):
            raise ConfigError(
                "Tversky's alpha and beta must be at least 0, and not both 0; got "
                f"alpha {self.alpha} and beta {self.beta}"
            )

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from monai.losses import TverskyLoss

        tversky = TverskyLoss(
            to_onehot_y=True, softmax=True, include_background=False, alpha=self.alpha, beta=self.beta
        )
        loss: Tensor = tversky(both(outputs), targets.unsqueeze(1))
        return loss
