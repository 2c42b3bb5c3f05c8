# SPDX-License-Identifier: Apache-2.0
"""A second device on a machine that has none: its tensors lie on the processor, and are told apart from those that do.

torch's device "meta" has no numbers. Within ``Elsewhere`` it has: what is copied to it, or made on it, is a tensor that
says it lies there, and computes with the processor's own operations. As on a GPU, an operation that is given tensors of
both devices is refused, but for copies, indices, and single values; so results are those of the processor to the bit,
and whatever was left on the wrong device raises.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing

DEVICE = torch.device("meta")
aten = torch.ops.aten
_MAY_MIX = {aten.copy_.default, aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
_COPY = aten._to_copy.default


class There(Tensor):
    """A tensor of the second device; ``inner`` has its numbers."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "There":
        made: There = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    def __init__(self, inner: Tensor):
        pass

    def __repr__(self, **_: Any) -> str:
        return f"There({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class Elsewhere(TorchDispatchMode):
    """While it lasts, ``DEVICE`` has numbers."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled within it; to say so to the compiler at every operation takes a third of its time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        wanted = named.get("device")
        if (wanted is not None and torch.device(wanted) == DEVICE) or any(
            type(one) is There for one in _all(args, named)
        ):
            return _run(func, args, named)
        return func(*args, **named)


def _run(func: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
    tensors = [one for one in _all(args, named) if isinstance(one, Tensor)]
    there = [one for one in tensors if isinstance(one, There)]
    here = [one for one in tensors if not isinstance(one, There) and one.dim() > 0]
    if there and here and func not in _MAY_MIX:
        raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
    wanted = named.get("device")
    goes = bool(there) if wanted is None else torch.device(wanted) == DEVICE
    inside = {key: value for key, value in named.items() if key != "device"}
    if wanted is not None and func is not _COPY:
        inside["device"] = torch.device("cpu")
    inside.pop("pin_memory", None)
    found = func(*map(_inner, args), **{key: _inner(value) for key, value in inside.items()})
    if func is aten.copy_.default:
        return args[0]
    if not goes:
        return found
    wrapped = _outer(found)
    return return_and_correct_aliasing(func, args, named, wrapped) if there else wrapped


def _all(args: Any, named: dict[str, Any]) -> Iterator[Any]:
    """What an operation is given, lists apart. (torch's functions for trees of any kind take ten times as long.)"""
    yield from _flat(args)
    yield from _flat(named.values())


def _flat(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flat(value)
        else:
            yield value


def _inner(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_inner, value))
    return value.inner if type(value) is There else value


def _outer(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_outer, value))
    return There(value) if isinstance(value, Tensor) else value
