# SPDX-License-Identifier: Apache-2.0
"""FedSM's model selector: which hospital does an input look like?"""

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn


class Selector(nn.Module):
    """A small network without buffers (GroupNorm): images BCHW, series B x C x length or vectors B x F to B x K.

    About 24,000 weights for images: 0.1 MB, where the paper's VGG-11 has 515 MB.

    Args:
        input_shape: shape of one input: (C, H, W), (C, length) or (F,).
        classes: number K of hospitals.
    """

    def __init__(self, input_shape: Sequence[int], classes: int):
        super().__init__()
        if len(input_shape) == 1:
            self.layers = nn.Sequential(nn.Linear(input_shape[0], 32), nn.ReLU(), nn.Linear(32, classes))
            return
        series = len(input_shape) == 2
        convolution, pool = (nn.Conv1d, nn.AdaptiveAvgPool1d) if series else (nn.Conv2d, nn.AdaptiveAvgPool2d)
        widths = [input_shape[0], 16, 32, 64]
        blocks: list[nn.Module] = []
        for before, after in pairwise(widths):
            blocks += [convolution(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
        self.layers = nn.Sequential(*blocks, pool(1), nn.Flatten(), nn.Linear(widths[-1], classes))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs
