# SPDX-License-Identifier: Apache-2.0
"""Layers that keep their weights: constants of the network instead of parameters, so that nothing that goes through its
parameters (optimisers, proximal terms, control variates) sees them. Their entries in the state keep their names."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.tied import first_names

_MARK = "_medpfl_frozen"
"""Of a frozen layer: the names of what were its weights."""


def freeze(network: nn.Module, paths: Sequence[str]) -> None:
    """Freeze the modules at these paths, which exist. What layers in them keep of their inputs (the statistics of
    normalisation, say) or otherwise move in training stands still, too.

    Raises:
        ConfigError: a tensor in one of them is shared with a layer outside of them.
    """
    inside = tuple(f"{path}." for path in paths)
    for key, first in first_names(network).items():
        if key.startswith(inside) != first.startswith(inside):
            raise ConfigError(f"'{first}' and '{key}' are one tensor, which layers share: freeze both or neither")
    constants: dict[int, Tensor] = {}
    for path in paths:
        for module in network.get_submodule(path).modules():
            if hasattr(module, _MARK):  # one path lies within another
                continue
            keeps = next(module.buffers(recurse=False), None) is not None
            own = list(module.named_parameters(recurse=False))
            for name, weights in own:
                delattr(module, name)
                module.register_buffer(name, constants.setdefault(id(weights), weights.detach()))
            if keeps:  # before other hooks: torch's older spectral normalisation is one
                module.register_forward_pre_hook(_still, prepend=True)
            setattr(module, _MARK, tuple(name for name, _ in own))


def _still(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Before every pass: what the layer keeps in buffers does not move, whatever mode the network is in."""
    module.training = False


@contextmanager
def training_only(network: nn.Module, names: Collection[str] = ()) -> Iterator[None]:
    """Meanwhile, of the network's parameters those of these names alone are trained. What the network itself holds
    fixed (``requires_grad`` is False) is trained neither meanwhile nor afterwards."""
    trained = [(name, weight) for name, weight in network.named_parameters() if weight.requires_grad]
    try:
        for name, weight in trained:
            weight.requires_grad_(name in names)
        yield
    finally:
        for _, weight in trained:
            weight.requires_grad_(True)


def frozen_entries(root: nn.Module) -> set[str]:
    """State-dict keys of what is frozen below ``root``."""
    marked = tuple(f"{path}." for path, module in root.named_modules() if hasattr(module, _MARK))
    return {key for key in root.state_dict() if key.startswith(marked)}


def is_frozen(module: nn.Module) -> bool:
    """Whether the layer is one that ``freeze`` froze."""
    return hasattr(module, _MARK)


def has_weights(module: nn.Module) -> bool:
    """Whether it has weights of its own, frozen or not."""
    return next(module.parameters(recurse=False), None) is not None or bool(getattr(module, _MARK, ()))


def count_weights(network: nn.Module) -> int:
    """How many numbers its weights are, frozen or not; a tensor that layers share counts once."""
    frozen = (layer.get_buffer(name) for layer in network.modules() for name in getattr(layer, _MARK, ()))
    return sum({id(weights): weights.numel() for weights in (*network.parameters(), *frozen)}.values())
