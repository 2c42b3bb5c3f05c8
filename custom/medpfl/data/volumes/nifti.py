# SPDX-License-Identifier: Apache-2.0
"""A NIfTI file's spacing as its header has it, before a reader mends it without a word."""

from pathlib import Path

import numpy as np

from medpfl.core.errors import DataError


def check_spacing(file: Path) -> None:
    """Refuse a spacing of 0, or one that is not finite. Readers put 1 for it, or take another field of the header, and
    the volume would be learnt from at a size that it does not have.

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
    spacings = {"pixdim": np.abs(header["pixdim"][1:4].astype(np.float64))}
    if int(header["sform_code"]) > 0:
        rows = np.stack([header[f"srow_{axis}"][:3].astype(np.float64) for axis in "xyz"])
        spacings["sform"] = np.linalg.norm(rows, axis=0)
    for field, found in spacings.items():
        if not (np.isfinite(found) & (found > 0)).all():
            told = " x ".join(f"{length:g}" for length in found)
            raise DataError(f"{file}: expected a voxel spacing above 0, its header has {told} mm ({field})")
