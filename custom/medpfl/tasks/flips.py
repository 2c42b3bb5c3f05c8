# SPDX-License-Identifier: Apache-2.0
"""Test-time flips: what a network says of an image and of its mirror images, averaged."""

from collections.abc import Callable
from itertools import combinations

from torch import Tensor

from medpfl.core.errors import ConfigError


def check_flips(flips: tuple[int, ...], axes: int, task: str) -> None:
    """Refuse axes that images of so many ``axes`` do not have.

    Raises:
        ConfigError: one is not between 0 and the last, or stands twice.
    """
    if len(set(flips)) < len(flips) or not all(0 <= axis < axes for axis in flips):
        raise ConfigError(f"{task}'s flips must be different axes between 0 and {axes - 1}, got {list(flips)}")


def flipped(forward: Callable[[Tensor], Tensor], inputs: Tensor, flips: tuple[int, ...], back: bool) -> Tensor:
    """The mean of a network's outputs for inputs B x C x H x W [x D] and for them mirrored along every combination of
    ``flips``: 2 to the power of their number passes. Outputs are averaged before softmax or sigmoid, as nnU-Net does
    (``_internal_maybe_mirror_and_predict`` of its predictor).

    Args:
        flips: axes, without batch and channels.
        back: whether outputs are images, which are mirrored back.
    """
    total = forward(inputs)
    for count in range(1, len(flips) + 1):
        for chosen in combinations(flips, count):
            axes = [axis + 2 for axis in chosen]
            outputs = forward(inputs.flip(axes))
            total = total + (outputs.flip(axes) if back else outputs)
    return total / 2 ** len(flips) if flips else total
