# SPDX-License-Identifier: Apache-2.0
"""Safetensors files written and mapped without a second copy of the tensors in memory.

The library's own ``save_file`` takes a copy of every tensor in memory first, and what it maps cannot be written to. The
files are the same, byte for byte (https://huggingface.co/docs/safetensors/index#format): the length of the header in 8
bytes, the header as JSON, and the tensors one after another, the widest types first, then by name.
"""

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from medpfl.core.mapped import is_small, map_file, pieces

# In the library's order, from the last to the first in a file.
_TYPES: dict[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.float32: "F32",
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.uint64: "U64",
}
_BY_NAME = {name: kind for kind, name in _TYPES.items()}
_RANK = {kind: rank for rank, kind in enumerate(_TYPES)}
_OF_NUMPY = {torch.bool, torch.uint8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64}
"""Types whose values NumPy holds in the same bytes: such a tensor's memory is a buffer as it is."""


def has_type(tensor: Tensor) -> bool:
    """Whether a file can hold such values."""
    return tensor.dtype in _TYPES


def plain(tensor: Tensor) -> Tensor:
    """On the CPU, contiguous, without a gradient; itself, where it is so."""
    return tensor.detach().cpu().contiguous()


def bytes_of(tensor: Tensor) -> memoryview:
    """Of a ``plain`` tensor; a buffer, whose ``len`` is not the number of bytes."""
    if tensor.dtype in _OF_NUMPY and tensor.is_contiguous():
        data: memoryview = tensor.numpy().data
        return data
    flat = tensor.reshape(-1)
    if flat.stride() != (1,):  # of an empty tensor or a single value, which came from elsewhere
        flat = flat.clone(memory_format=torch.contiguous_format)
    data = flat.view(torch.uint8).numpy().data
    return data


def buffers(tensor: Tensor) -> Iterator[memoryview]:
    """A tensor's bytes, piece by piece."""
    tensor = plain(tensor)
    if is_small(tensor):
        yield bytes_of(tensor)
        return
    for (part,) in pieces(tensor):
        yield bytes_of(part)


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], synced: bool) -> None:
    """Write a file.

    Args:
        metadata: texts in the header.
        synced: whether it must be on the disk when this returns.

    Raises:
        OSError: it cannot be written.
    """
    names = sorted(tensors, key=lambda name: (-_RANK[tensors[name].dtype], name))
    header: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name in names:
        tensor = tensors[name]
        size = tensor.numel() * tensor.element_size()
        offsets = [place, place + size]
        header[name] = {"dtype": _TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        place += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in names:
            for part in buffers(tensors[name]):
                file.write(part)
        if synced:
            file.flush()
            os.fsync(file.fileno())


def open_mapped(path: Path) -> dict[str, Tensor]:
    """The tensors of a file that ``write`` wrote here; what is written to them goes into the file.

    Raises:
        OSError: it cannot be opened.
        ValueError: it is no such file.
    """
    whole = map_file(path)
    length = int.from_bytes(bytes_of(whole[:8].clone()), "little")
    data = whole[8 + length :]
    found = {}
    header: dict[str, dict[str, object]] = json.loads(bytes(bytes_of(whole[8 : 8 + length].clone())))
    for name, told in header.items():
        if name == "__metadata__":
            continue
        offsets, shape = told["data_offsets"], told["shape"]
        assert isinstance(offsets, list) and isinstance(shape, list)
        kind = _BY_NAME[str(told["dtype"])]
        if offsets[1] > len(data):
            raise ValueError(f"'{name}' ends beyond the file")
        found[name] = data[offsets[0] : offsets[1]].view(kind).view(shape)
    return found
