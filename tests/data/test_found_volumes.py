# SPDX-License-Identifier: Apache-2.0
"""Which files of a folder are volumes to predict, and what they are called."""

import gzip
from pathlib import Path

import nibabel as nib
import numpy as np

from medpfl.data.volumes.new import find_volumes


def test_names_in_capital_letters(tmp_path: Path) -> None:
    """As some exports write them: they were left out without a word, where others lay beside them."""
    for name in ("one.nii.gz", "TWO.NII.GZ", "Three.NII", ".hidden.nii.gz"):
        nib.save(nib.Nifti1Image(np.zeros((2, 2, 2), dtype=np.uint8), np.eye(4)), tmp_path / "plain.nii")
        data = (tmp_path / "plain.nii").read_bytes()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.lower().endswith("gz") else data)
    (tmp_path / "plain.nii").unlink()
    found = find_volumes(tmp_path)
    assert [name for name, _ in found] == ["TWO", "Three", "one"]
    assert [files[0].name for _, files in found] == ["TWO.NII.GZ", "Three.NII", "one.nii.gz"]
