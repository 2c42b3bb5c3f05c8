# SPDX-License-Identifier: Apache-2.0
"""Augmentations that move what an image shows, and its mask with it."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from medpfl.augment.contract import Range, Spatial
from medpfl.core.errors import ConfigError

Outside = Literal["zeros", "border", "reflection"]
"""What is seen beyond the edge: nothing (0, of a mask its first class), the edge's values, or the mirrored image."""
_PADDED = {"zeros": "constant", "border": "edge", "reflection": "reflect"}  # NumPy's words for the same


@dataclass(frozen=True)
class Flip(Spatial):
    """Mirrors one axis (MONAI RandFlip).

    Args:
        axis: 0, 1 or 2, without the channels. Of volumes and of their slices 0 is right-left.
        prob: how often.
    """

    axis: int = 0
    prob: float = 0.5
    limits: ClassVar[Mapping[str, Range]] = {"axis": (0, 2)}

    def check_axes(self, axes: int) -> None:
        if self.axis >= axes:
            raise ConfigError(
                f"Flip's axis must be between 0 and {axes - 1} for images of {axes} axes, got {self.axis}"
            )

    def transforms(self, shape: tuple[int, ...], keys: tuple[str, ...]) -> list[Any]:
        from monai.transforms import RandFlipd

        return [RandFlipd(keys, 1.0, self.axis)]


@dataclass(frozen=True)
class Affine(Spatial):
    """Turns, stretches, shears and shifts, in one interpolation (MONAI RandAffine).

    Args:
        degrees: rotation by up to so much either way; of volumes about all axes, or a number for each.
        stretch: every axis is divided by another number in 1 - stretch to 1 + stretch: of 0.2, what is seen becomes
            0.83 to 1.25 times as long.
        shear: by up to so much (the tangent of the angle) either way.
        shift: by up to this share of each length, either way.
        outside: what is seen beyond the edge.
        prob: how often.
    """

    degrees: float | tuple[float, float, float] = 15.0
    stretch: float = 0.0
    shear: float = 0.0
    shift: float = 0.0
    outside: Outside = "zeros"
    prob: float = 0.2
    limits: ClassVar[Mapping[str, Range]] = {
        "degrees": (0, 180), "stretch": (0, 0.9), "shear": (0, 1), "shift": (0, 1),
    }  # fmt: skip

    def check_axes(self, axes: int) -> None:
        if axes == 2 and isinstance(self.degrees, tuple):
            raise ConfigError(f"Affine's degrees must be one number for images, got {list(self.degrees)}")

    def transforms(self, shape: tuple[int, ...], keys: tuple[str, ...]) -> list[Any]:
        from monai.transforms import RandAffined

        turns = self.degrees if isinstance(self.degrees, tuple) else (self.degrees,) * (1 if len(shape) == 2 else 3)
        return [
            RandAffined(
                keys,
                prob=1.0,
                rotate_range=[math.radians(turn) for turn in turns],
                shear_range=[self.shear] * (len(shape) * (len(shape) - 1)),
                translate_range=[self.shift * length for length in shape],
                scale_range=[self.stretch] * len(shape),
                mode=_modes(keys, "bilinear", "nearest"),
                padding_mode=self.outside,
            )
        ]


@dataclass(frozen=True)
class Zoom(Spatial):
    """Enlarges or shrinks about the centre, all axes alike; the shape stays (MONAI RandZoom).

    Args:
        factor: what is seen becomes so many times as large.
        outside: what is seen beyond the edge of an image that became smaller.
        prob: how often.
    """

    factor: Range = (0.8, 1.25)
    outside: Outside = "zeros"
    prob: float = 0.2
    limits: ClassVar[Mapping[str, Range]] = {"factor": (0.5, 10)}

    def transforms(self, shape: tuple[int, ...], keys: tuple[str, ...]) -> list[Any]:
        from monai.transforms import RandZoomd

        thin = min(1.0, 3 / min(shape))  # MONAI cannot shrink an axis to nothing, nor mirror one of a voxel
        least, most = (max(thin, factor) for factor in self.factor)
        return [RandZoomd(
            keys, 1.0, least, most, mode=_modes(keys, _linear(shape), "nearest-exact"),
            padding_mode=_PADDED[self.outside],
        )]  # fmt: skip


@dataclass(frozen=True)
class Crop(Spatial):
    """A random part, brought to the size of the whole (MONAI RandScaleCrop, then Resize).

    Args:
        part: share of each length that is kept, every axis by its own draw.
        prob: how often.
    """

    part: Range = (0.8, 1.0)
    prob: float = 1.0
    limits: ClassVar[Mapping[str, Range]] = {"part": (0.05, 1)}

    def transforms(self, shape: tuple[int, ...], keys: tuple[str, ...]) -> list[Any]:
        from monai.transforms import RandScaleCropd, Resized

        least, most = self.part
        modes = _modes(keys, _linear(shape), "nearest-exact")
        return [RandScaleCropd(keys, least, most, random_size=True), Resized(keys, shape, mode=modes)]


@dataclass(frozen=True)
class Elastic2D(Spatial):
    """Bends an image: the knots of a grid are moved at random (MONAI Rand2DElastic).

    Args:
        spacing: pixels from knot to knot.
        magnitude: standard deviation of a knot's move, in pixels.
        outside: what is seen beyond the edge.
        prob: how often.
    """

    spacing: float = 16.0
    magnitude: Range = (0.5, 2.0)
    outside: Outside = "zeros"
    prob: float = 0.2
    limits: ClassVar[Mapping[str, Range]] = {"spacing": (2, 1024), "magnitude": (0, 100)}

    def check_axes(self, axes: int) -> None:
        if axes != 2:
            raise ConfigError("Elastic2D bends images; volumes are bent by Elastic3D")

    def transforms(self, shape: tuple[int, ...], keys: tuple[str, ...]) -> list[Any]:
        from monai.transforms import Rand2DElasticd

        modes = _modes(keys, "bilinear", "nearest")
        spacing = (self.spacing, self.spacing)
        return [Rand2DElasticd(keys, spacing, self.magnitude, prob=1.0, mode=modes, padding_mode=self.outside)]


@dataclass(frozen=True)
class Elastic3D(Spatial):
    """Bends a volume: every voxel is moved at random, and the moves are smoothed (MONAI Rand3DElastic).

    Args:
        sigma: standard deviation of the Gaussian that smooths, in voxels.
        magnitude: by what the smoothed moves, of which each was between -1 and 1 before, are multiplied: about
            10 sigma^1.5 moves a voxel by 1 or 2.
        outside: what is seen beyond the edge.
        prob: how often.
    """

    sigma: Range = (5.0, 7.0)
    magnitude: Range = (50.0, 200.0)
    outside: Outside = "zeros"
    prob: float = 0.2
    limits: ClassVar[Mapping[str, Range]] = {"sigma": (0.5, 50), "magnitude": (0, 10000)}

    def check_axes(self, axes: int) -> None:
        if axes != 3:
            raise ConfigError("Elastic3D bends volumes; images are bent by Elastic2D")

    def transforms(self, shape: tuple[int, ...], keys: tuple[str, ...]) -> list[Any]:
        from monai.transforms import Rand3DElasticd

        modes = _modes(keys, "bilinear", "nearest")
        return [Rand3DElasticd(keys, self.sigma, self.magnitude, prob=1.0, mode=modes, padding_mode=self.outside)]


def _modes(keys: tuple[str, ...], image: str, mask: str) -> list[str]:
    return [image, mask][: len(keys)]


def _linear(shape: tuple[int, ...]) -> str:
    return "bilinear" if len(shape) == 2 else "trilinear"
