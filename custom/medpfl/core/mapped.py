# SPDX-License-Identifier: Apache-2.0
"""Tensors whose bytes lie in a file: they are read and written through a mapping of it, as any tensor is.

What is in memory of such a file are pages that the operating system can take back at any time. ``release`` gives them
back at once, so that who goes through many large tensors piece by piece holds a few pieces and not all of them.
"""

import ctypes
import mmap
from collections.abc import Iterable, Iterator
from pathlib import Path
from weakref import WeakValueDictionary

import torch
from torch import Tensor

PIECE = 1 << 20
"""Values of a large tensor that are looked at at a time."""
_HELD = 32 * 2**20
"""Bytes after which pages are given back."""

_mappings: "WeakValueDictionary[int, mmap.mmap]" = WeakValueDictionary()
"""By the address of the first byte."""


def map_file(path: Path) -> Tensor:
    """All bytes of a file, which is not empty, as a uint8 tensor; what is written to it goes into the file.

    The file may be removed; its space is given back when the last tensor that lies in it is gone.

    Raises:
        OSError: it cannot be opened.
    """
    with open(path, "r+b") as file:
        mapping = mmap.mmap(file.fileno(), 0)
    whole = torch.frombuffer(mapping, dtype=torch.uint8)
    _mappings[whole.data_ptr()] = mapping
    return whole


def is_mapped(tensor: Tensor) -> bool:
    """Whether its bytes lie in a file; so do those of no tensor without values, which has none."""
    return not tensor.numel() or tensor.untyped_storage().data_ptr() in _mappings


def release(tensors: Iterable[Tensor]) -> None:
    """Give the memory of the files that these tensors lie in back; what they hold stays. Others are left alone."""
    if not _mappings:
        return
    for address in {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.device.type == "cpu"}:
        mapping = _mappings.get(address)
        if mapping is not None:
            mapping.madvise(mmap.MADV_DONTNEED)


def give_back() -> None:
    """Give the memory of tensors that are gone back to the system, which the C library keeps for others (glibc)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class Passing:
    """A pass over tensors of any total size: what it has touched is released now and then, and when it is over."""

    def __init__(self) -> None:
        self._bytes = 0
        self._touched: dict[int, Tensor] = {}

    def over(self, *tensors: Tensor) -> None:
        """These (parts of) tensors have been looked at, or written to."""
        if not _mappings:
            return
        for tensor in tensors:
            self._touched[tensor.untyped_storage().data_ptr()] = tensor
            self._bytes += tensor.numel() * tensor.element_size()
        if self._bytes > _HELD:
            self.end()

    def end(self) -> None:
        """Release what was touched."""
        release(self._touched.values())
        self._touched, self._bytes = {}, 0


def share(count: int) -> int:
    """Values of a piece of each of ``count`` tensors that are looked at together: ``PIECE`` of all of them.

    A multiple of 64, so that vectors of values begin in a piece where they begin in the whole tensor, bit for bit.
    """
    return max(64, PIECE // count // 64 * 64)


def is_small(tensor: Tensor) -> bool:
    """Whether it is one piece, and nothing lies in files, so that nothing must be given back after it."""
    return not _mappings and tensor.numel() <= PIECE


def pieces(*tensors: Tensor, values: int = PIECE) -> Iterator[tuple[Tensor, ...]]:
    """Contiguous tensors of as many values each, flat, piece by piece; a tensor of up to ``values`` values is one."""
    flat = [tensor.reshape(-1) for tensor in tensors]
    if not _mappings and all(0 < len(one) <= values for one in flat):  # small networks have many
        yield tuple(flat)
        return
    passing = Passing()
    for parts in zip(*(torch.split(one, values) for one in flat), strict=True):
        yield parts
        passing.over(*parts)
    passing.end()


_ALIGNED = 64
"""Bytes to which torch aligns tensors in memory; so do these in a file, because networks compute with them."""


def move_to_file(tensors: Iterable[Tensor], path: Path) -> None:
    """Let tensors lie in a file from now on, in place: who holds them goes on with the same values.

    Those that lie in a file are released and left where they are, as are those that share their memory with others, are
    not on the CPU or are not dense. The file has no name when this returns, and is gone with the last of its tensors.

    Raises:
        OSError: the file cannot be written.
    """
    unique = {id(tensor): tensor for tensor in tensors if tensor.numel() and tensor.device.type == "cpu"}.values()
    owners: dict[int, int] = {}
    for tensor in unique:
        place = tensor.untyped_storage().data_ptr()
        owners[place] = owners.get(place, 0) + 1
    moved = [
        tensor
        for tensor in unique
        if not is_mapped(tensor) and owners[tensor.untyped_storage().data_ptr()] == 1 and _is_dense(tensor)
    ]
    if moved:
        sizes = [tensor.numel() * tensor.element_size() for tensor in moved]
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Written, not only made so long: on a full disk the first value without room there would end the process.
            with open(path, "wb") as file:
                for tensor, size in zip(moved, sizes, strict=True):
                    file.write(_in_memory(tensor))
                    file.write(bytes(-size % _ALIGNED))
            whole, place = map_file(path), 0
        finally:
            path.unlink(missing_ok=True)
        for tensor, size in zip(moved, sizes, strict=True):
            flat = whole[place : place + size].view(tensor.dtype)
            tensor.data = flat.as_strided(tensor.shape, tensor.stride())
            place += size + -size % _ALIGNED
    release(unique)


def _in_memory(tensor: Tensor) -> memoryview:
    """The bytes of a dense tensor, in the order in which they lie in memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def _is_dense(tensor: Tensor) -> bool:
    """Whether its values fill its memory, in whatever order of the axes."""
    orders = [torch.contiguous_format]
    orders += [torch.channels_last] if tensor.ndim == 4 else [torch.channels_last_3d] if tensor.ndim == 5 else []
    return any(tensor.is_contiguous(memory_format=order) for order in orders)
