# SPDX-License-Identifier: Apache-2.0
"""Patch size, spacing, levels and batch of a 3-D U-Net, planned from what the hospitals' volumes are like.

The rules are nnU-Net's (Isensee et al., Nature Methods 2021, Online Methods and the released planner of version 1, in
3-D at full resolution). Deviations: of each hospital the medians are known and not every case, so the median over all
cases is that of the hospitals' medians, each as often as it has cases; volumes are not cropped to where they are not
zero; at most two smaller maps are supervised.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from medpfl.core.errors import ConfigError
from medpfl.data.fingerprint import Fingerprint, Planned
from medpfl.models.auto import Auto
from medpfl.models.dynunet import DynUNet
from medpfl.models.norms import Norm

Triple = tuple[float, float, float]
Levels = tuple[tuple[int, ...], ...]

_UNEQUAL = 3.0
"""An axis whose voxels are so many times as long as the others' is treated by itself."""
_LEAST_EDGE = 4
"""Voxels that the deepest map keeps along every axis."""
_FEATURES, _MOST_FEATURES = 32, 320
_VALUES = 520_000_000 * 32 / 30
"""Values that a patch's maps may have together: so many that a batch of 2 fits nnU-Net's GPU of 11 GB. It counts as if
there were 30 features in the first level, from before there were 32."""
_BATCH = 2
_SHARE = 0.05
"""Most of all voxels that a batch may hold."""


@dataclass(frozen=True)
class Plan:
    """``spacing``: mm; ``shape``: the median volume at that spacing; ``size``: of a patch; ``batch_size``: patches;
    ``strides``: of each level after the first, by axis; ``kernels``: of every level."""

    spacing: Triple
    shape: tuple[int, ...]
    size: tuple[int, ...]
    batch_size: int
    strides: Levels
    kernels: Levels

    def architecture(self, features: int = _FEATURES, norm: Norm = "instance") -> DynUNet:
        """nnU-Net's network, with ``features`` channels in the first level."""
        filters = tuple(min(features * 2**level, _MOST_FEATURES) for level in range(len(self.kernels)))
        return DynUNet(filters, self.strides, self.kernels, norm, deep_supervision=True)

    def told(self) -> Planned:
        """What hospitals are told of it."""
        content = {name: getattr(self, name) for name in Planned.model_fields}
        try:
            return Planned.model_validate(content)
        except ValidationError as error:
            problem = error.errors()[0]
            raise ConfigError(
                f"no network can be planned for such volumes: {problem['loc'][0]}: {problem['msg'].lower()}"
            ) from error


def architecture_of(told: Planned, auto: Auto) -> DynUNet:
    """The network that was planned, as a job asked for it."""
    shape = tuple(told.size)
    made = Plan(told.spacing, shape, shape, told.batch_size, told.strides, told.kernels)
    return made.architecture(auto.features, auto.norm)


def plan(hospitals: Sequence[Fingerprint], most: tuple[int, ...] = ()) -> Plan:
    """A plan for all hospitals together.

    Args:
        most: lengths that the patch must not be larger than; none: as memory allows.

    Raises:
        ConfigError: there is none, they differ in channels or classes, or the volumes are too small for three levels.
    """
    for what in ("channels", "classes"):
        found = sorted({getattr(hospital, what) for hospital in hospitals})
        if len(found) != 1:
            raise ConfigError(f"the hospitals' volumes must have one number of {what}, got {found or 'no fingerprint'}")
    cases = [hospital.cases for hospital in hospitals]
    spacing = _spacing(hospitals, cases)
    shapes = [np.array(each.shape) * each.spacing / np.array(spacing) for each in hospitals]
    median = np.array([max(1, round(_median([shape[axis] for shape in shapes], cases))) for axis in range(3)])
    first = _first_size(spacing, median)
    if most:
        first = np.minimum(first, np.array(most))
    size, strides, kernels = _levels(spacing, first)
    while most and (beyond := np.flatnonzero(size > np.array(most))).size:  # they were rounded up
        first = size.copy()
        first[beyond] = np.array(most)[beyond] // _divisor(strides)[beyond] * _divisor(strides)[beyond]
        if not first.all():
            raise ConfigError(f"patches of at most {list(most)} voxels are too small for a network of three levels")
        size, strides, kernels = _levels(spacing, first)
    while (values := _values(size, strides, hospitals[0])) > _VALUES:
        longest = int(np.argsort(size / median, kind="stable")[-1])  # of equal ones the last, as nnU-Net's argsort
        smaller = size.copy()
        smaller[longest] -= _divisor(strides)[longest]
        _, strides, _ = _levels(spacing, smaller)
        size[longest] -= _divisor(strides)[longest]
        size, strides, kernels = _levels(spacing, size)
    if len(strides) < 2:
        raise ConfigError(f"volumes of {median.tolist()} voxels are too small for a network of three levels")
    covered = round(_SHARE * float(np.prod(median, dtype=np.float64)) * sum(cases) / float(np.prod(size)))
    batch = min(int(_VALUES / values * _BATCH), max(covered, _BATCH))
    return Plan(
        spacing=spacing,
        shape=tuple(median.tolist()),
        size=tuple(size.tolist()),
        batch_size=max(batch, 1),
        strides=strides,
        kernels=kernels,
    )


def _spacing(hospitals: Sequence[Fingerprint], cases: Sequence[int]) -> Triple:
    """The median, but for an axis of thick slices, which takes the tenth percentile."""
    target = [_median([each.spacing[axis] for each in hospitals], cases) for axis in range(3)]
    lengths = [_median([each.shape[axis] for each in hospitals], cases) for axis in range(3)]
    worst = int(np.argmax(target))
    others = [axis for axis in range(3) if axis != worst]
    thick = target[worst] > _UNEQUAL * max(target[axis] for axis in others)
    few = lengths[worst] * _UNEQUAL < min(lengths[axis] for axis in others)
    if thick and few:
        fine = _median([each.fine[worst] for each in hospitals], cases)
        target[worst] = max(fine, max(target[axis] for axis in others))
    first, second, third = target
    return first, second, third


def _median(values: Sequence[float], weights: Sequence[int]) -> float:
    """The median of the values, each as often as its weight says."""
    return float(np.median(np.repeat(np.asarray(values, dtype=np.float64), weights)))


def _first_size(spacing: Triple, median: NDArray[np.int64]) -> NDArray[np.int64]:
    """A cube in mm of at least 512 voxels an edge, cut to the median volume."""
    voxels = 1 / np.array(spacing)
    cube: NDArray[np.int64] = np.minimum(np.round(voxels / voxels.min() * 512).astype(np.int64), median)
    return cube


def _levels(spacing: Triple, size: NDArray[np.int64]) -> tuple[NDArray[np.int64], Levels, Levels]:
    """The patch size, padded to what the strides divide; strides; and kernels."""
    distances, lengths, kernel = list(spacing), size.astype(float).tolist(), [1, 1, 1]
    strides, kernels = [], []
    while True:
        large = [axis for axis in range(3) if lengths[axis] >= 2 * _LEAST_EDGE]
        finest = min((distances[axis] for axis in large), default=math.inf)
        halved = [axis for axis in large if distances[axis] / finest < 2]
        if not halved or (len(halved) == 1 and lengths[halved[0]] < 3 * _LEAST_EDGE):
            break
        kernel = [3 if distances[axis] / min(distances) < 2 else kernel[axis] for axis in range(3)]
        for axis in halved:
            distances[axis] *= 2
            lengths[axis] = math.ceil(lengths[axis] / 2)
        strides.append(tuple(2 if axis in halved else 1 for axis in range(3)))
        kernels.append(tuple(kernel))
    kernels.append((3, 3, 3))
    divisor = _divisor(strides)
    return -(-size // divisor) * divisor, tuple(strides), tuple(kernels)


def _divisor(strides: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    divisor: NDArray[np.int64] = np.prod(np.array([(1, 1, 1), *strides], dtype=np.int64), axis=0)
    return divisor


def _values(size: NDArray[np.int64], strides: Levels, of: Fingerprint) -> float:
    """Values of all maps of one patch, as nnU-Net estimates its memory."""
    voxels, features = float(np.prod(size, dtype=np.float64)), _FEATURES
    total = voxels * (5 * features + of.channels + of.classes)
    for number, stride in enumerate(strides, start=1):
        voxels /= math.prod(stride)
        features = min(2 * features, _MOST_FEATURES)
        total += (5 if number < len(strides) else 2) * features * voxels
    return total
