# SPDX-License-Identifier: Apache-2.0
"""What a loss is: a component that a task's ``loss`` names, from a batch of outputs and targets to one number."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Self

import torch
from torch import Tensor

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError, shown
from medpfl.data.target import Target
from medpfl.models.outputs import check_outputs, check_places


class Loss(Checked):
    """A frozen dataclass whose fields are the job's arguments."""

    answers: ClassVar[tuple[Target, ...]]
    """The kinds of answers that it can be computed of."""

    @property
    def by_own_counts(self) -> bool:
        """Whether it goes by how many cases of each class the hospital has."""
        return False

    def suits(self, target: Target, task: str) -> None:
        """Refuse a task whose answers it cannot be computed of.

        Raises:
            ConfigError: naming the loss, the task and what the loss is for.
        """
        if not getattr(self, "answers", None):
            raise ConfigError(f"{type(self).__name__} has no 'answers': the kinds of answers it can be computed of")
        if target not in self.answers:
            raise ConfigError(
                f"{type(self).__name__} is a loss of tasks whose answer is "
                f"{' or '.join(one.told for one in self.answers)}; the answer of {task} is {target.told}"
            )

    def informed(self, classes: Sequence[str], counts: Sequence[int] | None) -> Self:
        """The loss as one hospital uses it; the same, unless it goes by the hospital's own data.

        What it learns here is no argument of the component: it is in no configuration, and no message holds it.

        Args:
            classes: names of the declared classes.
            counts: training samples of each class; None where a sample has no class of its own (masks).

        Raises:
            ConfigError: its arguments do not fit these classes.
        """
        return self

    def importance(self, targets: Tensor) -> Tensor | None:
        """How much each sample of a batch counts, B, >= 0; None, as by default: all alike."""
        return None

    def __call__(self, outputs: Tensor | Sequence[Tensor], targets: Tensor) -> Tensor:
        """The scalar loss of a batch.

        Args:
            outputs: B x C x ..., or of two classes B x 1 x ... (logistic); or several such from a network with deep
                supervision, the finest first.
            targets: B x ... class indices.
        """
        check_outputs(outputs, several=True)
        if isinstance(outputs, Tensor):
            return self._checked(outputs, targets)
        return deeply_supervised(self._checked, outputs, targets)

    def _checked(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if Target.MASK in self.answers:
            check_places(outputs, targets)
        if outputs.dtype in (torch.float16, torch.bfloat16):  # whose sums end at 65504, or have three digits
            outputs = outputs.float()
        found: object = self.of(outputs, targets)
        if not isinstance(found, Tensor) or found.numel() != 1:
            got = f"a tensor of the shape {list(found.shape)}" if isinstance(found, Tensor) else shown(found)
            raise ConfigError(
                f"'of' of {type(self).__name__} must give a tensor of one number, the loss; it gives {got}"
            )
        if outputs.requires_grad and torch.is_grad_enabled() and not found.requires_grad:
            raise ConfigError(
                f"'of' of {type(self).__name__} gives a number that does not depend on the network's outputs any more, "
                "so that nothing could be trained: compute it by torch, without detach, item or numpy"
            )
        return found

    @abstractmethod
    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The scalar loss of one output; shapes as in ``__call__``."""


def deeply_supervised(loss: Callable[[Tensor, Tensor], Tensor], outputs: Sequence[Tensor], targets: Tensor) -> Tensor:
    """The weighted mean of the loss of all outputs, with weights 1, 1/2, 1/4, ... that are divided by their sum
    (Isensee et al., nnU-Net, Nature Methods 2021); coarser outputs are compared with the targets' nearest pixels.

    Args:
        outputs: each B x C x ..., the finest first.
        targets: B x ... class indices.
    """
    from monai.losses import DeepSupervisionLoss

    def one(output: Tensor, target: Tensor) -> Tensor:
        return loss(output, target[:, 0].to(targets.dtype))

    weights = [0.5**level for level in range(len(outputs))]
    each = DeepSupervisionLoss(one, weights=[weight / sum(weights) for weight in weights])
    total: Tensor = each(list(outputs), targets.unsqueeze(1).float())
    return total


def both(outputs: Tensor) -> Tensor:
    """Outputs B x C x ... with a channel for each class: of a logistic output z they are 0 and z, whose softmax is its
    sigmoid."""
    if outputs.shape[1] > 1:
        return outputs
    return torch.cat([torch.zeros_like(outputs), outputs], dim=1)
