# SPDX-License-Identifier: Apache-2.0
"""One codec after another."""

from dataclasses import dataclass

from medpfl.core.codecs.contract import Codec, Vector
from medpfl.core.codecs.progress import Progress


@dataclass(frozen=True)
class Chain(Codec):
    """What ``first`` leaves of the update is encoded by ``then`` (CER and STC, say); the message is one of ``then``.

    Args:
        first: reduces only; its format is not used.
        then: reduces what is left, and packs it.
    """

    first: Codec
    then: Codec

    def __post_init__(self) -> None:
        object.__setattr__(self, "tag", self.then.tag)
        object.__setattr__(self, "version", self.then.version)
        object.__setattr__(self, "contracts", self.first.contracts and self.then.contracts)

    @property
    def adapts(self) -> bool:
        return self.first.adapts or self.then.adapts

    def at(self, progress: Progress) -> "Chain":
        return Chain(self.first.at(progress), self.then.at(progress))

    def reduce(self, vector: Vector, seed: int) -> Vector:
        return self.then.reduce(self.first.reduce(vector, seed), seed)

    def pack(self, reduced: Vector) -> bytes:
        return self.then.pack(reduced)

    @staticmethod
    def unpack(payload: bytes, length: int) -> Vector | None:
        raise TypeError("a chain's messages are those of its last codec")
