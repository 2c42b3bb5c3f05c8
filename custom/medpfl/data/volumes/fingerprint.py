# SPDX-License-Identifier: Apache-2.0
"""What a hospital's volumes are like, in a few numbers from which a network can be planned."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.contract import Dataset
from medpfl.data.declared import Problems
from medpfl.data.fingerprint import Fingerprint
from medpfl.data.volumes.prepare import read_image


def fingerprint(volumes: Dataset, source: str, classes: int) -> Fingerprint:
    """Of a declared dataset of volumes. Every training image is read once.

    Args:
        source: for messages.
        classes: of label maps.

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
        raise DataError(f"{source}: expected images of one number of channels, got {sorted(channels)}")
    try:
        return Fingerprint(
            cases=len(shapes),
            channels=channels.pop(),
            classes=classes,
            spacing=_three(np.median(spacings, axis=0)),
            fine=_three(np.percentile(spacings, 10, axis=0)),
            shape=_three(np.median(shapes, axis=0)),
        )
    except ValueError as error:  # pydantic's ValidationError
        raise DataError(f"{source}: no network is planned for volumes of such a size: {error}") from error


def _turned(affine: NDArray[np.float64], shape: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Spacing and shape along the axes of the patient that the image's axes are nearest to."""
    import nibabel as nib

    order = nib.orientations.io_orientation(affine)[:, 0].astype(int)
    spacing, lengths = np.empty(3), np.empty(3)
    spacing[order] = np.linalg.norm(affine[:3, :3], axis=0)
    lengths[order] = shape
    return spacing, lengths


def _three(values: NDArray[np.float64]) -> tuple[float, float, float]:
    first, second, third = (round(float(value), 4) for value in values)
    return first, second, third
