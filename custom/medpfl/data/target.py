# SPDX-License-Identifier: Apache-2.0
"""What the answer to a case is. A task says which it learns, a kind of dataset which it can give; whoever handles
answers without knowing the task asks here what applies to them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Target(StrEnum):
    """What ``Samples.targets`` and a task's decisions look like.

    ``CLASS``: one class a sample; N class indices (int64), decisions N x C probabilities.
    ``MASK``: a class for every pixel or voxel; N x H x W indices (uint8), decisions the same.
    ``LABELS``: of several labels whether a sample has each; N x C zeros and ones (float32), NaN where that is not
    known; decisions N x C probabilities.
    ``VALUE``: one number a sample; N values (float32), decisions the same. It has no classes.
    ``SURVIVAL``: a time, and whether an event ended it (1) or only its observation (0); N x 2 (float32), decisions N
    logarithms of the hazard ratio. It has no classes.
    """

    CLASS = "class"
    MASK = "mask"
    LABELS = "labels"
    VALUE = "value"
    SURVIVAL = "survival"

    @property
    def told(self) -> str:
        """For sentences and cards."""
        return {
            Target.CLASS: "one class a case",
            Target.MASK: "a class for every pixel or voxel",
            Target.LABELS: "for each label whether the case has it",
            Target.VALUE: "one number a case",
            Target.SURVIVAL: "the time until an event, or until it had not come yet",
        }[self]

    def counts(self, targets: Tensor, classes: int) -> list[int] | None:
        """Samples of each class, or with each label; None where a sample has none of its own (masks, numbers)."""
        import torch

        if self is Target.CLASS:
            found: list[int] = torch.bincount(targets.long(), minlength=classes).tolist()
            return found
        if self is Target.LABELS:
            found = (targets == 1).sum(dim=0).tolist()
            return found
        return None


def listed(class_names: Sequence[str]) -> str:
    """Classes in a sentence."""
    return ", ".join(class_names) or "none"
