# SPDX-License-Identifier: Apache-2.0
"""Convolutional networks for time series: B x channels x length to B x outputs."""

from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture


@dataclass(frozen=True)
class Conv1d(Architecture):
    """Blocks of convolution, BatchNorm and ReLU, each but the last followed by max pooling by 2; then the mean over
    time and a linear layer.

    Args:
        channels: width of each block.
        kernel: length of the convolutions in time steps, odd.
    """

    channels: tuple[int, ...] = (32, 64, 64)
    kernel: int = 7

    def __post_init__(self) -> None:
        object.__setattr__(self, "channels", tuple(self.channels))  # JSON has lists
        if not self.channels or min(self.channels) < 1:
            raise ConfigError(f"Conv1d's channels must be 1 or more widths of at least 1, got {list(self.channels)}")
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ConfigError(f"Conv1d's kernel must be odd and at least 1, got {self.kernel}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, length = series_shape(self, input_shape)
        needed = 2 ** (len(self.channels) - 1)
        if length < needed:
            raise ConfigError(f"Conv1d with {len(self.channels)} blocks needs {needed} time steps, got {length}")
        layers: list[nn.Module] = []
        for before, after in pairwise((inputs, *self.channels)):
            if layers:
                layers.append(nn.MaxPool1d(2))
            convolution = nn.Conv1d(before, after, self.kernel, padding=self.kernel // 2, bias=False)
            layers += [convolution, nn.BatchNorm1d(after), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(self.channels[-1], outputs))


@dataclass(frozen=True)
class Pamap2Cnn(Architecture):
    """FedAP's network for PAMAP2 (Lu et al., IEEE Transactions on Big Data 2022): two convolutions of length 9 to 16
    and 32 channels, each with BatchNorm, ReLU and max pooling by 2; then 64 hidden units.

    On the paper's 27 channels x 200 steps and 10 classes it has 99,466 weights. The paper's (1, 9) kernels on
    27 x 1 x 200 inputs are the same as kernels of length 9 here.
    """

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        inputs, length = series_shape(self, input_shape)
        left = ((length - 8) // 2 - 8) // 2
        if left < 1:
            raise ConfigError(f"Pamap2Cnn needs at least 28 time steps, got {length}")
        layers: list[nn.Module] = []
        for before, after in ((inputs, 16), (16, 32)):
            layers += [nn.Conv1d(before, after, 9), nn.BatchNorm1d(after), nn.ReLU(), nn.MaxPool1d(2)]
        return nn.Sequential(*layers, nn.Flatten(), nn.Linear(32 * left, 64), nn.ReLU(), nn.Linear(64, outputs))


def series_shape(architecture: Architecture, input_shape: tuple[int, ...]) -> tuple[int, int]:
    """Channels and length of inputs channels x length.

    Raises:
        ConfigError: the inputs have another form.
    """
    if len(input_shape) != 2:
        raise ConfigError(f"{type(architecture).__name__} takes channels x length, got inputs of shape {input_shape}")
    return input_shape[0], input_shape[1]
