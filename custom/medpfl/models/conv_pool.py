# SPDX-License-Identifier: Apache-2.0
"""The network of the CusFL paper's prostate study, as far as it is described there (Wicaksana et al., JBHI 2022)."""

from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.residual import Block, plane


@dataclass(frozen=True)
class ConvPool(Architecture):
    """Blocks of a 3 x 3 convolution with BatchNorm, ReLU and max-pooling; two residual blocks; the mean over the map
    and a linear layer. The paper says how many blocks there are, not how wide they are.

    Args:
        channels: of each convolution-and-pooling block; the paper has four. Methods split after the third.
    """

    channels: tuple[int, ...] = (16, 32, 64, 128)

    extractor: ClassVar = "2"

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))  # JSON has lists
        if not 3 <= len(self.channels) <= 6 or min(self.channels) < 1:
            raise ConfigError(f"ConvPool's channels must be 3 to 6 numbers of at least 1, got {list(self.channels)}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Inputs C x H x W, H and W at least 2 ** len(channels)."""
        widths = [plane(self, input_shape), *self.channels]
        least = 2 ** len(self.channels)
        if min(input_shape[1:]) < least:
            raise ConfigError(f"ConvPool needs inputs of at least {least} x {least}, got the shape {input_shape}")
        blocks = [
            nn.Sequential(nn.Conv2d(before, after, 3, 1, 1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2))
            for before, after in pairwise(widths)
        ]
        last = widths[-1]
        residual = [Block(last, last, stride=1, groups=1, squeeze=False) for _ in range(2)]
        return nn.Sequential(*blocks, *residual, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(last, outputs))
