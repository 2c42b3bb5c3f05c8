# SPDX-License-Identifier: Apache-2.0
"""LeNet5 with BatchNorm, the network of FedAP's MedMNIST experiments (Lu et al., 2022)."""

from dataclasses import dataclass

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture

_SMALLEST = 16  # the two convolutions and poolings leave 1 x 1 of it


@dataclass(frozen=True)
class LeNet5(Architecture):
    """Two 5 x 5 convolutions (6 and 16 channels), each with BatchNorm, ReLU and max-pooling; layers of 120 and 84."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Inputs C x H x W of at least 16 x 16; 44,555 weights for 1 x 28 x 28 and 11 outputs."""
        if len(input_shape) != 3 or min(input_shape[1:]) < _SMALLEST:
            raise ConfigError(f"LeNet5 needs inputs C x H x W of at least 16 x 16, got the shape {input_shape}")
        channels, *lengths = input_shape
        height, width = (((length - 4) // 2 - 4) // 2 for length in lengths)
        return nn.Sequential(
            *(nn.Conv2d(channels, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Flatten(),
            *(nn.Linear(16 * height * width, 120), nn.ReLU()),
            *(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, outputs),
        )
