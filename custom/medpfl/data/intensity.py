# SPDX-License-Identifier: Apache-2.0
"""How intensities of volumes are brought into a range that networks take; a job chooses one."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


class Intensity(Checked):
    """A frozen dataclass whose fields are the job's arguments. What it takes from data it takes from the volume itself,
    so a new case is treated like those of training, and nothing of a hospital's data is kept or leaves; but for one
    that is ``fitted``."""

    fits: ClassVar[bool] = False
    """Whether it must be fitted on the foreground of the training part before it can be applied."""

    def fitted(self, voxels: Sequence[NDArray[Any]]) -> Intensity:
        """The same, as fitted on the foreground voxels of each channel; what does not fit stays as it is."""
        return self

    @abstractmethod
    def __call__(self, image: Tensor) -> Tensor:
        """A volume, C x H x W x D float32, in the range."""

    @abstractmethod
    def as_monai(self) -> list[dict[str, JsonValue]]:
        """The same for MONAI's bundles: its dictionary transforms and their arguments, without the keys."""


@dataclass(frozen=True)
class ZScore(Intensity):
    """Mean 0 and deviation 1 of each channel of a volume, as is usual for MR; a channel of one value becomes 0."""

    def __call__(self, image: Tensor) -> Tensor:
        from monai.transforms import NormalizeIntensity

        changed: Tensor = NormalizeIntensity(channel_wise=True)(image)
        return changed

    def as_monai(self) -> list[dict[str, JsonValue]]:
        return [{"_target_": "NormalizeIntensityd", "channel_wise": True}]


@dataclass(frozen=True)
class Window(Intensity):
    """The values from ``low`` to ``high`` become 0 to 1, what lies beyond is cut: for CT, whose numbers (HU) mean the
    same at every hospital.

    Args:
        low, high: as in the files.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        if not -math.inf < self.low < self.high < math.inf:
            raise ConfigError(f"Window's low must be below its high, got {self.low:g} and {self.high:g}")

    def __call__(self, image: Tensor) -> Tensor:
        from monai.transforms import ScaleIntensityRange

        changed: Tensor = ScaleIntensityRange(self.low, self.high, 0.0, 1.0, clip=True)(image)
        return changed

    def as_monai(self) -> list[dict[str, JsonValue]]:
        ends: dict[str, JsonValue] = {"a_min": self.low, "a_max": self.high, "b_min": 0.0, "b_max": 1.0}
        return [{"_target_": "ScaleIntensityRanged", **ends, "clip": True}]


@dataclass(frozen=True)
class Percentiles(Intensity):
    """Two percentiles of each channel of a volume become 0 and 1, what lies beyond is cut: for MR with a few very
    bright voxels. Where both are equal, as in a channel of hardly anything but background, that value becomes 0.

    Args:
        low, high: in per cent, 0 <= low < high <= 100.
    """

    low: float = 0.5
    high: float = 99.5

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 100:
            raise ConfigError(f"Percentiles must be 0 <= low < high <= 100, got {self.low:g} and {self.high:g}")

    def __call__(self, image: Tensor) -> Tensor:
        from monai.transforms import ScaleIntensityRangePercentiles

        scaled = ScaleIntensityRangePercentiles(self.low, self.high, 0.0, 1.0, clip=True, channel_wise=True)
        changed: Tensor = scaled(image)
        return changed.clamp(0, 1)  # of a channel with equal percentiles MONAI subtracts them, and cuts nothing

    def as_monai(self) -> list[dict[str, JsonValue]]:
        ends: dict[str, JsonValue] = {"lower": self.low, "upper": self.high, "b_min": 0.0, "b_max": 1.0}
        cut: dict[str, JsonValue] = {"a_min": 0.0, "a_max": 1.0, "b_min": 0.0, "b_max": 1.0, "clip": True}
        return [
            {"_target_": "ScaleIntensityRangePercentilesd", **ends, "clip": True, "channel_wise": True},
            {"_target_": "ScaleIntensityRanged", **cut},
        ]


@dataclass(frozen=True)
class Foreground(Intensity):
    """nnU-Net's scheme for CT: of each channel the foreground voxels of all training volumes of the hospital say two
    percentiles, a mean and a deviation; values are cut at the percentiles and become (value - mean) / deviation.

    Isensee et al., Nature Methods 2021, Online Methods ("Intensity normalization"). It needs label maps. Each hospital
    fits on its own training part; the numbers stay there, in its models' files.

    Args:
        low, high: in per cent, 0 <= low < high <= 100.
    """

    low: float = 0.5
    high: float = 99.5
    fits: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 100:
            raise ConfigError(f"Foreground must be 0 <= low < high <= 100, got {self.low:g} and {self.high:g}")

    def fitted(self, voxels: Sequence[NDArray[Any]]) -> Fixed:
        ends = [np.percentile(channel, (self.low, self.high)).tolist() for channel in voxels]
        return Fixed(
            low=tuple(float(low) for low, _ in ends),
            high=tuple(float(high) for _, high in ends),
            mean=tuple(float(channel.mean(dtype=np.float64)) for channel in voxels),
            deviation=tuple(float(channel.std(dtype=np.float64)) for channel in voxels),
        )

    def __call__(self, image: Tensor) -> Tensor:
        raise ConfigError("the intensities of these volumes need a hospital's statistics, and there are none")

    def as_monai(self) -> list[dict[str, JsonValue]]:
        raise ConfigError("the intensities of these volumes need a hospital's statistics, and there are none")


@dataclass(frozen=True)
class Fixed(Intensity):
    """The same with numbers that are known, one of each for every channel: what lies beyond ``low`` and ``high`` is
    cut, and values become (value - mean) / deviation. A channel whose ``low`` is its ``high`` becomes 0.

    Args:
        low, high, mean, deviation: by channel, as in the files.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        every = (self.low, self.high, self.mean, self.deviation)
        if len({len(one) for one in every}) != 1 or not self.low:
            raise ConfigError("Fixed's low, high, mean and deviation must have one number for every channel each")
        if not all(math.isfinite(value) for one in every for value in one) or not all(
            low <= high and deviation >= 0
            for low, high, deviation in zip(self.low, self.high, self.deviation, strict=True)
        ):
            raise ConfigError("Fixed's numbers must be finite, its low at most its high, its deviation at least 0")

    def __call__(self, image: Tensor) -> Tensor:
        import torch

        if len(image) != len(self.low):
            raise ConfigError(f"the intensities are those of {len(self.low)} channels, the volume has {len(image)}")
        changed = image.clone()
        for place, ends in enumerate(self._ends()):
            changed[place] = torch.zeros_like(image[place]) if ends is None else _scaled(image[place], ends)
        return changed

    def as_monai(self) -> list[dict[str, JsonValue]]:
        [ends] = self._ends()  # bundles have one channel
        if ends is None:
            raise ConfigError("all foreground voxels of the training part are equal; no bundle can say so")
        return [{"_target_": "ScaleIntensityRanged", **ends, "clip": True}]

    def _ends(self) -> list[dict[str, float] | None]:
        """Of each channel what becomes what."""
        found: list[dict[str, float] | None] = []
        for low, high, mean, deviation in zip(self.low, self.high, self.mean, self.deviation, strict=True):
            if low == high or deviation == 0:
                found.append(None)
                continue
            becomes = {"b_min": (low - mean) / deviation, "b_max": (high - mean) / deviation}
            found.append({"a_min": low, "a_max": high, **becomes})
        return found


def _scaled(image: Tensor, ends: dict[str, float]) -> Tensor:
    from monai.transforms import ScaleIntensityRange

    changed: Tensor = ScaleIntensityRange(**ends, clip=True)(image)
    return changed
