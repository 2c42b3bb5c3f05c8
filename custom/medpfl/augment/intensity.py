# SPDX-License-Identifier: Apache-2.0
"""Augmentations that change an image's values and leave its mask alone.

Values are what networks see: volumes normalised to mean 0 and standard deviation 1, photographs about -2 to 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from medpfl.augment.contract import Intensity, Range


@dataclass(frozen=True)
class Brightness(Intensity):
    """Multiplies the values (MONAI RandScaleIntensity).

    Args:
        factor: by what.
        by_channel: every channel by its own factor.
        prob: how often.
    """

    factor: Range = (0.75, 1.25)
    by_channel: bool = False
    prob: float = 0.15
    limits: ClassVar[Mapping[str, Range]] = {"factor": (0, 10)}

    def transforms(self, axes: int) -> list[Any]:
        from monai.transforms import RandScaleIntensity

        return [RandScaleIntensity(_less_one(self.factor), 1.0, self.by_channel)]


@dataclass(frozen=True)
class Shift(Intensity):
    """Adds a number to the values (MONAI RandShiftIntensity).

    Args:
        offset: which.
        by_channel: another one to every channel.
        prob: how often.
    """

    offset: Range = (-0.1, 0.1)
    by_channel: bool = False
    prob: float = 0.15
    limits: ClassVar[Mapping[str, Range]] = {"offset": (-10, 10)}

    def transforms(self, axes: int) -> list[Any]:
        from monai.transforms import RandShiftIntensity

        return [RandShiftIntensity(self.offset, prob=1.0, channel_wise=self.by_channel)]


@dataclass(frozen=True)
class Contrast(Intensity):
    """Multiplies what the values differ by from their mean; what leaves the image's range is clipped to it (MONAI
    RandScaleIntensityFixedMean).

    Args:
        factor: by what.
        by_channel: every channel by its own factor and about its own mean.
        prob: how often.
    """

    factor: Range = (0.75, 1.25)
    by_channel: bool = False
    prob: float = 0.15
    limits: ClassVar[Mapping[str, Range]] = {"factor": (0, 10)}

    def transforms(self, axes: int) -> list[Any]:
        from monai.transforms import RandScaleIntensityFixedMean

        return [
            RandScaleIntensityFixedMean(1.0, _less_one(self.factor), preserve_range=True, channel_wise=self.by_channel)
        ]


@dataclass(frozen=True)
class Gamma(Intensity):
    """Raises the values, all channels scaled together to 0 to 1 and back, to a power (MONAI RandAdjustContrast).

    Args:
        gamma: which.
        invert: of the negative image.
        keep_mean: bring the result to the mean and standard deviation that the image had.
        prob: how often.
    """

    gamma: Range = (0.7, 1.5)
    invert: bool = False
    keep_mean: bool = True
    prob: float = 0.3
    limits: ClassVar[Mapping[str, Range]] = {"gamma": (0.1, 10)}

    def transforms(self, axes: int) -> list[Any]:
        from monai.transforms import RandAdjustContrast

        return [RandAdjustContrast(1.0, self.gamma, self.invert, self.keep_mean)]


@dataclass(frozen=True)
class Noise(Intensity):
    """Adds Gaussian noise of mean 0 (MONAI RandGaussianNoise).

    Args:
        std: the greatest standard deviation; a sample's is drawn between 0 and it.
        prob: how often.
    """

    std: float = 0.1
    prob: float = 0.1
    limits: ClassVar[Mapping[str, Range]] = {"std": (0, 10)}

    def transforms(self, axes: int) -> list[Any]:
        from monai.transforms import RandGaussianNoise

        return [RandGaussianNoise(1.0, 0.0, self.std)]


@dataclass(frozen=True)
class Blur(Intensity):
    """Smooths with a Gaussian; what lies beyond the edge counts as 0 (MONAI RandGaussianSmooth).

    Args:
        sigma: its standard deviation in pixels, another one along every axis.
        prob: how often.
    """

    sigma: Range = (0.5, 1.0)
    prob: float = 0.2
    limits: ClassVar[Mapping[str, Range]] = {"sigma": (0.1, 20)}

    def transforms(self, axes: int) -> list[Any]:
        from monai.transforms import RandGaussianSmooth

        return [RandGaussianSmooth(self.sigma, self.sigma, self.sigma, 1.0)]


@dataclass(frozen=True)
class BiasField(Intensity):
    """Multiplies by a smooth field, e to the power of a polynomial of the place, as MR coils do (MONAI RandBiasField).

    Args:
        strength: the polynomial's coefficients.
        degree: of the polynomial.
        prob: how often.
    """

    strength: Range = (-0.1, 0.1)
    degree: int = 3
    prob: float = 0.15
    limits: ClassVar[Mapping[str, Range]] = {"strength": (-2, 2), "degree": (1, 6)}

    def transforms(self, axes: int) -> list[Any]:
        from monai.transforms import RandBiasField

        return [RandBiasField(self.degree, self.strength, prob=1.0)]


@dataclass(frozen=True)
class LowResolution(Intensity):
    """Shows an image as if it had been taken with fewer, larger pixels (MONAI RandSimulateLowResolution).

    Args:
        zoom: lengths of the coarse image as a share of the image's.
        prob: how often.
    """

    zoom: Range = (0.5, 1.0)
    prob: float = 0.125
    limits: ClassVar[Mapping[str, Range]] = {"zoom": (0.05, 1)}

    def transforms(self, axes: int) -> list[Any]:
        from monai.transforms import RandSimulateLowResolution

        # MONAI's default, "nearest", takes the first of the pixels that become one: it would move the image by up to
        # half a coarse pixel away from its mask.
        return [RandSimulateLowResolution(1.0, "area", "bilinear" if axes == 2 else "trilinear", self.zoom)]


@dataclass(frozen=True)
class ColourJitter(Intensity):
    """Another light: every colour is multiplied by a factor and a number is added to it.

    MONAI has no transform of hue and saturation; this is its RandScaleIntensity and RandShiftIntensity, channel by
    channel, one after the other.

    Args:
        factor: by what each colour is multiplied.
        offset: what is added to each.
        prob: how often.
    """

    factor: Range = (0.8, 1.2)
    offset: Range = (-0.2, 0.2)
    prob: float = 0.5
    limits: ClassVar[Mapping[str, Range]] = {"factor": (0, 10), "offset": (-10, 10)}

    def transforms(self, axes: int) -> list[Any]:
        return [*Brightness(self.factor, True).transforms(axes), *Shift(self.offset, True).transforms(axes)]


def _less_one(factor: Range) -> Range:
    """A factor as MONAI counts it: what is added to 1."""
    return factor[0] - 1, factor[1] - 1
