# SPDX-License-Identifier: Apache-2.0
"""Copies of networks some of whose tensors are computed of others."""

import copy
from typing import TypeVar

from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def computed_of(module: nn.Module) -> list[Tensor]:
    """What the layer itself holds beside its parameters and buffers, as ``weight_norm`` and ``spectral_norm`` of
    ``torch.nn.utils`` do with the weight that they compute anew before every pass."""
    return [value for value in vars(module).values() if isinstance(value, Tensor)]


def copied(network: Network) -> Network:
    """A network of its own with the same weights. ``copy.deepcopy`` refuses what gradients go through."""
    held = [tensor for module in network.modules() for tensor in computed_of(module) if not tensor.is_leaf]
    return copy.deepcopy(network, {id(tensor): tensor.detach().clone() for tensor in held})
