# SPDX-License-Identifier: Apache-2.0
"""Light residual networks of any number of stages: ResNet, ResNeXt (grouped) and SENet (squeeze and excitation)."""

from dataclasses import dataclass

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.memory_order import channels_last


class SqueezeExcitation(nn.Module):
    """Hu et al., CVPR 2018: channels weighed by a gate that sees the mean of each."""

    def __init__(self, channels: int, reduction: int):
        super().__init__()
        hidden = max(1, channels // reduction)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, hidden, 1),
            nn.ReLU(),
            nn.Conv2d(hidden, channels, 1),
            nn.Sigmoid(),
        )

    def forward(self, features: Tensor) -> Tensor:
        weighed: Tensor = features * self.gate(features)
        return weighed


class Block(nn.Module):
    """Two 3 x 3 convolutions with BatchNorm beside a shortcut (He et al., CVPR 2016); the first may be grouped."""

    def __init__(self, before: int, after: int, stride: int, groups: int, squeeze: bool):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, groups=groups, bias=False),
            nn.BatchNorm2d(after),
        )
        if squeeze:
            self.body.append(SqueezeExcitation(after, reduction=8))
        self.shortcut = nn.Sequential()
        if stride > 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))
        self.activation = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.activation(self.body(features) + self.shortcut(features))
        return result


@dataclass(frozen=True)
class ResidualNet(Architecture):
    """A 3 x 3 stem of stride 2, stages of residual blocks (each after the first halves the map and doubles the
    channels), the mean over the map and a linear layer.

    The ResNet-17, -11, -8 and -5 of MH-pFLID are, by number of convolutions, blocks [2, 2, 2, 2], [1, 1, 2, 1],
    [1, 1, 1] (7, and the linear layer) and [1, 1].

    Args:
        blocks: number of blocks of each stage, 1 to 5 stages.
        width: channels of the first stage.
        groups: groups of every block's second convolution; ResNeXt's cardinality (Xie et al., CVPR 2017).
        squeeze: with squeeze and excitation.
    """

    blocks: tuple[int, ...] = (2, 2, 2, 2)
    width: int = 16
    groups: int = 1
    squeeze: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", tuple(self.blocks))  # JSON has lists
        if not 1 <= len(self.blocks) <= 5 or min(self.blocks) < 1:
            raise ConfigError(f"ResidualNet's blocks must be 1 to 5 numbers of at least 1, got {list(self.blocks)}")
        if self.width < 1 or self.groups < 1 or self.width % self.groups:
            raise ConfigError(
                f"ResidualNet's groups must divide its width, got groups {self.groups}, width {self.width}"
            )

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels = plane(self, input_shape)
        layers: list[nn.Module] = [
            nn.Sequential(nn.Conv2d(channels, self.width, 3, 2, 1, bias=False), nn.BatchNorm2d(self.width), nn.ReLU())
        ]
        before = self.width
        for stage, count in enumerate(self.blocks):
            after = self.width * 2**stage
            strides = [1 if stage == 0 else 2] + [1] * (count - 1)
            blocks = []
            for stride in strides:
                blocks.append(Block(before, after, stride, self.groups, self.squeeze))
                before = after
            layers.append(nn.Sequential(*blocks))
        return channels_last(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs)))


def plane(architecture: Architecture, input_shape: tuple[int, ...]) -> int:
    """Channels of inputs C x H x W.

    Raises:
        ConfigError: the inputs have another form.
    """
    if len(input_shape) != 3:
        raise ConfigError(f"{type(architecture).__name__} takes inputs C x H x W, got inputs of shape {input_shape}")
    return input_shape[0]
