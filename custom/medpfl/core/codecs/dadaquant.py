# SPDX-License-Identifier: Apache-2.0
"""DAdaQuant: a stochastic quantiser with few levels, more of them as training goes on and for larger hospitals.

Hönig, Zhao, Mullins, "DAdaQuant: Doubly-adaptive quantization for communication-efficient Federated Learning", ICML
2022. **Unverified**: the levels per hospital were derived anew from the paper's aim, the rule over time is from memory
with constants of our own, and neither was compared with the authors' code.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from medpfl.core.codecs import bits
from medpfl.core.codecs.contract import Codec, Vector
from medpfl.core.codecs.progress import Progress
from medpfl.core.compiled import compiled
from medpfl.core.errors import ConfigError

_HEAD = struct.Struct("<fHQB")  # largest magnitude, levels, number of entries that are not zero, Rice parameter
MOST_LEVELS = 65535


@dataclass(frozen=True)
class DAdaQuant(Codec):
    """Every entry as a whole number of steps of (largest magnitude) / ``levels``, rounded up or down at random so that
    it is right on average; zeros cost next to nothing.

    Args:
        levels: q, from 1 (only sign or zero) to 65535; None: by the paper's two rules, from the training loss so far
            and the hospital's number of samples.
    """

    levels: int | None = None

    tag: ClassVar[str] = "dadaquant"
    contracts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.levels is not None and not 1 <= self.levels <= MOST_LEVELS:
            raise ConfigError(f"DAdaQuant's levels must be from 1 to {MOST_LEVELS}, got {self.levels}")

    @property
    def adapts(self) -> bool:
        return self.levels is None

    def at(self, progress: Progress) -> "DAdaQuant":
        if not self.adapts:
            return self
        levels = round(levels_over_time(progress.losses) * progress.scale)
        return DAdaQuant(min(max(1, levels), MOST_LEVELS))

    def reduce(self, vector: Vector, seed: int) -> Vector:
        levels = self.levels or 1
        largest = float(np.abs(vector).max())
        if largest == 0:
            return np.zeros_like(vector)
        steps = _round(vector, levels / largest, np.uint64(seed % 2**64))
        return _values(steps, largest, levels)

    def pack(self, reduced: Vector) -> bytes:
        levels = self.levels or 1
        positions = np.flatnonzero(reduced)
        kept = reduced[positions].astype(np.float64)
        largest = float(np.abs(kept).max()) if len(kept) else 0.0  # rounding leaves the largest as it is
        steps = np.rint(np.abs(kept) * (levels / (largest or 1.0))).astype(np.int64)
        rice, code = bits.write(positions, kept < 0, steps, len(reduced), _mode(levels))
        return _HEAD.pack(largest, levels, len(kept), rice) + code

    @staticmethod
    def unpack(payload: bytes, length: int) -> Vector | None:
        if len(payload) < _HEAD.size:
            return None
        largest, levels, count, rice = _HEAD.unpack(payload[: _HEAD.size])
        if levels < 1 or not np.isfinite(largest) or (largest > 0) != (count > 0):
            return None
        found = bits.read(payload[_HEAD.size :], count, length, rice, _mode(levels))
        if found is None:
            return None
        positions, negative, steps = found
        if len(steps) and steps.max() > levels:
            return None
        steps = steps if len(steps) else np.ones(count, np.int64)
        vector = np.zeros(length, dtype=np.float32)
        vector[positions] = _values(np.where(negative, -steps, steps), largest, levels)
        return vector


def _mode(levels: int) -> int:
    return bits.SIGNS if levels == 1 else bits.LEVELS


def _values(steps: np.ndarray, largest: float, levels: int) -> Vector:
    values: Vector = (steps * (largest / levels)).astype(np.float32)
    return values


@compiled
def _round(vector: Vector, scale: float, seed: np.uint64) -> np.ndarray:
    steps = np.empty(len(vector), np.int32)
    for index in range(len(vector)):
        # splitmix64 of the seed and the index: the same numbers on every machine and in every version
        state = seed + np.uint64(index + 1) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
        drawn = (state >> np.uint64(11)) * (1.0 / 9007199254740992.0)
        size = abs(np.float64(vector[index])) * scale
        whole = np.floor(size)
        if drawn < size - whole:
            whole += 1
        steps[index] = np.int32(whole) if vector[index] > 0 else -np.int32(whole)
    return steps


def levels_over_time(losses: Sequence[float], psi: float = 0.9, phi: int = 5, most: int = 64) -> int:
    """Levels of the round that follows rounds with these mean training losses.

    One at first; doubled, up to ``most``, when the losses' running average (weight ``psi`` on the past) has not fallen
    over the last ``phi`` rounds and the last doubling is at least as long ago. ``psi`` and ``phi`` are our choice.
    """
    levels, doubled = 1, 0
    averages: list[float] = []
    for number, loss in enumerate(losses, start=1):
        averages.append(psi * averages[-1] + (1 - psi) * loss if averages else loss)
        if number > phi and number - doubled >= phi and averages[-1] >= averages[-1 - phi]:
            levels, doubled = min(2 * levels, most), number
    return levels
