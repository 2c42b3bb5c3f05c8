# SPDX-License-Identifier: Apache-2.0
"""Losses of every sample, or every pixel, by itself: cross-entropy, with weights or without, and focal loss."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from medpfl.core.devices import moved
from medpfl.core.errors import ConfigError
from medpfl.data.target import Target, listed
from medpfl.tasks.losses.contract import Loss, both


@dataclass(frozen=True)
class CrossEntropy(Loss):
    """The mean over the samples (or pixels) of the weight of their class times their cross-entropy.

    The sum is divided by the number of samples, not, as torch does, by the sum of their weights: so a batch in which a
    rare class happens to be missing does not count as much as one that has it.

    Args:
        weights: a number for each class in their declared order; or "balanced": each hospital weighs a class by
            n / (K n_c) with n of its own training samples, n_c of them of the class, and K classes that it has. These
            have the mean 1, so the learning rate keeps its meaning. None: all classes count alike.
    """

    answers: ClassVar = (Target.CLASS, Target.MASK)

    weights: tuple[float, ...] | Literal["balanced"] | None = None
    _own: tuple[float, ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.weights, tuple) and not (
            self.weights and all(one >= 0 for one in self.weights) and any(self.weights)
        ):
            raise ConfigError(
                'CrossEntropy\'s weights must be numbers of at least 0, not all of them 0, or "balanced"; got '
                f"{list(self.weights)}"
            )

    @property
    def by_own_counts(self) -> bool:
        return self.weights == "balanced"

    def suits(self, target: Target, task: str) -> None:
        super().suits(target, task)
        if self.weights == "balanced" and target is Target.MASK:
            raise ConfigError(
                f'CrossEntropy\'s weights cannot be "balanced" in {task}: a mask has pixels of all classes, in very '
                "unlike numbers; give numbers, or take DiceCE or Tversky"
            )

    def informed(self, classes: Sequence[str], counts: Sequence[int] | None) -> Self:
        if self.weights is None:
            return self
        if self.weights != "balanced":
            if len(self.weights) != len(classes):
                there = f"{len(classes)} classes: {listed(classes)}"
                raise ConfigError(f"CrossEntropy has {len(self.weights)} weights, and there are {there}")
            return self._with(self.weights)
        if not counts or not any(counts):
            raise ConfigError('CrossEntropy\'s weights cannot be "balanced": the training samples have no classes')
        present = sum(count > 0 for count in counts)
        return self._with(tuple(sum(counts) / (present * count) if count else 1.0 for count in counts))

    def _with(self, weights: tuple[float, ...]) -> Self:
        mine = dataclasses.replace(self)
        object.__setattr__(mine, "_own", weights)
        return mine

    def importance(self, targets: Tensor) -> Tensor | None:
        if not self._own:
            return super().importance(targets)
        return torch.tensor(self._own)[targets.long()].reshape(len(targets), -1).mean(dim=1)

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.weights is not None:
            return self._weighted(both(outputs), targets.long())
        if outputs.shape[1] == 1:
            return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], targets.to(outputs.dtype))
        return nn.functional.cross_entropy(outputs, targets.long())

    def _weighted(self, outputs: Tensor, targets: Tensor) -> Tensor:
        weights = self._own or self.weights
        if weights == "balanced" or weights is None:
            raise ConfigError('CrossEntropy with "balanced" weights was asked for a loss before it was told the counts')
        each = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (moved(torch.tensor(weights, dtype=each.dtype), each.device)[targets] * each).mean()


@dataclass(frozen=True)
class Focal(Loss):
    """Cross-entropy in which what is right already counts little: -(1 - p)^gamma log p, with p the right class's
    probability (Lin et al., ICCV 2017). Mean over the samples (or pixels); with gamma = 0 it is the cross-entropy.

    Args:
        gamma: in [0, 10]. The paper has at most 5; far beyond it a single sample of a batch would decide.
    """

    answers: ClassVar = (Target.CLASS, Target.MASK)

    gamma: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.gamma <= 10:
            raise ConfigError(f"Focal's gamma must be in [0, 10], got {self.gamma}")

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        from monai.losses import FocalLoss

        outputs = both(outputs)
        focal = FocalLoss(to_onehot_y=True, use_softmax=True, gamma=self.gamma)
        loss: Tensor = focal(outputs, targets.unsqueeze(1)) * outputs.shape[1]  # MONAI's mean is over classes too
        return loss
