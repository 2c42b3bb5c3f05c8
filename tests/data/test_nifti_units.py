# SPDX-License-Identifier: Apache-2.0
"""Lengths of a NIfTI file that are not millimetres: readers do not look at the unit, so the volume would be learnt from
at a thousand times its size, or a thousandth."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from medpfl.core.errors import DataError
from medpfl.data.volumes.prepare import read_image


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize(
    ("unit", "told"), [("mm", None), ("unknown", None), ("micron", "micrometres"), ("meter", "metres")]
)
def test_the_unit_of_length(tmp_path: Path, kind: type[nib.Nifti1Image], unit: str, told: str | None) -> None:
    image = kind(np.ones((4, 5, 6), np.float32), np.diag([2.0, 2.0, 3.0, 1.0]))
    image.header.set_xyzt_units(unit, "sec")
    nib.save(image, tmp_path / "i.nii.gz")
    if told is None:
        assert read_image(tmp_path / "i.nii.gz")[0].shape == (1, 4, 5, 6)
        return
    with pytest.raises(DataError, match=rf"i\.nii\.gz: expected lengths in millimetres, its header says {told} "):
        read_image(tmp_path / "i.nii.gz")
