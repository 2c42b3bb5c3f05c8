# SPDX-License-Identifier: Apache-2.0
"""Where a network's body ends and its head begins, found by running it once."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.models.outputs import check_outputs

_OF_TOKENS = (nn.TransformerEncoder, nn.TransformerDecoder, nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
"""What these and the layers in them give has the channels last, B x N x C; of a series its shape does not tell."""


def find_body(network: nn.Module, input_shape: tuple[int, ...], first: bool = False) -> str:
    """Path of the last module to give the smallest feature map of more than one position: the last stage of a
    classifier before its pooling, the bottleneck of a UNet. One of which the network's result makes nothing, as of the
    scores of a lower level that deep supervision trains, is none of its body.

    Args:
        first: go by what a module gives when it first runs. One that runs several times, such as the activation after
            each of a network's layers, is the last by its last run; who stops after the first needs another one.

    Raises:
        ConfigError: no module below the network gives a feature map.
    """
    tokens = tuple(f"{path}." for path, module in network.named_modules() if isinstance(module, _OF_TOKENS))
    maps = {
        path: shape
        for path, shape in _run(network, input_shape, first, used=True).items()
        if path and _is_map(shape, input_shape) and not f"{path}.".startswith(tokens)
    }
    if not maps:
        raise ConfigError(
            f"{type(network).__name__} gives no feature map for inputs of shape {input_shape}; name the module that "
            "ends its body"
        )
    least = min(math.prod(shape[2:]) for shape in maps.values())
    return [path for path, shape in maps.items() if math.prod(shape[2:]) == least][-1]


def body_shape(network: nn.Module, path: str, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """C x grid of what the module at ``path`` gives.

    Raises:
        ConfigError: there is no such module, it is not used, or it gives no feature map.
    """
    shapes = _run(network, input_shape)
    if path not in dict(network.named_modules()):
        children = ", ".join(name for name, _ in network.named_children())
        raise ConfigError(f"no module '{path}' in {type(network).__name__}; its children are: {children}")
    if path not in shapes or not _is_map(shapes[path], input_shape):
        got = f"gives {tuple(shapes[path][1:])}" if path in shapes else "gives no tensor"
        raise ConfigError(
            f"module '{path}' of {type(network).__name__} cannot end its body: it {got} for inputs of shape "
            f"{input_shape}, and a feature map C x {' x '.join('DHW'[-(len(input_shape) - 1) :])} of more than one "
            "position is needed"
        )
    return tuple(shapes[path][1:])


def output_shape(network: nn.Module, input_shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of what the network gives for one input of shape ``input_shape``.

    Raises:
        ConfigError: it gives no tensor.
    """
    with watched(network, "") as seen:
        _run(network, input_shape)
    check_outputs(seen[0])
    return tuple(seen[0].shape[1:])


def _is_map(shape: torch.Size, input_shape: tuple[int, ...]) -> bool:
    return len(shape) == len(input_shape) + 1 and math.prod(shape[2:]) > 1


def _run(
    network: nn.Module, input_shape: tuple[int, ...], first: bool = False, used: bool = False
) -> dict[str, torch.Size]:
    """Path to output shape of every module that gives a tensor (``used``: of which the result makes something), in the
    order in which they last (or ``first``) finish. Neither weights, nor running statistics, nor the random generator
    change."""
    found: dict[str, torch.Size] = {}
    given: dict[str, Tensor] = {}

    def watch(path: str) -> None:
        def note(module: nn.Module, args: object, output: object) -> None:
            if isinstance(output, Tensor) and not (first and path in found):
                found.pop(path, None)
                found[path] = output.shape
                if used and output.requires_grad:
                    given[path] = output

        handles.append(network.get_submodule(path).register_forward_hook(note))

    handles: list[torch.utils.hooks.RemovableHandle] = []
    for path, _ in network.named_modules():
        watch(path)
    training = [module for module in network.modules() if module.training]
    blank = torch.zeros(1, *input_shape, device=next(network.parameters()).device)
    network.eval()
    try:
        with torch.set_grad_enabled(used):
            result = network(blank.requires_grad_(used).clone())  # some write into their inputs
            if used and isinstance(result, Tensor) and result.requires_grad:
                reached = torch.autograd.grad(result.sum(), list(given.values()), allow_unused=True)
                for path, gradient in zip(given, reached, strict=True):
                    if gradient is None:
                        del found[path]
        for handle in handles:
            handle.remove()
        if used:
            with torch.no_grad():
                network(blank.detach().clone())  # what it holds of its last pass must have no graph: it is copied
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return found


@contextmanager
def watched(
    network: nn.Module, path: str, of: Callable[[Tensor], Tensor] = lambda output: output
) -> Iterator[list[Tensor]]:
    """What the module at ``path`` gave in each forward pass inside the block.

    Args:
        of: what is kept of it, before the next module runs, which may write into it (an activation in place).
    """
    seen: list[Tensor] = []
    handle = network.get_submodule(path).register_forward_hook(lambda module, args, output: seen.append(of(output)))
    try:
        yield seen
    finally:
        handle.remove()
