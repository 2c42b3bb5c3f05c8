# SPDX-License-Identifier: Apache-2.0
"""The order in which a tensor's values lie in memory."""

import torch
from torch import Tensor


def laid_out_like(weight: Tensor, gradient: Tensor) -> Tensor:
    """``gradient``, its values in memory in the order of those of ``weight``.

    ``backward`` gathers gradients so, and torch's fused optimisers rely on it. ``torch.autograd.grad`` gives a
    convolution's in the order of its images: a fused step then takes each value for one of another weight, in silence
    on a processor; on a GPU it fails.
    """
    if gradient.stride() == weight.stride():
        return gradient
    return torch.empty_like(weight).copy_(gradient)
