# SPDX-License-Identifier: Apache-2.0
"""Volumes from files (NIfTI, DICOM, NRRD, MetaImage) to the task's grid: orientation, spacing, size, intensities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError, unreadable
from medpfl.data.geometry import geometry
from medpfl.data.intensity import Intensity, ZScore
from medpfl.data.untrusted import MOST_PREPARED, MOST_VALUES
from medpfl.data.volumes.dicom import check_series, geometry_tags
from medpfl.data.volumes.frames import frames_of, read_frames
from medpfl.data.volumes.itk import is_itk, read_itk
from medpfl.data.volumes.nifti import check_size, check_spacing, check_whole, place_of

if TYPE_CHECKING:
    from torch import Tensor


def read_image(*files: Path, finite: bool = True) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """An image, CHWD, and its affine (4 x 4, voxel to mm, RAS); several files are stacked as channels.

    Args:
        finite: refuse NaN and infinity.

    Raises:
        DataError: a file is missing or broken, holds no volume, no voxels, no usable geometry, or NaN.
    """
    parts: list[tuple[NDArray[np.float32], NDArray[np.float64]]] = []
    for file in files:
        if not file.exists():
            raise DataError(f"{file}: no such file")
        frames = frames_of(file)
        alone = file.is_dir() or file.suffix.lower() == ".dcm"
        slices = check_series(file) if frames is None and alone else []
        try:
            array, affine = read_frames(*frames) if frames else read_itk(file) if is_itk(file) else _read(file, slices)
        except DataError:
            raise
        except Exception as error:  # readers raise anything on a broken file; the sentence keeps the cause
            raise DataError(unreadable(file, "an image", error.__cause__ or error)) from error
        if array.ndim != 4:
            raise DataError(f"{file}: expected a volume with 3 axes, got {array.ndim - 1}")
        if not min(array.shape):
            raise DataError(f"{file}: holds no voxels, its shape is {array.shape[1:]}")
        if finite and not np.isfinite(array).all():
            raise DataError(f"{file}: holds values that are not finite")
        sizes = np.linalg.norm(affine[:3, :3], axis=0)
        if not np.isfinite(affine).all() or not abs(np.linalg.det(affine[:3, :3])) > 1e-9 * sizes.prod() > 0:
            raise DataError(f"{file}: its header has no usable geometry (affine {affine[:3].tolist()})")
        if parts:
            if array.shape[1:] != parts[0][0].shape[1:]:
                expected = parts[0][0].shape[1:]
                raise DataError(f"{file}: expected the shape of {files[0].name}, {expected}, got {array.shape[1:]}")
            same_place(file, files[0], array.shape[1:], parts[0][1], affine)
        parts.append((array, affine))
    return np.concatenate([array for array, _ in parts]), parts[0][1]


_FINER = 8
"""So many times the voxels of a case may a job always ask for."""


@geometry(True)
def _read(file: Path, slices: Sequence[Path]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """A NIfTI file or DICOM series by MONAI's readers, channels first, and its affine.

    Args:
        slices: of a series, the files in their order.
    """
    import torch
    from monai.data import MetaTensor, NibabelReader, PydicomReader
    from monai.transforms import EnsureChannelFirst

    reader = PydicomReader() if file.is_dir() or file.suffix.lower() == ".dcm" else NibabelReader()
    if isinstance(reader, PydicomReader):
        reader._get_meta_dict = geometry_tags
    if isinstance(reader, NibabelReader):
        check_spacing(file)
    header = reader.read([str(one) for one in slices] if len(slices) > 1 else str(file))
    if len(slices) > 1:
        # MONAI finds slices by a pattern, in which the folder "CT[1]" means "CT1", and orders them by their numbers.
        reader.has_series, reader.filenames = True, [slices]
        for number, one in enumerate(header):
            one.InstanceNumber = number
    if isinstance(reader, NibabelReader):  # it has not decompressed the voxels yet
        check_size(file, header)
    values, meta = reader.get_data(header)
    if isinstance(reader, NibabelReader):
        check_whole(file, header)
    if values.dtype.kind not in "biuf":  # of complex numbers the cast below would keep the real parts
        found = "complex numbers" if values.dtype.kind == "c" else "colours"
        raise DataError(f"{file}: expected one real number a voxel, got {found}")
    image: Any = EnsureChannelFirst()(MetaTensor(torch.from_numpy(values.astype(np.float32)), meta=meta))
    place = place_of(file) if isinstance(reader, NibabelReader) else None
    return image.as_tensor().numpy(), image.affine.double().numpy() if place is None else place


@geometry(True)
def prepare(
    image: NDArray[Any],
    affine: NDArray[np.float64],
    spacing: tuple[float, float, float],
    size: tuple[int, int] | None,
    intensity: Intensity = ZScore(),  # noqa: B008 (it is frozen)
) -> Tensor:
    """An image on the task's grid, CHWD float32 (a MetaTensor that knows its affine); ``size`` None: no crop or pad."""
    import torch
    from monai.data import MetaTensor
    from monai.transforms import Spacing

    turned = _oriented(MetaTensor(torch.from_numpy(image), affine=torch.from_numpy(affine)))
    _check_spacing(turned, spacing)
    prepared: Tensor = _cropped(intensity(Spacing(pixdim=spacing, mode="bilinear")(turned)), size)
    return prepared


@geometry(True)
def resized(
    image: NDArray[Any], affine: NDArray[np.float64], size: tuple[int, int, int], intensity: Intensity
) -> Tensor:
    """An image in RAS orientation, brought to ``size`` voxels whatever its own, CHWD float32: each voxel the mean of
    what lies there (MONAI's usual Resize; its smoothing before trilinear interpolation would darken the edges)."""
    import torch
    from monai.data import MetaTensor
    from monai.transforms import Resize

    turned = _oriented(MetaTensor(torch.from_numpy(image), affine=torch.from_numpy(affine)))
    found: Any = intensity(Resize(size, mode="area")(turned))
    values: Tensor = found.as_tensor()
    return values


@geometry(True)
def prepare_label(
    label: NDArray[np.uint8],
    affine: NDArray[np.float64],
    spacing: tuple[float, float, float],
    size: tuple[int, int] | None,
) -> Tensor:
    """A label map on the task's grid, HWD uint8."""
    import torch
    from monai.data import MetaTensor
    from monai.transforms import Spacing

    turned = _oriented(MetaTensor(torch.from_numpy(label)[None].float(), affine=torch.from_numpy(affine)))
    _check_spacing(turned, spacing)
    cropped: Any = _cropped(Spacing(pixdim=spacing, mode="nearest")(turned), size)
    values: Tensor = cropped.as_tensor()[0].to(torch.uint8)
    return values


def _check_spacing(image: Any, spacing: tuple[float, float, float]) -> None:
    """Refuse a job's voxel size that makes far more voxels of a volume than fit into memory, before they are made."""
    lengths = [length * float(voxel) for length, voxel in zip(image.shape[1:], image.pixdim, strict=True)]
    most = min(MOST_VALUES, max(MOST_PREPARED, _FINER * math.prod(image.shape[1:])))
    if math.prod(length / step for length, step in zip(lengths, spacing, strict=True)) > most:
        told = f"the task's spacing of {' x '.join(map(str, spacing))} mm makes"
        own = " x ".join(f"{length:.0f}" for length in lengths)
        raise DataError(
            f"{told} more than {most} voxels of a case, which is of {own} mm",
            public=f"{told} far too many voxels of a case",  # the limit goes by the patient's volume
        )


def _oriented(image: Any) -> Any:
    from monai.transforms import Orientation

    return Orientation(axcodes="RAS", labels=(("L", "R"), ("P", "A"), ("I", "S")))(image)


def _cropped(image: Any, size: tuple[int, int] | None) -> Any:
    from monai.transforms import ResizeWithPadOrCrop

    return image if size is None else ResizeWithPadOrCrop(spatial_size=(*size, -1))(image)


def same_place(
    label: Path, image: Path, shape: tuple[int, ...], place: NDArray[np.float64], other: NDArray[np.float64]
) -> None:
    """Refuse a label map that its header puts elsewhere than its image.

    A shifted or mirrored label map would train the model on the wrong voxels without a word. Rounding in the headers
    is no reason: up to half a voxel at any corner passes, and the image's affine counts.
    """
    ends = [np.array([0.0, length - 1.0]) for length in shape]
    corners = np.stack([axis.ravel() for axis in np.meshgrid(*ends, indexing="ij")] + [np.ones(8)])
    apart = float(np.linalg.norm(((place - other) @ corners)[:3], axis=0).max())
    if not apart <= 0.5 * float(np.linalg.norm(place[:3, :3], axis=0).min()):
        raise DataError(
            f"{label}: its geometry (affine) does not fit that of {image.name}: they lie up to {apart:.3g} mm apart"
        )
