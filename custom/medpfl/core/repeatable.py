# SPDX-License-Identifier: Apache-2.0
"""Operations that torch adds up in any order on a GPU, said with others that it always adds up in the same one.

Asked for the same bits of every run (``torch.use_deterministic_algorithms``), torch refuses these operations there. The
others take longer, and differ in the last digits.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from medpfl.core.devices import moved

_LINEAR = ("linear", "bilinear", "trilinear")


def repeatable(device: torch.device) -> AbstractContextManager[object]:
    """While it lasts, this thread takes operations that repeat themselves on a GPU, where that was asked for."""
    return Repeatable() if device.type == "cuda" and torch.are_deterministic_algorithms_enabled() else nullcontext()


class Repeatable(TorchFunctionMode):
    """Takes the place of: cross-entropy of maps, linear interpolation, mean pooling (adaptive; of volumes), cumulative
    sums."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _OTHERS.get(func, func)(*args, **(kwargs or {}))


def _cross_entropy(outputs: Tensor, targets: Tensor, *args: Any, reduction: str = "mean", **named: Any) -> Tensor:
    """torch adds up the pixels' losses as they come; here each is computed, then they are added up."""
    if args or reduction == "none" or targets.is_floating_point():
        plain: Callable[..., Tensor] = nn.functional.cross_entropy
        return plain(outputs, targets, *args, reduction=reduction, **named)
    total = nn.functional.cross_entropy(outputs, targets, reduction="none", **named).sum()
    if reduction == "sum":
        return total
    counted, weight = targets != named.get("ignore_index", -100), named.get("weight")
    counts: Tensor = counted if weight is None else weight[torch.where(counted, targets, 0)] * counted
    return total / counts.sum()


def _interpolate(
    inputs: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *args: Any, **named: Any
) -> Tensor:
    """Linear interpolation, axis by axis, as products with matrices."""
    if mode not in _LINEAR or args or named.get("antialias") or named.get("recompute_scale_factor"):
        return nn.functional.interpolate(inputs, size, scale_factor, mode, *args, **named)
    corners, lengths = bool(named.get("align_corners")), inputs.shape[2:]
    each = zip(lengths, _each(size, len(lengths)), _each(scale_factor, len(lengths)), strict=True)
    return _by_axis(inputs, [_stretching(length, one, scale, corners) for length, one, scale in each])


def _pooled(pool: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Adaptive mean pooling, likewise; to a single position torch computes a mean, which repeats itself."""
    axes = {nn.functional.adaptive_avg_pool1d: 1, nn.functional.adaptive_avg_pool2d: 2}.get(pool, 3)

    def other(inputs: Tensor, output_size: Any) -> Tensor:
        sizes = _each(output_size, axes)
        if all(one == 1 for one in sizes):
            return pool(inputs, output_size)
        return _by_axis(inputs, [_pooling(*pair) for pair in zip(inputs.shape[-axes:], sizes, strict=True)])

    return other


def _mean_pooled(
    inputs: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, ceil_mode: bool = False, *args: Any,
    **named: Any,
) -> Tensor:  # fmt: skip
    """Mean pooling of volumes, likewise; what is padded stays torch's own, which refuses."""
    if any(_each(padding, 3)) or any(args[1:]) or named.get("divisor_override"):
        return nn.functional.avg_pool3d(inputs, kernel_size, stride, padding, ceil_mode, *args, **named)
    steps = kernel_size if stride is None or stride == [] else stride
    each = zip(inputs.shape[-3:], _each(kernel_size, 3), _each(steps, 3), strict=True)
    return _by_axis(inputs, [_averaging(length, window, step, ceil_mode) for length, window, step in each])


def _cumsum(values: Tensor, dim: int, **named: Any) -> Tensor:
    """A product with a triangle of ones."""
    if not values.is_floating_point() or named:
        return torch.cumsum(values, dim, **named)
    length = values.shape[dim]
    return _along(values, torch.ones(length, length, dtype=values.dtype, device=values.device).triu(), dim)


def _each(value: Any, axes: int) -> Sequence[Any]:
    return value if isinstance(value, (tuple, list, torch.Size)) else [value] * axes


@cache
def _stretching(length: int, size: int | None, scale: float | None, corners: bool) -> Tensor:
    """What each of so many positions adds to each position of the result: length x length of the result."""
    ones = torch.eye(length)[None]
    given = {"size": size} if size is not None else {"scale_factor": scale}
    found: Tensor = nn.functional.interpolate(ones, mode="linear", align_corners=corners, **given)
    return found[0]


@cache
def _pooling(length: int, size: int | None) -> Tensor:
    return nn.functional.adaptive_avg_pool1d(torch.eye(length)[None], size or length)[0]


@cache
def _averaging(length: int, window: int, step: int, ceil_mode: bool) -> Tensor:
    return nn.functional.avg_pool1d(torch.eye(length)[None], window, step, 0, ceil_mode)[0]


def _by_axis(values: Tensor, matrices: Sequence[Tensor]) -> Tensor:
    """Each of the last axes, multiplied by its matrix."""
    for axis, matrix in enumerate(matrices, start=values.ndim - len(matrices)):
        values = _along(values, moved(matrix.to(values.dtype), values.device), axis)
    return values


def _along(values: Tensor, matrix: Tensor, axis: int) -> Tensor:
    with torch.autocast(values.device.type, enabled=False):
        return (values.movedim(axis, -1) @ matrix).movedim(-1, axis)


_OTHERS: dict[Callable[..., Any], Callable[..., Tensor]] = {
    nn.functional.cross_entropy: _cross_entropy,
    nn.functional.interpolate: _interpolate,
    nn.functional.adaptive_avg_pool1d: _pooled(nn.functional.adaptive_avg_pool1d),
    nn.functional.adaptive_avg_pool2d: _pooled(nn.functional.adaptive_avg_pool2d),
    nn.functional.adaptive_avg_pool3d: _pooled(nn.functional.adaptive_avg_pool3d),
    nn.functional.avg_pool3d: _mean_pooled,
    torch.cumsum: _cumsum,
    Tensor.cumsum: _cumsum,
}
