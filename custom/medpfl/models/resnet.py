# SPDX-License-Identifier: Apache-2.0
"""Residual networks (He et al., CVPR 2016) of any width."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.memory_order import channels_last
from medpfl.models.norms import Norm, with_norm

_BLOCKS = {10: [1, 1, 1, 1], 18: [2, 2, 2, 2], 34: [3, 4, 6, 3]}


@dataclass(frozen=True)
class ResNet(Architecture):
    """MONAI's ResNet of basic blocks; the stem is a 3 x 3 convolution of stride 2, for small images.

    Args:
        width: channels of the first of the four stages, >= 1; each later stage doubles them. 64 is the original.
        depth: number of layers.
        pool: max-pooling after the stem, so that the stages see a quarter of the input's height and width instead of
            a half; without it training takes about 3 times as long, and inputs as small as 28 x 28 keep more detail.
        norm: kind of normalisation.
    """

    width: int = 16
    depth: Literal[10, 18, 34] = 18
    pool: bool = True
    norm: Norm = "batch"

    extractor: ClassVar = "layer2"  # as in the CusFL paper: after the ninth convolution of ResNet18

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"ResNet's width must be at least 1, got {self.width}")
        if self.depth not in _BLOCKS:
            raise ConfigError(f"ResNet's depth must be one of {', '.join(map(str, _BLOCKS))}, got {self.depth}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Inputs C x H x W or C x D x H x W."""
        from monai.networks.nets import ResNet as Network

        if len(input_shape) not in (3, 4):
            raise ConfigError(f"ResNet needs inputs C x H x W or C x D x H x W, got the shape {input_shape}")
        network: nn.Module = Network(
            "basic",
            _BLOCKS[self.depth],
            [self.width * factor for factor in (1, 2, 4, 8)],
            spatial_dims=len(input_shape) - 1,
            n_input_channels=input_shape[0],
            conv1_t_size=3,
            conv1_t_stride=2,
            no_max_pool=not self.pool,
            num_classes=outputs,
        )
        return channels_last(with_norm(network, self.norm, input_shape))
