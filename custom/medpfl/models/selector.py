# SPDX-License-Identifier: Apache-2.0
"""FedSM's model selector: which hospital does an input look like?

A selector has two parts. ``signature`` has no weights, so it is computed once for every training sample and kept;
``decide`` is what is trained. What tells scanners and hospitals apart is less what is shown than how: the distribution
of intensities, and of the local contrast that noise and sharpness leave. The default selector sees just that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture

LEVELS = 13
"""Quantiles a channel and feature: 0.02, 0.10, ..., 0.98."""


class Selector(nn.Module):
    """Base: ``forward(inputs) = decide(signature(inputs))``, B x ... to B x K. Without buffers."""

    layers: nn.Module

    def signature(self, inputs: Tensor) -> Tensor:
        """What the trained part sees of the inputs, B x ...; the inputs themselves by default."""
        return inputs

    def decide(self, signature: Tensor) -> Tensor:
        """Logits, B x K."""
        outputs: Tensor = self.layers(signature)
        return outputs

    def forward(self, inputs: Tensor) -> Tensor:
        return self.decide(self.signature(inputs))


class SignatureNetwork(Selector):
    """A perceptron on the quantiles of the intensities and of the local contrast at two scales.

    Rows of features (B x F) are their own signature.
    """

    def __init__(self, input_shape: Sequence[int], classes: int, hidden: int):
        super().__init__()
        features = input_shape[0] if len(input_shape) == 1 else 3 * LEVELS * input_shape[0]
        self.layers = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))

    def signature(self, inputs: Tensor) -> Tensor:
        if inputs.ndim == 2:
            return inputs
        f = nn.functional
        pool = (f.avg_pool1d, f.avg_pool2d, f.avg_pool3d)[inputs.ndim - 3]
        halved = pool(inputs, 2, ceil_mode=True)
        contrasts = [(x - _smoothed(x)).abs() for x in (inputs, halved)]
        found = [_quantiles(inputs), *((_quantiles(contrast) + 0.01).log() for contrast in contrasts)]
        together = torch.cat(found, dim=1)
        return nn.functional.layer_norm(together, together.shape[1:])


def _smoothed(values: Tensor) -> Tensor:
    """Each value's mean with its neighbours."""
    f = nn.functional
    if values.ndim == 5:  # PyTorch's 3-D pooling refuses an axis of two voxels, padded or not
        return f.avg_pool3d(f.pad(values, [1] * 6, mode="replicate"), 3, 1)
    pool = f.avg_pool1d if values.ndim == 3 else f.avg_pool2d
    return pool(values, 3, 1, 1, count_include_pad=False)


def _quantiles(values: Tensor) -> Tensor:
    """B x C x ... to B x (C LEVELS), channel by channel."""
    ordered = values.flatten(2).sort(dim=2).values
    places = torch.linspace(0.02, 0.98, LEVELS, device=values.device) * (ordered.shape[2] - 1)
    return ordered[:, :, places.round().long()].flatten(1)


class ConvNetwork(Selector):
    """Strided convolutions with GroupNorm; mean and deviation of every channel over the image or series."""

    def __init__(self, input_shape: Sequence[int], classes: int, widths: Sequence[int]):
        super().__init__()
        convolution = nn.Conv1d if len(input_shape) == 2 else nn.Conv2d
        blocks: list[nn.Module] = []
        for before, after in pairwise([input_shape[0], *widths]):
            blocks += [convolution(before, after, 3, stride=2, padding=1), nn.GroupNorm(4, after), nn.ReLU()]
        self.layers = nn.Sequential(*blocks, _MeanAndDeviation(), nn.Linear(2 * widths[-1], classes))


class _MeanAndDeviation(nn.Module):
    def forward(self, features: Tensor) -> Tensor:
        flat = features.flatten(2)
        return torch.cat([flat.mean(dim=2), (flat.var(dim=2, unbiased=False) + 1e-5).sqrt()], dim=1)


class _Layers(Selector):
    def __init__(self, layers: nn.Module):
        super().__init__()
        self.layers = layers


@dataclass(frozen=True)
class Signature(Architecture):
    """The default selector: about 1,400 weights for images with one channel, 6 kB. Images, volumes, series, rows.

    Args:
        hidden: width of the hidden layer, >= 1.
    """

    hidden: int = 32

    def __post_init__(self) -> None:
        if self.hidden < 1:
            raise ConfigError(f"Signature's hidden must be at least 1, got {self.hidden}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> Selector:
        return SignatureNetwork(input_shape, outputs, self.hidden)


@dataclass(frozen=True)
class SmallCnn(Architecture):
    """A small convolutional network: about 24,000 weights, 0.1 MB. Images and series.

    Args:
        widths: channels of its layers, multiples of 4.
    """

    widths: tuple[int, ...] = (16, 32, 64)

    def __post_init__(self) -> None:
        object.__setattr__(self, "widths", tuple(self.widths))  # JSON has lists
        if not self.widths or any(width < 4 or width % 4 for width in self.widths):
            raise ConfigError(f"SmallCnn's widths must be multiples of 4, got {list(self.widths)}")

    def build(self, input_shape: tuple[int, ...], outputs: int) -> Selector:
        if len(input_shape) not in (2, 3):
            raise ConfigError(f"SmallCnn sees images and series, not inputs of shape {list(input_shape)}")
        return ConvNetwork(input_shape, outputs, self.widths)


@dataclass(frozen=True)
class Vgg11(Architecture):
    """VGG-11 as in the paper (Simonyan and Zisserman, 2015, configuration A): 129 million weights, 515 MB. Images.

    Of any size from 32 x 32: what the convolutions leave is averaged to 7 x 7.
    """

    def build(self, input_shape: tuple[int, ...], outputs: int) -> Selector:
        if len(input_shape) != 3 or min(input_shape[1:]) < 32:
            raise ConfigError(f"Vgg11 sees images from 32 x 32 pixels, not inputs of shape {list(input_shape)}")
        layers: list[nn.Module] = []
        channels = input_shape[0]
        for widths in ((64,), (128,), (256, 256), (512, 512), (512, 512)):
            for width in widths:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
                channels = width
            layers.append(nn.MaxPool2d(2))
        layers += [nn.AdaptiveAvgPool2d(7), nn.Flatten()]
        for before, after in ((512 * 49, 4096), (4096, 4096)):
            layers += [nn.Linear(before, after), nn.ReLU(), nn.Dropout()]
        return _Layers(nn.Sequential(*layers, nn.Linear(4096, outputs)))


def with_content(inputs: Tensor) -> Tensor:
    """B flags: samples that are not one constant value (as a slice beside the body is, which no hospital owns)."""
    if inputs.ndim == 2:  # rows of features
        return torch.ones(len(inputs), dtype=torch.bool, device=inputs.device)
    flat = inputs.flatten(1)
    return flat.amax(dim=1) > flat.amin(dim=1)


def by_case(logits: Tensor, case: NDArray[np.int64], content: Tensor) -> Tensor:
    """One distribution a case, in logarithms (cases x K): the mean log-probability over its samples with content, or
    over all of them where none has any.

    Args:
        logits: N x K of the selector.
        case: N indices of the cases, from 0.
        content: N flags of ``with_content``.
    """
    scores = logits.float().log_softmax(dim=1)
    index = torch.from_numpy(case).to(scores.device)
    total = scores.new_zeros(int(case.max()) + 1, scores.shape[1])
    weight = content.to(scores) + 1e-6  # counts only where nothing else does
    total.index_add_(0, index, scores * weight[:, None])
    return (total / total.new_zeros(len(total)).index_add_(0, index, weight)[:, None]).log_softmax(dim=1)
