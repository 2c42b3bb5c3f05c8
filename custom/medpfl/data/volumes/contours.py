# SPDX-License-Identifier: Apache-2.0
"""DICOM structure sets (RTSTRUCT): the voxels whose centres lie within a region's contours.

Nothing that is installed anyway fills polygons by the centres of voxels (Pillow draws the outline too), and rt-utils
brings OpenCV; so a slice's contours are filled here by the even-odd rule, which is the standard's XOR: a contour within
another one is a hole.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.volumes.dicom import LPS

_APART = 0.3
"""Of the distance of slices: so far may a contour lie from the slice it is of."""
_AREAS = ("CLOSED_PLANAR", "CLOSEDPLANAR_XOR")


def contoured(
    file: Path, content: Any, number: int, name: str, shape: tuple[int, ...], place: NDArray[np.float64]
) -> NDArray[np.bool_]:
    """Where a region is: H x W x D, on the grid of an image; empty where it has no contours.

    Args:
        content: the file's.
        number: the region's.
        name: of the region, for errors.
        shape: the image's, H x W x D; contours lie in the planes of the first two axes.
        place: its affine, voxel to mm in RAS.

    Raises:
        DataError: a contour is no closed area, lies across slices, between them or outside.
        Exception: the file lacks what a structure set has.
    """
    to_voxels = np.linalg.inv(LPS @ place)
    polygons: dict[int, list[NDArray[np.float64]]] = {}
    for region in content.get("ROIContourSequence") or []:
        if region.ReferencedROINumber != number:
            continue
        for contour in region.get("ContourSequence") or []:
            if contour.ContourGeometricType not in _AREAS:
                kind = str(contour.ContourGeometricType)[:20]
                raise DataError(f"{file}: '{name}' has contours that are no areas ({kind}); expected CLOSED_PLANAR")
            points = np.array([float(v) for v in contour.ContourData]).reshape(-1, 3)
            voxels = np.c_[points, np.ones(len(points))] @ to_voxels.T
            height = float(voxels[:, 2].mean())
            if np.ptp(voxels[:, 2]) > _APART or abs(height - round(height)) > _APART:
                raise DataError(f"{file}: a contour of '{name}' does not lie in a slice of its image")
            inside = (voxels[:, :2].max(0) >= -0.5).all() and (voxels[:, :2].min(0) <= np.array(shape[:2]) - 0.5).all()
            if not (0 <= round(height) < shape[2] and inside):
                raise DataError(f"{file}: a contour of '{name}' lies outside its image")
            polygons.setdefault(round(height), []).append(voxels[:, :2])
    mask = np.zeros(shape, np.bool_)
    for slice_, there in polygons.items():
        mask[:, :, slice_] = filled(there, shape[:2])
    return mask


def filled(polygons: list[NDArray[np.float64]], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """Voxels whose centres lie within an odd number of polygons; of two that share an edge each voxel is in one.

    Args:
        polygons: n x 2 each, in voxels; the last point is joined to the first.
        shape: H x W.
    """
    crossed = np.zeros((shape[0] + 1, shape[1]), np.int64)
    for polygon in polygons:
        for (x, y), (other_x, other_y) in zip(polygon, np.roll(polygon, -1, axis=0), strict=True):
            low, high = sorted((y, other_y))
            rows = np.arange(max(0, int(np.ceil(low))), min(shape[1], int(np.ceil(high))))  # low <= row < high
            if len(rows):
                at = x + (rows - y) * (other_x - x) / (other_y - y)
                np.add.at(crossed, (np.clip(np.ceil(at), 0, shape[0]).astype(int), rows), 1)
    odd: NDArray[np.bool_] = np.cumsum(crossed[:-1], axis=0) % 2 == 1
    return odd
