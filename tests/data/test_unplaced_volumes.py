# SPDX-License-Identifier: Apache-2.0
"""NIfTI files whose headers do not say how the volume lies: readers guess, and left and right may be exchanged."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from hospitals import write_volumes
from medpfl.check.check import check_data


@pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
@pytest.mark.parametrize(("sform", "qform", "warned"), [(0, 0, True), (1, 0, False), (0, 1, False)])
def test_a_volume_without_a_place_is_warned_of(
    tmp_path: Path, kind: type[nib.Nifti1Image], sform: int, qform: int, warned: bool
) -> None:
    site = write_volumes(tmp_path)
    for part in ("images", "labels"):
        file = tmp_path / part / "p03.nii.gz"
        found = nib.load(file)
        image = kind(np.asanyarray(found.dataobj), found.affine)
        image.set_sform(found.affine, sform)
        image.set_qform(found.affine, qform)
        nib.save(image, file)
    (inspection,) = check_data(site, None, None, lambda what, done, count: None).inspections
    unplaced = [text for text in inspection.warnings if "do not say how they lie" in text]
    assert not inspection.problems and len(unplaced) == len(inspection.warnings) == warned
    if warned:
        assert "of 1 of 16 volumes" in unplaced[0] and "p03" in unplaced[0]
