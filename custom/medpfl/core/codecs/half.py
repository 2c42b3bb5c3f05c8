# SPDX-License-Identifier: Apache-2.0
"""Half precision."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from medpfl.core.codecs.contract import Codec, Vector
from medpfl.core.errors import CodecError

_LARGEST = float(np.finfo(np.float16).max)


@dataclass(frozen=True)
class Half(Codec):
    """IEEE's 16-bit floating point: half the bytes of float32, 11 significant bits, up to 65504."""

    tag: ClassVar[str] = "fp16"

    def reduce(self, vector: Vector, seed: int) -> Vector:
        largest = float(np.abs(vector).max())
        if largest > _LARGEST:
            raise CodecError(
                f"an update with values up to {largest:.4g} does not fit 16 bits, which end at {_LARGEST:g}"
            )
        return vector.astype(np.float16).astype(np.float32)

    def pack(self, reduced: Vector) -> bytes:
        return reduced.astype("<f2").tobytes()

    @staticmethod
    def unpack(payload: bytes, length: int) -> Vector | None:
        if len(payload) != 2 * length:
            return None
        vector = np.frombuffer(payload, dtype="<f2").astype(np.float32)
        return vector if np.isfinite(vector).all() else None
