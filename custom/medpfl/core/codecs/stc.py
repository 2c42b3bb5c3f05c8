# SPDX-License-Identifier: Apache-2.0
"""Sparse ternary compression: the largest entries only, all with one magnitude.

Sattler, Wiedemann, Müller, Samek, "Robust and Communication-Efficient Federated Learning From Non-IID Data", IEEE TNNLS
2020, Algorithms 1 and 2 (the error feedback is ``codecs.feedback``).
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from medpfl.core.codecs import bits
from medpfl.core.codecs.contract import Codec, Vector
from medpfl.core.compiled import compiled
from medpfl.core.errors import ConfigError

_HEAD = struct.Struct("<fQB")  # magnitude, number of entries, Rice parameter


@dataclass(frozen=True)
class STC(Codec):
    """Keeps the fraction ``p`` of the entries with the largest magnitudes, each as its sign times their mean.

    Args:
        p: in (0, 1]; at least one entry is kept. Of equal magnitudes the first are kept, zeros never.
    """

    p: float = 0.01

    tag: ClassVar[str] = "stc"

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ConfigError(f"STC's p must be in (0, 1], got {self.p}")

    def reduce(self, vector: Vector, seed: int) -> Vector:
        return _ternary(vector, max(1, round(self.p * len(vector))))

    def pack(self, reduced: Vector) -> bytes:
        positions = np.flatnonzero(reduced)
        kept = reduced[positions]
        rice, code = bits.write(positions, kept < 0, np.empty(0, np.int64), len(reduced), bits.SIGNS)
        return _HEAD.pack(abs(kept[0]) if len(kept) else 0.0, len(kept), rice) + code

    @staticmethod
    def unpack(payload: bytes, length: int) -> Vector | None:
        if len(payload) < _HEAD.size:
            return None
        magnitude, count, rice = _HEAD.unpack(payload[: _HEAD.size])
        found = bits.read(payload[_HEAD.size :], count, length, rice, bits.SIGNS)
        if found is None or not np.isfinite(magnitude) or (magnitude > 0) != (count > 0):
            return None
        positions, negative, _ = found
        vector = np.zeros(length, dtype=np.float32)
        vector[positions] = np.where(negative, -np.float32(magnitude), np.float32(magnitude))
        return vector


@compiled
def _ternary(vector: Vector, count: int) -> Vector:
    """One magnitude for the ``count`` largest: found by their bits, whose order is that of the magnitudes."""
    pattern = vector.view(np.uint32)
    high = np.zeros(1 << 15, np.int64)
    for index in range(len(pattern)):
        high[(pattern[index] & 0x7FFFFFFF) >> 16] += 1
    left = count
    top = (1 << 15) - 1
    while high[top] < left:
        left -= high[top]
        top -= 1
    low: NDArray[np.int64] = np.zeros(1 << 16, np.int64)
    for index in range(len(pattern)):
        if (pattern[index] & 0x7FFFFFFF) >> 16 == top:
            low[pattern[index] & 0xFFFF] += 1
    bottom = (1 << 16) - 1
    while low[bottom] < left:
        left -= low[bottom]
        bottom -= 1
    least = np.uint32((top << 16) | bottom)  # the last magnitude to be kept, ``left`` times
    out = np.zeros(len(vector), np.float32)
    total = 0.0
    kept = 0
    for index in range(len(vector)):
        size = pattern[index] & np.uint32(0x7FFFFFFF)
        if size >= least and size > 0:
            if size == least:
                if left == 0:
                    continue
                left -= 1
            total += abs(np.float64(vector[index]))
            kept += 1
            out[index] = 1.0 if vector[index] > 0 else -1.0
    magnitude = np.float32(total / max(kept, 1))
    for index in range(len(out)):
        out[index] *= magnitude
    return out
