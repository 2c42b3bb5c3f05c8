# SPDX-License-Identifier: Apache-2.0
"""Adam's step on one tensor (Kingma and Ba, 2015), for where an optimiser's state must be data like any other."""

from torch import Tensor


def adam_step(
    weight: Tensor,
    gradient: Tensor,
    mean: Tensor,
    square: Tensor,
    step: float,
    lr: float,
    beta1: float = 0.9,
    beta2: float = 0.999,
) -> None:
    """Move ``weight`` and both moments in place.

    Args:
        gradient: of the type of the moments.
        mean, square: running means of the gradient and its square; the step is computed in their type.
        step: number of this step, from 1.
    """
    mean.lerp_(gradient, 1 - beta1)
    square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    scale = (square / (1 - beta2**step)).sqrt_().add_(1e-8)
    weight.copy_(weight.to(mean.dtype) - lr / (1 - beta1**step) * mean / scale)
