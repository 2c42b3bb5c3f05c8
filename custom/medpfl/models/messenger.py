# SPDX-License-Identifier: Apache-2.0
"""MH-pFLID's messenger: a light network, the same at every hospital, beside models that all differ.

Xie et al., "MH-pFLID: Model Heterogeneous Personalized Federated Learning via Injection and Distillation for Medical
Data Analysis", ICML 2024, Tables 9 and 10. Every convolution after the first has 64 groups: that is the only reading
of the tables that gives the number of weights of Table 5 (196,545 for binary segmentation of RGB images).
"""

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.memory_order import channels_last

WIDTH, DEPTH = 64, 512
"""Channels of the first layers, and of the feature map."""

_CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
_UP = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
_MEAN = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


class Messenger(nn.Module):
    """``body``: B x C x ... to B x 512 x grid; ``head``: the grid to B x outputs, or to B x outputs x ... if ``dense``.

    Raises:
        ConfigError: inputs without space or time, or (dense) not a multiple of 16 long.
    """

    def __init__(self, input_shape: tuple[int, ...], outputs: int, dense: bool):
        super().__init__()
        dims = len(input_shape) - 1
        if dims not in _CONV:
            raise ConfigError(f"a messenger needs inputs C x length, C x H x W or C x D x H x W, got {input_shape}")
        if dense and any(length % 16 for length in input_shape[1:]):
            raise ConfigError(
                f"a messenger for segmentation halves its input four times: every length must be a multiple of 16, "
                f"got {input_shape[1:]}"
            )
        self.body = _dense_body(dims, input_shape[0]) if dense else _body(dims, input_shape[0])
        self.head = _dense_head(dims, outputs) if dense else _head(dims, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.body(inputs))
        return outputs


def _convolution(dims: int, before: int, after: int, kernel: int, stride: int) -> nn.Module:
    groups = WIDTH if before == WIDTH else 1
    return _CONV[dims](before, after, kernel, stride=stride, padding=kernel // 2, groups=groups)


def _body(dims: int, channels: int) -> nn.Module:
    """Table 9: every layer has stride 2."""
    pool = _POOL[dims]
    layers = [
        _convolution(dims, channels, WIDTH, 3, 2),
        nn.ReLU(),
        pool(3, stride=2, padding=1),
        _convolution(dims, WIDTH, WIDTH, 5, 2),
        nn.ReLU(),
        pool(3, stride=2, padding=1),
        _convolution(dims, WIDTH, DEPTH, 7, 2),
        nn.ReLU(),
    ]
    return channels_last(nn.Sequential(*layers))


def _head(dims: int, outputs: int) -> nn.Sequential:
    """Table 9: Linear-256, BatchNorm, ReLU, Linear, on the mean of the map."""
    return nn.Sequential(
        _MEAN[dims](1), nn.Flatten(), nn.Linear(DEPTH, 256), nn.BatchNorm1d(256), nn.ReLU(), nn.Linear(256, outputs)
    )


def _dense_body(dims: int, channels: int) -> nn.Module:
    """Table 10: convolutions of stride 1, max pooling of stride 2."""
    layers: list[nn.Module] = []
    for before, after, kernel in ((channels, WIDTH, 3), (WIDTH, WIDTH, 5), (WIDTH, WIDTH, 7), (WIDTH, DEPTH, 7)):
        layers += [_convolution(dims, before, after, kernel, 1), _POOL[dims](3, stride=2, padding=1)]
    return channels_last(nn.Sequential(*layers))


def _dense_head(dims: int, outputs: int) -> nn.Sequential:
    """Table 10: four transposed convolutions of stride 2 with ReLU between."""
    layers: list[nn.Module] = []
    for before, after in ((DEPTH, WIDTH), (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, outputs)):
        layers += [nn.ReLU()] * bool(layers) + [_UP[dims](before, after, 2, stride=2)]
    return nn.Sequential(*layers)
