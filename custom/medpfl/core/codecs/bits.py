# SPDX-License-Identifier: Apache-2.0
"""Increasing positions as few bits: Rice-coded gaps, each with a sign and a level if there are any.

A gap g (from the position before, less one) is g >> b ones, a zero and the low b bits of g; a level n >= 1 is Elias's
gamma code: as many zeros as n has bits beyond its first, then n. Bits fill bytes from the lowest.
"""

import math

import numpy as np
from numpy.typing import NDArray

from medpfl.core.compiled import compiled

GAPS, SIGNS, LEVELS = 0, 1, 2  # what is written of every position: the gap; and its sign; and its level
_MOST_LEVEL_BITS = 16
_MOST_RICE = 40


def rice_parameter(count: int, length: int) -> int:
    """The number of low bits that is best for ``count`` positions scattered at random over ``length`` entries."""
    if count == 0 or count >= length:
        return 0
    rate = -math.log1p(-count / length)  # the gaps are geometric: P(gap >= g) = exp(-rate g)
    # One low bit more costs a bit and saves ones. It is worth it as long as  q + q^2 > 1  for  q = exp(-rate 2^bits),
    # that is, above the golden ratio's inverse (Kiely, "Selecting the Golomb Parameter in Rice Coding", 2004).
    return max(0, math.ceil(math.log2(math.log((1 + math.sqrt(5)) / 2) / rate)))


def write(
    positions: NDArray[np.int64], negative: NDArray[np.bool_], levels: NDArray[np.int64], length: int, mode: int
) -> tuple[int, bytes]:
    """The Rice parameter and the code of ascending positions below ``length``."""
    rice = rice_parameter(len(positions), length)
    bits = (length >> rice) + len(positions) * (rice + 1 + (mode >= SIGNS) + (2 * _MOST_LEVEL_BITS) * (mode == LEVELS))
    out = np.zeros(bits // 8 + 1, dtype=np.uint8)
    used = _write(positions, negative, levels, rice, mode, out)
    return rice, out[: (used + 7) // 8].tobytes()


def read(
    data: bytes, count: int, length: int, rice: int, mode: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_], NDArray[np.int64]] | None:
    """What ``write`` wrote; None if ``data`` is not exactly such a code. ``data`` bounds the memory that is taken."""
    least = rice + 1 + (mode >= SIGNS) + (mode == LEVELS)
    if not 0 <= rice <= _MOST_RICE or not 0 <= count <= length or count * least > 8 * len(data):
        return None
    positions = np.empty(count, dtype=np.int64)
    negative = np.zeros(count if mode >= SIGNS else 0, dtype=np.bool_)
    levels = np.ones(count if mode == LEVELS else 0, dtype=np.int64)
    used = _read(np.frombuffer(data, dtype=np.uint8), length, rice, mode, positions, negative, levels)
    if used < 0 or (used + 7) // 8 != len(data) or (used % 8 and data[-1] >> used % 8):
        return None
    return positions, negative, levels


@compiled
def _write(
    positions: NDArray[np.int64], negative: NDArray[np.bool_], levels: NDArray[np.int64], rice: int, mode: int,
    out: NDArray[np.uint8],
) -> int:  # fmt: skip
    at = 0
    before = -1
    for index in range(len(positions)):
        gap = positions[index] - before - 1
        before = positions[index]
        for _ in range(gap >> rice):
            out[at >> 3] |= np.uint8(1 << (at & 7))
            at += 1
        at += 1
        for bit in range(rice):
            out[at >> 3] |= np.uint8(((gap >> bit) & 1) << (at & 7))
            at += 1
        if mode >= 1:
            out[at >> 3] |= np.uint8(negative[index] << (at & 7))
            at += 1
        if mode == 2:
            level = levels[index]
            more = 0
            while level >> (more + 1):
                more += 1
            at += more
            out[at >> 3] |= np.uint8(1 << (at & 7))
            at += 1
            for bit in range(more):
                out[at >> 3] |= np.uint8(((level >> bit) & 1) << (at & 7))
                at += 1
    return at


@compiled
def _read(
    data: NDArray[np.uint8], length: int, rice: int, mode: int, positions: NDArray[np.int64],
    negative: NDArray[np.bool_], levels: NDArray[np.int64],
) -> int:  # fmt: skip
    """The number of bits read; -1: they end too early, a position is too large or a level too long."""
    end = 8 * len(data)
    at = 0
    before = -1
    for index in range(len(positions)):
        high = 0
        while at < end and (data[at >> 3] >> (at & 7)) & 1:
            high += 1
            at += 1
        at += 1
        if at + rice > end or high > length >> rice:  # high << rice may be beyond 64 bits
            return -1
        gap = high << rice
        for bit in range(rice):
            gap += int((data[at >> 3] >> (at & 7)) & 1) << bit
            at += 1
        before += gap + 1
        if before >= length:
            return -1
        positions[index] = before
        if mode >= 1:
            if at >= end:
                return -1
            negative[index] = (data[at >> 3] >> (at & 7)) & 1
            at += 1
        if mode == 2:
            more = 0
            while at < end and not (data[at >> 3] >> (at & 7)) & 1:
                more += 1
                at += 1
            at += 1
            if more >= 16 or at + more > end:
                return -1
            level = 1 << more
            for bit in range(more):
                level += int((data[at >> 3] >> (at & 7)) & 1) << bit
                at += 1
            levels[index] = level
    return at
