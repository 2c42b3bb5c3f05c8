# SPDX-License-Identifier: Apache-2.0
"""AlexNet with BatchNorm, the network of FedAP's COVID-19 experiments (Lu et al., 2022)."""

from dataclasses import dataclass

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture

_SMALLEST = 63  # what the stride of 4 and three poolings leave at least one value of


@dataclass(frozen=True)
class AlexNet(Architecture):
    """Five convolutions (64, 192, 384, 256, 256 channels), each with BatchNorm and ReLU; pooling to 6 x 6; two layers
    of ``hidden`` units with BatchNorm and ReLU.

    Args:
        hidden: width of the two fully connected layers, >= 1; 4096 is the original.
    """

    hidden: int = 4096

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ConfigError(f"AlexNet's hidden must be at least 1, got {self.hidden}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        """Inputs C x H x W of at least 63 x 63; 57,038,916 weights for three channels and four outputs."""
        if len(input_shape) != 3 or min(input_shape[1:]) < _SMALLEST:
            raise ConfigError(f"AlexNet needs inputs C x H x W of at least 63 x 63, got the shape {input_shape}")
        return nn.Sequential(
            *(nn.Conv2d(input_shape[0], 64, 11, stride=4, padding=2), nn.BatchNorm2d(64), nn.ReLU()),
            nn.MaxPool2d(3, 2),
            *(nn.Conv2d(64, 192, 5, padding=2), nn.BatchNorm2d(192), nn.ReLU()),
            nn.MaxPool2d(3, 2),
            *(nn.Conv2d(192, 384, 3, padding=1), nn.BatchNorm2d(384), nn.ReLU()),
            *(nn.Conv2d(384, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU()),
            *(nn.Conv2d(256, 256, 3, padding=1), nn.BatchNorm2d(256), nn.ReLU()),
            nn.MaxPool2d(3, 2),
            *(nn.AdaptiveAvgPool2d(6), nn.Flatten()),
            *(nn.Linear(256 * 36, self.hidden), nn.BatchNorm1d(self.hidden), nn.ReLU()),
            *(nn.Linear(self.hidden, self.hidden), nn.BatchNorm1d(self.hidden), nn.ReLU()),
            nn.Linear(self.hidden, outputs),
        )
