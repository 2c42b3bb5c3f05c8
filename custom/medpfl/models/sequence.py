# SPDX-License-Identifier: Apache-2.0
"""Further networks for time series, B x channels x length: TCN, Transformer, RNN. Feature maps are B x C x length."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.conv1d import series_shape


def _head(width: int, outputs: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(width, outputs)]


class Causal(nn.Module):
    """TCN's block: two dilated convolutions that see the past only, beside a shortcut."""

    def __init__(self, before: int, after: int, kernel: int, dilation: int):
        super().__init__()
        past = nn.ConstantPad1d(((kernel - 1) * dilation, 0), 0.0)
        self.body = nn.Sequential(
            past, nn.Conv1d(before, after, kernel, dilation=dilation), nn.BatchNorm1d(after), nn.ReLU(),
            past, nn.Conv1d(after, after, kernel, dilation=dilation), nn.BatchNorm1d(after), nn.ReLU(),
        )  # fmt: skip
        self.shortcut = nn.Conv1d(before, after, 1) if before != after else nn.Identity()
        self.activation = nn.ReLU()

    def forward(self, series: Tensor) -> Tensor:
        result: Tensor = self.activation(self.body(series) + self.shortcut(series))
        return result


@dataclass(frozen=True)
class TCN(Architecture):
    """Bai, Kolter, Koltun, arXiv:1803.01271, 2018: causal convolutions with dilations 1, 2, 4 ...; BatchNorm instead
    of weight normalisation, the mean over time instead of the last step.

    Args:
        channels: width of each block.
        kernel: length of the convolutions, >= 2.
    """

    channels: tuple[int, ...] = (32, 32, 64, 64)
    kernel: int = 5

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))  # JSON has lists
        if not self.channels or min(self.channels) < 1 or self.kernel < 2:
            raise ConfigError(
                f"TCN's channels must be at least 1 and its kernel 2, got {list(self.channels)}, {self.kernel}"
            )

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        before, _ = series_shape(self, input_shape)
        layers: list[nn.Module] = []
        for level, after in enumerate(self.channels):
            layers.append(Causal(before, after, self.kernel, 2**level))
            before = after
        return nn.Sequential(*layers, *_head(before, outputs))


class Encoder(nn.Module):
    """Patches of the series as tokens with learned positions, and Transformer layers over them."""

    def __init__(self, channels: int, length: int, width: int, heads: int, layers: int, patch: int):
        super().__init__()
        self.patches = nn.Conv1d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, length // patch, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, series: Tensor) -> Tensor:
        tokens = self.patches(series).transpose(1, 2) + self.positions
        result: Tensor = self.layers(tokens).transpose(1, 2)
        return result


@dataclass(frozen=True)
class SeriesTransformer(Architecture):
    """Transformer encoder for time series after Zerveas et al., KDD 2021, on patches instead of single steps.

    Args:
        width: of the tokens, a multiple of ``heads``.
        heads, layers: of the encoder.
        patch: time steps of a token.
    """

    width: int = 64
    heads: int = 4
    layers: int = 2
    patch: int = 8

    def __post_init__(self) -> None:
        if min(self.width, self.heads, self.layers, self.patch) < 1 or self.width % self.heads:
            raise ConfigError(f"SeriesTransformer's arguments must be at least 1 and heads divide width, got {self}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, length = series_shape(self, input_shape)
        if length < 2 * self.patch:
            raise ConfigError(
                f"SeriesTransformer with patches of {self.patch} needs {2 * self.patch} steps, got {length}"
            )
        encoder = Encoder(channels, length, self.width, self.heads, self.layers, self.patch)
        return nn.Sequential(encoder, *_head(self.width, outputs))


class Recurrent(nn.Module):
    """A bidirectional GRU whose outputs form the map."""

    def __init__(self, channels: int, width: int, layers: int):
        super().__init__()
        self.cells = nn.GRU(channels, width // 2, layers, batch_first=True, bidirectional=True)

    def forward(self, series: Tensor) -> Tensor:
        result: Tensor = self.cells(series.transpose(1, 2))[0].transpose(1, 2)
        return result


@dataclass(frozen=True)
class RNN(Architecture):
    """A bidirectional GRU, the mean over time and a linear layer.

    Args:
        width: of the outputs of both directions together, even.
        layers: of the GRU.
        stride: time steps that are averaged into one before it, for speed.
    """

    width: int = 64
    layers: int = 1
    stride: int = 4

    def __post_init__(self) -> None:
        if self.width < 2 or self.width % 2 or self.layers < 1 or self.stride < 1:
            raise ConfigError(f"RNN's width must be even and at least 2, layers and stride at least 1, got {self}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        channels, length = series_shape(self, input_shape)
        if length < 2 * self.stride:
            raise ConfigError(f"RNN with stride {self.stride} needs {2 * self.stride} time steps, got {length}")
        pool = nn.AvgPool1d(self.stride)
        return nn.Sequential(pool, Recurrent(channels, self.width, self.layers), *_head(self.width, outputs))
