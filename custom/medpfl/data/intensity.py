# SPDX-License-Identifier: Apache-2.0
"""How intensities of volumes are brought into a range that networks take; a job chooses one."""

import math
from abc import abstractmethod
from dataclasses import dataclass

from pydantic import JsonValue
from torch import Tensor

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError


class Intensity(Checked):
    """A frozen dataclass whose fields are the job's arguments. What it takes from data it takes from the volume itself,
    so a new case is treated like those of training, and nothing of a hospital's data is kept or leaves."""

    @abstractmethod
    def __call__(self, image: Tensor) -> Tensor:
        """A volume, C x H x W x D float32, in the range."""

    @abstractmethod
    def as_monai(self) -> dict[str, JsonValue]:
        """The same for MONAI's bundles: its dictionary transform and the arguments, without the keys."""


@dataclass(frozen=True)
class ZScore(Intensity):
    """Mean 0 and deviation 1 of each channel of a volume, as is usual for MR; a channel of one value becomes 0."""

    def __call__(self, image: Tensor) -> Tensor:
        from monai.transforms import NormalizeIntensity

        changed: Tensor = NormalizeIntensity(channel_wise=True)(image)
        return changed

    def as_monai(self) -> dict[str, JsonValue]:
        return {"_target_": "NormalizeIntensityd", "channel_wise": True}


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

    def as_monai(self) -> dict[str, JsonValue]:
        ends: dict[str, JsonValue] = {"a_min": self.low, "a_max": self.high, "b_min": 0.0, "b_max": 1.0}
        return {"_target_": "ScaleIntensityRanged", **ends, "clip": True}


@dataclass(frozen=True)
class Percentiles(Intensity):
    """Two percentiles of each channel of a volume become 0 and 1, what lies beyond is cut: for MR with a few very
    bright voxels. A channel of one value becomes 0.

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

        if not all(channel.max() > channel.min() for channel in image):
            image = image.clone()
            for channel in image:
                if not channel.max() > channel.min():
                    channel.zero_()
        scaled = ScaleIntensityRangePercentiles(self.low, self.high, 0.0, 1.0, clip=True, channel_wise=True)
        changed: Tensor = scaled(image)
        return changed

    def as_monai(self) -> dict[str, JsonValue]:
        ends: dict[str, JsonValue] = {"lower": self.low, "upper": self.high, "b_min": 0.0, "b_max": 1.0}
        return {"_target_": "ScaleIntensityRangePercentilesd", **ends, "clip": True, "channel_wise": True}
