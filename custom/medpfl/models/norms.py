# SPDX-License-Identifier: Apache-2.0
"""The normalisation of a network: over the batch, over each sample's channels, or over groups of them."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from medpfl.core.errors import ConfigError

Norm = Literal["batch", "instance", "group"]
GROUPS = 8
"""Groups of a group norm (Wu, He, ECCV 2018); fewer where the channels are no multiple of it."""

_INSTANCE = {nn.BatchNorm1d: nn.InstanceNorm1d, nn.BatchNorm2d: nn.InstanceNorm2d, nn.BatchNorm3d: nn.InstanceNorm3d}


def with_norm(network: nn.Module, norm: Norm, input_shape: tuple[int, ...]) -> nn.Module:
    """The same network, which was built with BatchNorm, with layers of this kind in the places of BatchNorm.

    Weights and biases keep their names and their start at 1 and 0; instance and group norm keep no statistics of the
    data, and do the same in training and evaluation.

    Args:
        input_shape: C x ...; the network must leave more than one position of it to every instance norm, and more than
            one value to every group of a group norm.

    Raises:
        ConfigError: it does not.
    """
    if norm == "batch":
        return network
    for module in list(network.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, _BatchNorm):
                module.register_module(name, _instead(child, norm))
    _check_positions(network, input_shape)
    return network


def _instead(layer: _BatchNorm, norm: Norm) -> nn.Module:
    channels = layer.num_features
    if norm == "group":
        return nn.GroupNorm(math.gcd(GROUPS, channels), channels, eps=layer.eps)
    kind = next(other for known, other in _INSTANCE.items() if isinstance(layer, known))
    return kind(channels, eps=layer.eps, affine=True)


def _check_positions(network: nn.Module, input_shape: tuple[int, ...]) -> None:
    try:
        shapes_alone(network, input_shape)
    except ValueError as error:
        if "more than 1 value per channel" in str(error):
            raise ConfigError(
                f"group norm needs more than one value in each group, and of inputs of shape {input_shape} this "
                f"network keeps a single position of {GROUPS} channels or fewer in its deepest layers, each of them a "
                "group: take larger inputs, fewer levels, or more channels"
            ) from error
        if "more than 1 spatial element" not in str(error):
            raise
        raise ConfigError(
            f"instance norm needs more than one position, and of inputs of shape {input_shape} this network keeps a "
            "single one in its deepest layers: take larger inputs, fewer levels, or group norm"
        ) from error


def shapes_alone(network: nn.Module, input_shape: tuple[int, ...]) -> None:
    """A pass of one input over shapes alone: nothing is computed, and no memory taken. What torch has against them, it
    raises."""
    shapes = {name: one.to("meta") for name, one in (*network.named_parameters(), *network.named_buffers())}
    network.eval()
    try:
        with torch.no_grad():
            blank = torch.empty((), device="meta").expand(1, *input_shape)
            torch.func.functional_call(network, shapes, (blank,))
    finally:
        network.train()


@contextmanager
def single_sample_errors(batch_size: int) -> Iterator[None]:
    """What torch raises where BatchNorm is to train on a single value, as one sentence.

    Raises:
        ConfigError: in place of torch's error.
    """
    try:
        yield
    except ValueError as error:  # torch has no error class of its own for it
        if "more than 1 value per channel" not in str(error):
            raise
        raise ConfigError(
            "BatchNorm cannot train on a batch of a single sample where the network leaves one position of it: take a "
            f"larger batch_size (now {batch_size}); a hospital with one training sample needs a network without "
            "BatchNorm"
        ) from error
