# SPDX-License-Identifier: Apache-2.0
"""An update as few bytes, and back.

A message is  b"MFC1" | length of the tag | tag | version | CRC-32 of the layout | payload.  The layout (names, shapes
and types) does not travel: the receiver knows what the sender trains, and says so with ``like``. So nothing that a
sender claims decides how much memory a receiver takes.
"""

import json
import struct
import zlib
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.checked import Checked
from medpfl.core.codecs.progress import Progress
from medpfl.core.errors import CodecError

MAGIC = b"MFC1"
Vector = NDArray[np.float32]


class Codec(Checked):
    """Encodes floating-point tensors, taken together as one vector of float32 in the order of their names.

    ``reduce`` loses, ``pack`` and ``unpack`` do not: decode(encode(x)) is ``reduce`` of x, exactly.
    """

    tag: ClassVar[str]
    """Names the format of the payload; a receiver finds the decoder by it."""
    version: ClassVar[int] = 1
    contracts: ClassVar[bool] = True
    """Whether what is lost is smaller than what was given, so that it may be added to the next update. One that is
    right on average only (it rounds at random) may lose more, and errors added up would grow without end."""

    @property
    def adapts(self) -> bool:
        """Whether ``at`` gives different codecs as training goes on."""
        return False

    def at(self, progress: Progress) -> "Codec":
        """The codec of the coming exchange."""
        return self

    @abstractmethod
    def reduce(self, vector: Vector, seed: int) -> Vector:
        """What the receiver will get; a function of its arguments alone. ``seed`` is for codecs that draw numbers.

        Raises:
            CodecError: the values are outside what the codec can express.
        """

    @abstractmethod
    def pack(self, reduced: Vector) -> bytes:
        """The payload of a vector that ``reduce`` returned."""

    @staticmethod
    @abstractmethod
    def unpack(payload: bytes, length: int) -> Vector | None:
        """The vector of ``length`` entries that was packed; None if the payload is not one."""

    def encode(self, tensors: Mapping[str, Tensor], seed: int = 0) -> bytes:
        """The message for ``tensors``.

        Raises:
            CodecError: there are none, one is empty or not floating-point, or a value is NaN, infinite or too large.
        """
        return self.encode_and_tell(tensors, seed)[0]

    def encode_and_tell(self, tensors: Mapping[str, Tensor], seed: int = 0) -> tuple[bytes, dict[str, Tensor]]:
        """The message, and the tensors that its receiver will get."""
        reduced = self.reduce(vector_of(tensors), seed)
        return self.message(tensors, reduced), tensors_of(reduced, tensors)

    def message(self, like: Mapping[str, Tensor], reduced: Vector) -> bytes:
        """The message for a vector that ``reduce`` returned, for a receiver that expects tensors ``like`` these."""
        tag = self.tag.encode("ascii")
        head = struct.pack(f"<4sB{len(tag)}sBI", MAGIC, len(tag), tag, self.version, _layout(like))
        return head + self.pack(reduced)


def vector_of(tensors: Mapping[str, Tensor]) -> Vector:
    """All tensors' values as one vector, in the order of their names.

    Raises:
        CodecError: as ``Codec.encode``.
    """
    if not tensors:
        raise CodecError("an update without tensors cannot be encoded")
    pieces = []
    for key in sorted(tensors):
        tensor = tensors[key]
        if not tensor.is_floating_point():
            raise CodecError(
                f"'{key}' cannot be encoded: it is {tensor.dtype}, codecs take floating-point tensors only"
            )
        if not tensor.numel():
            raise CodecError(f"'{key}' cannot be encoded: it is empty")
        pieces.append(tensor.detach().reshape(-1).to("cpu", torch.float32).numpy())
    vector = np.concatenate(pieces)
    with np.errstate(invalid="ignore"):
        total = vector.sum(dtype=np.float64)  # which float32 values cannot overflow
    if not np.isfinite(total):
        for key, piece in zip(sorted(tensors), pieces, strict=True):
            if not np.isfinite(piece).all():
                raise CodecError(f"'{key}' cannot be encoded: it holds NaN, infinity or a value beyond float32")
    return vector


def tensors_of(vector: Vector, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The vector as tensors of the shapes and types of ``like``."""
    found = {}
    start = 0
    for key in sorted(like):
        stop = start + like[key].numel()
        found[key] = torch.from_numpy(vector[start:stop]).to(like[key].dtype).view(like[key].shape)
        start = stop
    return {key: found[key] for key in like}


def tag_of(data: bytes) -> tuple[str, int, bytes]:
    """A message's tag, version and the rest (the layout's CRC-32 and the payload).

    Raises:
        CodecError: it is not a message.
    """
    end = 5 + data[4] if len(data) > 4 else 0
    if len(data) < end + 5 or data[:4] != MAGIC or not data[5:end].isascii():
        raise CodecError("what came is not an encoded update")
    return data[5:end].decode("ascii"), data[end], data[end + 1 :]


def decode_with(codecs: Mapping[str, type[Codec]], data: bytes, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a message; ``like`` has the names, shapes and types that are expected.

    Raises:
        CodecError: it is not a message, its codec is not among ``codecs``, or it was made for other tensors.
    """
    tag, version, rest = tag_of(data)
    if tag not in codecs or codecs[tag].version != version:
        known = ", ".join(f"{name} version {codecs[name].version}" for name in sorted(codecs)) or "none"
        raise CodecError(f"the update is encoded as {tag!r} version {version}, which is not known here; known: {known}")
    if struct.unpack("<I", rest[:4])[0] != _layout(like):
        raise CodecError(f"the update, encoded as '{tag}', is of tensors other than those expected")
    length = sum(tensor.numel() for tensor in like.values())
    vector = codecs[tag].unpack(rest[4:], length)
    if vector is None:
        raise CodecError(f"the update, encoded as '{tag}', is damaged: it does not decode to {length} values")
    return tensors_of(vector, like)


def _layout(like: Mapping[str, Tensor]) -> int:
    table = [[key, list(like[key].shape), str(like[key].dtype)] for key in sorted(like)]
    return zlib.crc32(json.dumps(table).encode())
