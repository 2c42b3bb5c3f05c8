# SPDX-License-Identifier: Apache-2.0
"""Light classifiers that MONAI does not have: SqueezeNet, MobileNetV2 and ShuffleNetV2, for small images.

The original networks are for 224 x 224 photographs; here the number of stages and the widths are those of a job, so
that images of 64 x 48 keep a feature map.
"""

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.memory_order import channels_last
from medpfl.models.residual import plane


def _conv(before: int, after: int, kernel: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(after)]


class Fire(nn.Module):
    """SqueezeNet's module: few channels in, 1 x 1 and 3 x 3 side by side out."""

    def __init__(self, before: int, after: int):
        super().__init__()
        squeezed = max(1, after // 8)
        self.squeeze = nn.Sequential(nn.Conv2d(before, squeezed, 1), nn.ReLU())
        self.small = nn.Conv2d(squeezed, after // 2, 1)
        self.large = nn.Conv2d(squeezed, after - after // 2, 3, padding=1)
        self.activation = nn.ReLU()

    def forward(self, features: Tensor) -> Tensor:
        narrow = self.squeeze(features)
        result: Tensor = self.activation(torch.cat([self.small(narrow), self.large(narrow)], dim=1))
        return result


class Inverted(nn.Module):
    """MobileNetV2's block: expand, depthwise convolution, project; a shortcut where shapes allow."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        wide = 6 * before
        self.body = nn.Sequential(
            *_conv(before, wide, 1),
            nn.ReLU6(),
            *_conv(wide, wide, 3, stride, groups=wide),
            nn.ReLU6(),
            *_conv(wide, after, 1),
        )
        self.shortcut = stride == 1 and before == after

    def forward(self, features: Tensor) -> Tensor:
        result: Tensor = self.body(features)
        return features + result if self.shortcut else result


class Shuffled(nn.Module):
    """ShuffleNetV2's unit: half of the channels pass by (all of them are halved with stride 2), then both are mixed."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        self.stride, half = stride, after // 2
        inner = before if stride > 1 else half
        self.body = nn.Sequential(
            *_conv(inner, half, 1), nn.ReLU(), *_conv(half, half, 3, stride, half), *_conv(half, half, 1), nn.ReLU()
        )
        self.aside = nn.Sequential()
        if stride > 1:
            self.aside = nn.Sequential(*_conv(before, before, 3, stride, before), *_conv(before, half, 1), nn.ReLU())

    def forward(self, features: Tensor) -> Tensor:
        one, other = (features, features) if self.stride > 1 else features.chunk(2, dim=1)
        both = torch.stack([self.aside(one), self.body(other)], dim=2)  # interleaved: the channel shuffle
        return both.flatten(1, 2)


@dataclass(frozen=True)
class _Staged(Architecture):
    """A stem of stride 2, then stages of two units; each stage halves the map and has the next width."""

    widths: tuple[int, ...] = (32, 64, 128)

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))  # JSON has lists
        if not 1 <= len(self.widths) <= 5 or any(width < 8 or width % 2 for width in self.widths):
            name = type(self).__name__
            raise ConfigError(f"{name}'s widths must be 1 to 5 even numbers of at least 8, got {list(self.widths)}")

    @abstractmethod
    def stage(self, before: int, after: int) -> list[nn.Module]:
        """The two units."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        first = self.widths[0]
        layers: list[nn.Module] = [nn.Sequential(*_conv(plane(self, input_shape), first, 3, 2), nn.ReLU())]
        for before, after in zip((first, *self.widths), self.widths, strict=False):
            layers.append(nn.Sequential(*self.stage(before, after)))
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(self.widths[-1], outputs)]
        return channels_last(nn.Sequential(*layers, *head))


@dataclass(frozen=True)
class SqueezeNet(_Staged):
    """Iandola et al., arXiv:1602.07360, 2016: Fire modules, no BatchNorm but in the stem; a linear layer at the end.

    Args:
        widths: channels of each stage, even.
    """

    def stage(self, before: int, after: int) -> list[nn.Module]:
        return [nn.MaxPool2d(3, 2, 1), Fire(before, after), Fire(after, after)]


@dataclass(frozen=True)
class MobileNetV2(_Staged):
    """Sandler et al., CVPR 2018: inverted residuals with expansion 6.

    Args:
        widths: channels of each stage, even.
    """

    def stage(self, before: int, after: int) -> list[nn.Module]:
        return [Inverted(before, after, 2), Inverted(after, after, 1)]


@dataclass(frozen=True)
class ShuffleNetV2(_Staged):
    """Ma et al., ECCV 2018.

    Args:
        widths: channels of each stage, even.
    """

    def stage(self, before: int, after: int) -> list[nn.Module]:
        return [Shuffled(before, after, 2), Shuffled(after, after, 1)]
