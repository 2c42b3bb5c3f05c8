# SPDX-License-Identifier: Apache-2.0
"""Layers that keep their weights: constants of the network instead of parameters, so that nothing that goes through its
parameters (optimisers, proximal terms, control variates) sees them. Their entries in the state keep their names."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from medpfl.core.errors import ConfigError
from medpfl.core.tied import first_names

_MARK = "_frozen"


def freeze(network: nn.Module, paths: Sequence[str]) -> None:
    """Freeze the modules at these paths, which exist. Statistics of normalisation in them stand still, too.

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
            for name, weights in list(module.named_parameters(recurse=False)):
                delattr(module, name)
                module.register_buffer(name, constants.setdefault(id(weights), weights.detach()))
            if isinstance(module, _NormBase):
                module.register_forward_pre_hook(_still)
            setattr(module, _MARK, True)


def _still(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Before every pass: the layer's statistics do not move, whatever mode the network is in."""
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
    marked = tuple(f"{path}." for path, module in root.named_modules() if getattr(module, _MARK, False))
    return {key for key in root.state_dict() if key.startswith(marked)}


def has_weights(module: nn.Module) -> bool:
    """Whether it has weights of its own, frozen or not."""
    own = module.parameters(recurse=False), module.buffers(recurse=False) if getattr(module, _MARK, False) else ()
    return any(True for tensors in own for _ in tensors)
