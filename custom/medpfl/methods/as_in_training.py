# SPDX-License-Identifier: Apache-2.0
"""New cases for networks that can judge inputs only as large as those of training: slices come as large as they are."""

from collections.abc import Sequence

from torch import Tensor, nn


def as_in_training(inputs: Tensor, shape: Sequence[int]) -> Tensor:
    """Slices, or a volume, cut or padded to the size that training saw.

    Args:
        inputs: B x C x ...
        shape: of one input in training, C x ...
    """
    for axis, length in enumerate(shape[1:], start=2):
        missing = max(length - inputs.shape[axis], 0)
        if missing:
            before = missing - missing // 2  # as ``CaseRows.centre`` has it
            around = [0, 0] * (inputs.ndim - axis - 1) + [before, missing // 2]
            inputs = nn.functional.pad(inputs, around)
        inputs = inputs.narrow(axis, (inputs.shape[axis] - length) // 2, length)
    return inputs
