# SPDX-License-Identifier: Apache-2.0
"""A second device on a machine that has none: its tensors lie on the processor, and are told apart from those that do.

torch's device "meta" has no numbers. Within ``Elsewhere`` it has: what is copied to it, or made on it, is a tensor that
says it lies there, and computes with the processor's own operations. As on a GPU, an operation that is given tensors of
both devices is refused, but for copies, indices, and single values; so results are those of the processor to the bit,
and whatever was left on the wrong device raises.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map_only

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        wanted = named.get("device")
        if any(isinstance(leaf, There) for leaf in tree_leaves((args, named))) or (
            wanted is not None and torch.device(wanted) == DEVICE
        ):
            return _run(func, args, named)
        return func(*args, **named)


def _run(func: Callable[..., Any], args: Any, named: dict[str, Any]) -> Any:
    tensors = [leaf for leaf in tree_leaves((args, named)) if isinstance(leaf, Tensor)]
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
    found = func(*_inner(args), **_inner(inside))
    if func is aten.copy_.default:
        return args[0]
    if not goes:
        return found
    wrapped = tree_map_only(Tensor, There, found)
    return return_and_correct_aliasing(func, args, named, wrapped) if there else wrapped


def _inner(values: Any) -> Any:
    return tree_map_only(There, lambda one: one.inner, values)
