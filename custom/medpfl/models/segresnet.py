# SPDX-License-Identifier: Apache-2.0
"""Networks for segmentation of residual blocks: SegResNet and V-Net. Inputs C x H x W or C x D x H x W."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.norms import Norm, with_norm
from medpfl.models.options import axes_of, share, whole

_VNET = 16
"""Channels of V-Net's first level."""


@dataclass(frozen=True)
class SegResNet(Architecture):
    """MONAI's SegResNet without its autoencoder (Myronenko, BrainLes 2018), in 2-D or 3-D.

    Args:
        init_filters: channels of the top level; each level below has twice as many.
        blocks_down: residual blocks of each level on the way down, 2 levels or more.
        blocks_up: of each level on the way up, one level fewer.
        norm: kind of normalisation.
        dropout: share of the first features that is left out in training, in [0, 1).
    """

    init_filters: int = 8
    blocks_down: tuple[int, ...] = (1, 2, 2, 4)
    blocks_up: tuple[int, ...] = (1, 1, 1)
    norm: Norm = "group"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        whole(self, "init_filters")
        whole(self, "blocks_down", "blocks_up", most=100)
        share(self)
        if len(self.blocks_down) < 2 or len(self.blocks_up) != len(self.blocks_down) - 1:
            raise ConfigError(
                "SegResNet's blocks_down must be 2 numbers or more and blocks_up one fewer, got "
                f"{list(self.blocks_down)} and {list(self.blocks_up)}"
            )

    @property
    def multiple(self) -> int:
        return int(2 ** (len(self.blocks_down) - 1))

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        from monai.networks.nets import SegResNet as Network

        network = Network(
            axes_of(self, input_shape),
            self.init_filters,
            input_shape[0],
            outputs,
            self.dropout or None,
            norm=("batch", {"affine": True}),
            blocks_down=self.blocks_down,
            blocks_up=self.blocks_up,
        )
        return with_norm(network, self.norm, input_shape)


@dataclass(frozen=True)
class VNet(Architecture):
    """MONAI's V-Net (Milletari, Navab, Ahmadi, 3DV 2016), in 2-D or 3-D: five levels of 16 to 256 channels.

    Args:
        norm: kind of normalisation.
        dropout: share of the channels that is left out in training, in [0, 1).
    """

    norm: Norm = "batch"
    dropout: float = 0.5

    def __post_init__(self) -> None:
        share(self)

    @property
    def multiple(self) -> int:
        return 16

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Of 1, 2, 4, 8 or 16 channels: they are repeated to make up the first level's 16."""
        from monai.networks.nets import VNet as Network

        axes = axes_of(self, input_shape)
        if _VNET % input_shape[0]:
            raise ConfigError(f"VNet takes inputs of 1, 2, 4, 8 or 16 channels, got {input_shape[0]}")
        network = Network(axes, input_shape[0], outputs)
        _leave_out(network, partial(nn.Dropout2d if axes == 2 else nn.Dropout3d, self.dropout))
        return with_norm(network, self.norm, input_shape)


def _leave_out(network: nn.Module, dropout: Callable[[], nn.Module]) -> None:
    """A ``dropout`` wherever channels are left out: MONAI's leaves out half of them in its two upper levels
    whatever it is given, and in 2-D all channels of an image or none, as its layers are always those of volumes."""
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Dropout3d):
                module.register_module(name, dropout())
