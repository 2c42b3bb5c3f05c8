# SPDX-License-Identifier: Apache-2.0
"""pFedNet's communication-efficient regulariser (CER), exactly, and the paper's ADMM for comparison.

Zhao, Liu, Liu, Liu, He, "Medical Federated Model with Mixture of Personalized and Shared Components", Section IV. Its
Eq. (4) is total-variation denoising of the gradient with an end term; eta, y_t and rho drop out:

    argmin_u 1/2 |u - g|^2 + gamma (sum_{i<d} |u_i - u_{i+1}| + |u_d|)
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

_HEAD = struct.Struct("<QB")  # number of runs, Rice parameter
Signal = NDArray[np.float64]


@dataclass(frozen=True)
class CER(Codec):
    """Makes the update piecewise constant and sends the pieces: a length of few bits and a float32 each.

    Args:
        gamma: relative to the mean magnitude of the update, >= 0. On an update like noise, 0.03 changes it by about
            4 % and 0.3 by a third. The paper's 0.1 to 500 belong to an iteration that was stopped early.
    """

    gamma: float = 0.1

    tag: ClassVar[str] = "runs"

    def __post_init__(self) -> None:
        if self.gamma < 0:
            raise ConfigError(f"CER's gamma must be at least 0, got {self.gamma}")

    def reduce(self, vector: Vector, seed: int) -> Vector:
        signal = vector.astype(np.float64)
        return denoise(signal, self.gamma * float(np.abs(signal).mean())).astype(np.float32)

    def pack(self, reduced: Vector) -> bytes:
        # Patterns, not values, are compared: 0.0 and -0.0 are two runs, so that unpacking gives back every bit.
        pattern = reduced.view(np.uint32)
        ends = np.append(np.flatnonzero(pattern[1:] != pattern[:-1]), len(reduced) - 1)
        nothing = np.empty(0, np.int64)
        rice, code = bits.write(ends, nothing.astype(bool), nothing, len(reduced), bits.GAPS)
        values: bytes = reduced[ends].astype("<f4").tobytes()
        return _HEAD.pack(len(ends), rice) + values + code

    @staticmethod
    def unpack(payload: bytes, length: int) -> Vector | None:
        if len(payload) < _HEAD.size:
            return None
        count, rice = _HEAD.unpack(payload[: _HEAD.size])
        begin = _HEAD.size + 4 * count
        if not 0 < count <= length or len(payload) < begin:
            return None
        values = np.frombuffer(payload[_HEAD.size : begin], dtype="<f4").astype(np.float32)
        found = bits.read(payload[begin:], count, length, rice, bits.GAPS)
        if found is None or found[0][-1] != length - 1 or not np.isfinite(values).all():
            return None
        return np.repeat(values, np.diff(found[0], prepend=-1))


def denoise(signal: Signal, gamma: float) -> Signal:
    """The exact solution, in time that is linear in the length whatever the signal.

    Johnson's dynamic programme ("A Dynamic Programming Algorithm for the Fused Lasso and L0-Segmentation", 2013); the
    end term is one more entry that is held at zero.

    Args:
        signal: d values.
        gamma: >= 0, in the signal's units.
    """
    return signal.copy() if gamma == 0 or not len(signal) else _denoise(signal, gamma)


@compiled
def _denoise(signal: Signal, gamma: float) -> Signal:
    """The derivative of the least cost of all entries so far, as a function of the last one, is increasing and
    piecewise linear; clipped to [-gamma, gamma] it passes on to the next. Its knots are kept in a ring buffer."""
    length = len(signal)
    low = np.empty(length)
    high = np.empty(length)
    knots = np.empty((256, 3))  # where, by how much the slope changes there, and the intercept
    first, last = 0, -1
    for index in range(length):
        if last - first + 3 > len(knots):
            grown = np.empty((2 * len(knots), 3))
            for knot in range(first, last + 1):
                grown[knot & (len(grown) - 1)] = knots[knot & (len(knots) - 1)]
            knots = grown
        mask = len(knots) - 1
        slope, intercept = 1.0, -signal[index] - (gamma if index else 0.0)
        while first <= last and slope * knots[first & mask, 0] + intercept <= -gamma:
            slope += knots[first & mask, 1]
            intercept += knots[first & mask, 2]
            first += 1
        low[index] = (-gamma - intercept) / slope
        slope_above, intercept_above = 1.0, -signal[index] + (gamma if index else 0.0)
        while first <= last and slope_above * knots[last & mask, 0] + intercept_above >= gamma:
            slope_above -= knots[last & mask, 1]
            intercept_above -= knots[last & mask, 2]
            last -= 1
        high[index] = (gamma - intercept_above) / slope_above
        first -= 1
        knots[first & mask, 0] = low[index]
        knots[first & mask, 1] = slope
        knots[first & mask, 2] = intercept + gamma
        last += 1
        knots[last & mask, 0] = high[index]
        knots[last & mask, 1] = -slope_above
        knots[last & mask, 2] = gamma - intercept_above
    value = 0.0
    for index in range(length - 1, -1, -1):
        value = min(max(value, low[index]), high[index])
        low[index] = value
    return low


def denoise_admm(signal: Signal, gamma: float, iterations: int, rho: float = 1.0) -> Signal:
    """The paper's Algorithm 3 after so many iterations from y_0 = y_t - eta g, with its y-update by a banded solve
    instead of eigenvectors and the threshold of Eq. (5) put right (1 / rho); ``rho`` is eta gamma times the paper's."""
    from scipy.linalg import solveh_banded

    band = np.empty((2, len(signal)))
    band[0], band[1] = -rho, 1 + 2 * rho
    band[1, 0] = 1 + rho
    found = signal.copy()
    weight = np.zeros_like(signal)
    for _ in range(iterations):
        steps = _differences(found)
        pushed = steps - weight / rho
        split = pushed - np.clip(pushed, -gamma / rho, gamma / rho)
        found = solveh_banded(band, signal + _adjoint(rho * split + weight), check_finite=False)
        weight += rho * (split - _differences(found))
    return found


def objective(found: Signal, signal: Signal, gamma: float) -> float:
    return float(0.5 * np.square(found - signal).sum() + gamma * np.abs(_differences(found)).sum())


def _differences(values: Signal) -> Signal:
    steps = values.copy()
    steps[:-1] -= values[1:]
    return steps


def _adjoint(values: Signal) -> Signal:
    result = values.copy()
    result[1:] -= values[:-1]
    return result
