# SPDX-License-Identifier: Apache-2.0
"""Compressed volumes that a disk or a transfer has damaged are refused, although their voxels can be decompressed."""

import gzip
import zlib
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk

from medpfl.core.errors import DataError
from medpfl.data.volumes.checksums import check_sum
from medpfl.data.volumes.nifti import stored_values
from medpfl.data.volumes.prepare import read_image


def written(file: Path) -> Any:
    values = np.random.default_rng(0).normal(100, 20, (30, 31, 20)).astype(np.int32)
    if file.suffix in (".nrrd", ".mha"):
        sitk.WriteImage(sitk.GetImageFromArray(values.transpose(2, 1, 0)), str(file), True)
    else:
        kind: Any = nib.MGHImage if file.suffix == ".mgz" else nib.Nifti1Image
        nib.save(kind(values, np.eye(4)), file)
    return values


@pytest.mark.parametrize("name", ["a.nii.gz", "A.NII.GZ", "a.mgz", "a.nrrd", "a.mha"])
def test_damaged_voxels_are_not_read_as_others(name: str, tmp_path: Path) -> None:
    file = tmp_path / name
    values = written(file)
    np.testing.assert_array_equal(read_image(file)[0][0], values)
    sound = file.read_bytes()
    for place in range(len(sound) // 4, len(sound) - 16, len(sound) // 5):
        damaged = bytearray(sound)
        damaged[place : place + 64] = bytes(min(64, len(sound) - place))
        file.write_bytes(damaged)
        with pytest.raises(DataError, match="it is damaged, incomplete or something else") as caught:
            read_image(file)
        assert str(file) in str(caught.value)
    if "nii" in name.lower():
        with pytest.raises(DataError, match="it is damaged, incomplete or something else"):
            stored_values(file)
    file.write_bytes(sound[:-3])
    with pytest.raises(DataError, match="cannot be read as"):
        read_image(file)


def test_what_stands_behind_and_parts_of_a_file(tmp_path: Path) -> None:
    """Several gzip parts are one file; what is no part of it, and what never ends, is not looked at."""
    file = tmp_path / "a.nii.gz"
    values = written(file)
    content = gzip.decompress(file.read_bytes())
    parts = gzip.compress(content[:9000]) + gzip.compress(content[9000:])
    for behind in (b"", bytes(512), b"notes"):
        file.write_bytes(parts + behind)
        check_sum(file, values.nbytes)
    np.testing.assert_array_equal(read_image(file)[0][0], values)
    file.write_bytes(parts[:-9] + b"\0" + parts[-8:])
    with pytest.raises((zlib.error, EOFError)):
        check_sum(file, values.nbytes)
    file.write_bytes(gzip.compress(bytes(2**23)) + b"\x1f\x8bdamaged")
    check_sum(file, 2**20)
