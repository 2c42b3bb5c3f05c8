# SPDX-License-Identifier: Apache-2.0
"""What a NIfTI file says by itself: its spacing, before a reader mends it without a word, and a label map's values."""

import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError, unreadable
from medpfl.data.untrusted import check_held, check_values
from medpfl.data.volumes.checksums import check_sum

SUFFIXES = (".nii", ".nii.gz")
_OTHER_UNITS = {1: "metres", 3: "micrometres"}
"""By NIfTI's code; readers take all lengths for millimetres, which 2 is and 0, unknown, nearly always means."""


def check_spacing(file: Path) -> None:
    """Refuse a spacing of 0, one that is not finite, or one that is not in mm. Readers put 1 for it, take another field
    of the header, or do not look at the unit, and the volume would be learnt from at a size that it does not have.

    Raises:
        DataError: with the file, the field of the header and what it says.
        Exception: the file cannot be read, whatever nibabel raises.
    """
    import nibabel as nib
    from nibabel.openers import ImageOpener

    with ImageOpener(str(file)) as opened:
        raw = opened.read(nib.Nifti2Header.sizeof_hdr)
    kind = next((kind for kind in (nib.Nifti1Header, nib.Nifti2Header) if kind.may_contain_header(raw)), None)
    if kind is None:
        return
    header = kind(raw[: kind.sizeof_hdr], check=False)
    if int(header["dim"][0]) < 3:
        return  # no volume, which its reader says
    if unit := _OTHER_UNITS.get(int(header["xyzt_units"]) & 7):
        raise DataError(f"{file}: expected lengths in millimetres, its header says {unit} (xyzt_units)")
    spacings = {"pixdim": np.abs(header["pixdim"][1:4].astype(np.float64))}
    if int(header["sform_code"]) > 0:
        rows = np.stack([header[f"srow_{axis}"][:3].astype(np.float64) for axis in "xyz"])
        spacings["sform"] = np.linalg.norm(rows, axis=0)
    for field, found in spacings.items():
        if not (np.isfinite(found) & (found > 0)).all():
            told = " x ".join(f"{length:g}" for length in found)
            raise DataError(f"{file}: expected a voxel spacing above 0, its header has {told} mm ({field})")


def check_size(file: Path, image: Any) -> None:
    """Refuse, before they are decoded, too many voxels, or more than the file can hold.

    Args:
        image: the file as nibabel loads it.

    Raises:
        DataError: with what its header says.
    """
    check_values(file, image.shape)
    stored = Path(image.file_map["image"].filename or file).stat().st_size
    check_held(file, image.get_data_dtype().itemsize * math.prod(image.shape), stored)


def check_whole(file: Path, image: Any) -> None:
    """Refuse a compressed file whose voxels are not those that were written.

    Args:
        image: the file as nibabel loads it.

    Raises:
        zlib.error, EOFError: they are not.
    """
    stored = Path(image.file_map["image"].filename or file)
    check_sum(stored, image.get_data_dtype().itemsize * math.prod(image.shape))


def place_of(file: Path) -> NDArray[np.float64] | None:
    """The affine of a file whose sform says where it lies, whatever its qform says; None of any other.

    So read nibabel and most viewers. Where the sform's voxel size is not that of ``pixdim`` to the last digits, MONAI's
    reader takes the qform instead, set or not: the volume would lie elsewhere, turned and of another size.
    """
    import nibabel as nib

    image: Any = nib.load(file)
    header = image.header
    if not isinstance(header, nib.Nifti1Header) or int(header["sform_code"]) <= 0:
        return None
    affine: NDArray[np.float64] = image.affine
    return affine


def says_place(file: Path) -> bool:
    """False of a NIfTI file whose header leaves open how its volume lies (neither its sform nor its qform is set), as
    conversions from Analyze do, where left and right were a matter of habit. Readers take it for LAS without a word."""
    import nibabel as nib

    if not file.name.lower().endswith((*SUFFIXES, ".img", ".hdr")):
        return True
    header = nib.load(file).header
    return not isinstance(header, nib.Nifti1Header) or bool(header["sform_code"] > 0 or header["qform_code"] > 0)


def stored_values(file: Path) -> NDArray[Any]:
    """The different values of a file's voxels, sorted; without MONAI, whose import takes longer than many files.

    Raises:
        DataError: it is missing or broken, or holds no voxels.
    """
    import nibabel as nib

    if not file.exists():
        raise DataError(f"{file}: no such file")
    try:
        check_spacing(file)
        image: Any = nib.load(file)
        check_size(file, image)
        found = np.unique(np.asanyarray(image.dataobj))
        check_whole(file, image)
    except DataError:
        raise
    except Exception as error:  # the reader raises anything on a broken file; the sentence keeps the cause
        raise DataError(unreadable(file, "an image", error.__cause__ or error)) from error
    if not len(found):
        raise DataError(f"{file}: holds no voxels, its shape is {image.shape}")
    return found
