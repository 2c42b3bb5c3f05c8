# SPDX-License-Identifier: Apache-2.0
"""DICOM segmentations (SEG): each frame is put onto the image's voxels by where it lies, whatever their order."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.volumes.dicom import LPS

_APART = 0.3
"""A frame's pixels may lie so far from the image's voxels, in voxels: rounding in headers, slices not quite even."""


def segmented(
    file: Path, content: Any, number: int, name: str, shape: tuple[int, ...], place: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Where a segment is: H x W x D, on the grid of an image. Frames that are not there are empty.

    Args:
        content: the file's.
        number: the segment's.
        name: of the segment, for errors.
        shape: the image's, H x W x D.
        place: its affine, voxel to mm in RAS.

    Raises:
        DataError: pixels of the segment lie between the image's voxels or outside.
        Exception: the file lacks what a segmentation has.
    """
    pixels = content.pixel_array
    pixels = pixels[None] if pixels.ndim == 2 else pixels
    labels = content.get("SegmentationType") == "LABELMAP"
    least = 0.5 * int(content.MaximumFractionalValue) if content.get("SegmentationType") == "FRACTIONAL" else 0.5
    shared = content.SharedFunctionalGroupsSequence[0]
    to_voxels = np.linalg.inv(LPS @ place)
    mask = np.zeros(shape, np.bool_)
    for frame, values in zip(content.PerFrameFunctionalGroupsSequence, pixels, strict=True):
        if not labels and _item(frame, shared, "SegmentIdentificationSequence").ReferencedSegmentNumber != number:
            continue
        rows, columns = np.nonzero(values == number if labels else values >= least)
        if not len(rows):
            continue
        steps = to_voxels @ _affine(frame, shared)
        _check_steps(file, steps, values.shape)
        found = np.rint(steps @ np.stack([columns, rows, np.zeros_like(rows), np.ones_like(rows)]))[:3].astype(int)
        if (found < 0).any() or (found >= np.array(shape)[:, None]).any():
            raise DataError(f"{file}: a part of '{name}' lies outside its image")
        mask[tuple(found)] = True
    return mask


def _item(frame: Any, shared: Any, group: str) -> Any:
    """A functional group, of a frame or of all."""
    return (frame.get(group) or shared[group].value)[0]


def _affine(frame: Any, shared: Any) -> NDArray[np.float64]:
    """Column, row, 0, 1 to mm in LPS."""
    turned = [float(v) for v in _item(frame, shared, "PlaneOrientationSequence").ImageOrientationPatient]
    between_rows, between_columns = map(float, _item(frame, shared, "PixelMeasuresSequence").PixelSpacing)
    affine = np.zeros((4, 4))
    affine[:3, 0] = np.array(turned[:3]) * between_columns
    affine[:3, 1] = np.array(turned[3:]) * between_rows
    affine[:3, 3] = [float(v) for v in _item(frame, shared, "PlanePositionSequence").ImagePositionPatient]
    affine[3, 3] = 1
    return affine


def _check_steps(file: Path, steps: NDArray[np.float64], size: tuple[int, ...]) -> None:
    """Refuse a frame whose pixels are not the image's voxels, one for one, wherever in the frame they are."""
    corners = np.array([[0, size[1] - 1, 0, size[1] - 1], [0, 0, size[0] - 1, size[0] - 1], [0] * 4, [1] * 4])
    nearest = np.rint(steps)
    apart = float(np.abs((steps - nearest)[:3] @ corners).max())
    turned = nearest[:3, :2]
    if not apart <= _APART or not np.array_equal(np.abs(turned).T @ np.abs(turned), np.eye(2)):
        raise DataError(f"{file}: its pixels do not lie on the voxels of its image; both need one geometry")
