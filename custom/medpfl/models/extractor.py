# SPDX-License-Identifier: Apache-2.0
"""The first part of a network: everything that runs until one of its modules is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from medpfl.core.copied import copied
from medpfl.core.errors import ConfigError

_LISTS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""A network may go through these, and through several side by side, before it comes to the last module."""


class _Done(Exception):
    """Carries what the module gave out of the network's forward pass."""

    def __init__(self, output: Tensor):
        super().__init__()
        self.output = output


class Extractor(nn.Module):
    """A copy of a network up to the module at ``path``; what comes later is neither computed nor held.

    Inputs B x ... to what that module gives, B x C x .... The entries of its state dict are called as in the network,
    below ``network.``.

    Args:
        network: stays as it is.
        path: of the last module.
        input_shape: of one input, for the trial run that finds out what runs when.

    Attributes:
        channels: C.

    Raises:
        ConfigError: there is no such module, or the network cannot be split there.
    """

    def __init__(self, network: nn.Module, path: str, input_shape: tuple[int, ...]):
        super().__init__()
        if not path or path not in dict(network.named_modules()):
            children = ", ".join(name for name, _ in network.named_children())
            raise ConfigError(f"no module '{path}' in {type(network).__name__}; its children are: {children}")
        self.network, self.path = copied(network), path
        begun, ended, shape = self._trial(input_shape)
        if len(shape) < 2 or (len(shape) == 3 and len(input_shape) > 2):  # tokens, B x N x C, have C at their end
            raise ConfigError(
                f"{type(network).__name__} cannot be split after '{path}': it gives the shape {shape}, and a vector "
                "B x C or a map B x C x ..., with the axes of the input, is needed"
            )
        self.channels = shape[1]
        whole = set(self.network.state_dict())
        _strip(self.network, "", begun, ended)
        for key in self.network.state_dict():
            owner = key.rpartition(".")[0]
            if not any(_inside(owner, done) for done in ended):
                raise ConfigError(
                    f"{type(network).__name__} cannot be split after '{path}': '{key}' belongs to neither part"
                )
        if whole == set(self.network.state_dict()) or not self.network.state_dict():
            part = "head" if self.network.state_dict() else "extractor"
            raise ConfigError(f"{type(network).__name__} cannot be split after '{path}': the {part} would be empty")

    def forward(self, inputs: Tensor) -> Tensor:
        with self._stop():
            try:
                self.network(inputs)
            except _Done as done:
                return done.output
        raise ConfigError(f"module '{self.path}' of {type(self.network).__name__} is not used")

    @contextmanager
    def _stop(self) -> Iterator[None]:
        def stop(module: nn.Module, args: Any, output: Any) -> None:
            if not isinstance(output, Tensor):
                raise ConfigError(f"module '{self.path}' of {type(self.network).__name__} gives no tensor")
            raise _Done(output)

        handle = self.network.get_submodule(self.path).register_forward_hook(stop)
        try:
            yield
        finally:
            handle.remove()

    def _trial(self, input_shape: tuple[int, ...]) -> tuple[set[str], set[str], tuple[int, ...]]:
        """Paths of the modules that begin, and of those that end, in one pass; and the shape of what it gives."""
        begun, ended = set[str](), set[str]()
        handles = []
        for path, module in self.network.named_modules(remove_duplicate=False):  # a shared one has several paths
            handles.append(module.register_forward_pre_hook(lambda _, args, path=path: begun.add(path)))
            handles.append(module.register_forward_hook(lambda _, args, output, path=path: ended.add(path)))
        training = self.network.training
        device = next(self.network.parameters()).device
        try:
            with torch.no_grad():
                shape = tuple(self.eval()(torch.zeros(1, *input_shape, device=device)).shape)
        finally:
            for handle in handles:
                handle.remove()
        self.train(training)
        return begun, ended, shape


def _strip(module: nn.Module, path: str, begun: set[str], ended: set[str]) -> None:
    """Replace every submodule that plays no part by one that holds nothing."""
    for name, child in list(module._modules.items()):  # ``named_children`` has a shared one once
        inner = f"{path}.{name}" if path else name
        if child is None or inner in ended:
            continue
        if isinstance(child, _LISTS) or any(_inside(other, inner) for other in begun):
            _strip(child, inner, begun, ended)
        else:
            setattr(module, name, nn.Identity())


def _inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(f"{outer}.")
