# SPDX-License-Identifier: Apache-2.0
"""What a hospital's volumes are like, in a few numbers from which a network can be planned."""

from collections.abc import Sequence
from typing import Annotated, Self

import nibabel as nib
import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from medpfl.core.errors import DataError
from medpfl.data.declared import Problems, Strict
from medpfl.data.volumes.declare import Volumes
from medpfl.data.volumes.prepare import read_image

Spacing = Annotated[float, Field(ge=0.01, le=100)]
Voxels = Annotated[float, Field(ge=1, le=2**16)]
_LONGEST = 10_000.0
"""Millimetres of a volume's longest edge. Another hospital's file may say anything, and a plan takes time by it."""


class Fingerprint(Strict):
    """Of the training volumes, in RAS (right-left, posterior-anterior, axial).

    Attributes:
        cases: how many there are.
        channels: of an image.
        classes: background included.
        spacing: median distance of voxels, mm.
        fine: tenth percentile of the same.
        shape: median number of voxels.
    """

    cases: Annotated[int, Field(ge=1, le=1_000_000)]
    channels: Annotated[int, Field(ge=1, le=1000)]
    classes: Annotated[int, Field(ge=2, le=256)]
    spacing: tuple[Spacing, Spacing, Spacing]
    fine: tuple[Spacing, Spacing, Spacing]
    shape: tuple[Voxels, Voxels, Voxels]

    @model_validator(mode="after")
    def _is_of_a_patient(self) -> Self:
        edge = max(voxels * length for voxels, length in zip(self.shape, self.spacing, strict=True))
        if edge > _LONGEST:
            raise ValueError(f"volumes of {edge:.0f} mm; at most {_LONGEST:.0f} mm are planned for")
        return self


def fingerprint(volumes: Volumes) -> Fingerprint:
    """Of a declared dataset. Every training image is read once.

    Raises:
        DataError: with the file, expected and got.
    """
    spacings, shapes, channels = [], [], set()
    for case in volumes.cases(Problems())["train"]:
        image, affine = read_image(*case.images)
        spacing, shape = _turned(affine, image.shape[1:])
        spacings.append(spacing)
        shapes.append(shape)
        channels.add(len(image))
    if len(channels) != 1:
        raise DataError(f"{volumes.datalist}: expected images of one number of channels, got {sorted(channels)}")
    try:
        return Fingerprint(
            cases=len(shapes),
            channels=channels.pop(),
            classes=len(volumes.class_names()),
            spacing=_three(np.median(spacings, axis=0)),
            fine=_three(np.percentile(spacings, 10, axis=0)),
            shape=_three(np.median(shapes, axis=0)),
        )
    except ValueError as error:  # pydantic's ValidationError
        raise DataError(f"{volumes.datalist}: no network is planned for volumes of such a size: {error}") from error


def _turned(affine: NDArray[np.float64], shape: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Spacing and shape along the axes of the patient that the image's axes are nearest to."""
    order = nib.orientations.io_orientation(affine)[:, 0].astype(int)
    spacing, lengths = np.empty(3), np.empty(3)
    spacing[order] = np.linalg.norm(affine[:3, :3], axis=0)
    lengths[order] = shape
    return spacing, lengths


def _three(values: NDArray[np.float64]) -> tuple[float, float, float]:
    first, second, third = (round(float(value), 4) for value in values)
    return first, second, third
