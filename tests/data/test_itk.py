# SPDX-License-Identifier: Apache-2.0
"""NRRD and MetaImage volumes: read as NIfTI is, with the same geometry, and refused before they are decoded."""

import math
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.preparation import Spec
from medpfl.data.target import Target
from medpfl.data.volumes.new import find_volumes, read_new_volumes
from medpfl.data.volumes.prepare import read_image

sitk = pytest.importorskip("SimpleITK", reason="needs the extra 'imaging'")
VALUES = np.random.default_rng(0).integers(0, 200, (6, 7, 5)).astype(np.int16)


def oblique() -> NDArray[np.float64]:
    """Turned about two axes, with voxels of 0.8 x 1.1 x 2.5 mm."""
    a, b = math.cos(0.3), math.sin(0.3)
    turn = np.array([[a, -b, 0], [b, a, 0], [0, 0, 1]]) @ np.array([[1, 0, 0], [0, a, b], [0, -b, a]])
    affine = np.eye(4)
    affine[:3, :3] = turn * [0.8, 1.1, 2.5]
    affine[:3, 3] = [12, -40, 7]
    return affine


def write(file: Path, compress: bool = False) -> Path:
    """The volume as SimpleITK makes it of a NIfTI file, which stays beside it as reference.nii."""
    reference = file.with_name("reference.nii")
    nib.save(nib.Nifti1Image(VALUES, oblique()), reference)
    sitk.WriteImage(sitk.ReadImage(str(reference)), str(file), useCompression=compress)
    return reference


@pytest.mark.parametrize(("suffix", "compress"), [(".nrrd", True), (".mha", True), (".mhd", False)])
def test_it_is_read_as_nifti_is(suffix: str, compress: bool, tmp_path: Path) -> None:
    reference = write(tmp_path / f"case{suffix}", compress)
    found, affine = read_image(tmp_path / f"case{suffix}")
    expected, place = read_image(reference)
    assert found.shape == (1, 6, 7, 5) and np.array_equal(found, expected)
    assert np.allclose(affine, place, atol=1e-4) and not np.allclose(place, np.diag(np.diag(place)), atol=0.1)


def test_channels_come_first(tmp_path: Path) -> None:
    image = sitk.Compose([sitk.GetImageFromArray(VALUES.transpose(2, 1, 0) + k) for k in range(2)])
    sitk.WriteImage(image, str(tmp_path / "two.nrrd"))
    found, _ = read_image(tmp_path / "two.nrrd")
    assert np.array_equal(found, np.stack([VALUES, VALUES + 1]))


def test_a_prediction_lies_where_the_volume_does(tmp_path: Path) -> None:
    reference = write(tmp_path / "scan.nrrd")
    reference.unlink()
    assert [name for name, _ in find_volumes(tmp_path)] == ["scan"]
    spec = Spec(Target.MASK, ("volumes",), (8, 8, 8), (1.0, 1.0, 1.0))
    (volume,) = read_new_volumes(tmp_path / "scan.nrrd", spec)
    outputs = torch.zeros(1, 2, *volume.inputs.shape[2:])
    outputs[:, 1] = volume.inputs[:, 0] * 5
    row = volume.save(outputs, tmp_path, ["background", "organ"], False)
    written = nib.load(tmp_path / str(row["file"]))
    assert written.shape == VALUES.shape and np.allclose(written.affine, oblique(), atol=1e-4)
    found = np.asarray(written.dataobj) == 1
    assert VALUES[found].mean() > VALUES[~found].mean() + 40


def test_what_is_refused(tmp_path: Path) -> None:
    def refused(name: str, content: bytes, words: str) -> None:
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=words):
            read_image(tmp_path / name)

    meta = b"ObjectType = Image\nNDims = 3\nDimSize = %s\nElementType = MET_SHORT\nElementDataFile = %s\n"
    refused("far.mhd", meta % (b"2 2 2", b"/etc/hostname"), "in one file beside it, got '/etc/hostname'")
    refused("up.mhd", meta % (b"2 2 2", b"../up.raw"), r"in one file beside it, got '\.\./up\.raw'")
    refused("many.mhd", meta % (b"2 2 2", b"LIST"), "in one file beside it, got 'LIST'")
    refused("large.mha", meta % (b"4096 4096 4096", b"LOCAL"), "holds 4096 x 4096 x 4096 x 1 values; at most")
    bomb = b"CompressedData = True\n" + meta % (b"1000 1000 1000", b"LOCAL")
    refused("bomb.mha", bomb, r"bomb\.mha: its header promises voxels of 2000000000 bytes, which \d+ bytes cannot hold")
    doubles = (
        b"NRRD0004\ntype: double\ndimension: 3\nsizes: 500 500 500\nencoding: gzip\nendian: little\n\n" + b"\0" * 9
    )
    refused("bomb.nrrd", doubles, "promises voxels of 1000000000 bytes")
    refused("short.mha", meta % (b"20 20 20", b"LOCAL") + b"\0" * 9, r"short\.mha: cannot be read as an image")
    refused("flat.mha", meta.replace(b"NDims = 3", b"NDims = 2") % (b"2 2", b"LOCAL") + b"\0" * 8, "3 axes, got 2")
    refused("other.nrrd", b"NIFTI", r"other\.nrrd: cannot be read as an image")
    nrrd = b"NRRD0004\ntype: short\ndimension: 3\nsizes: 2 2 2\nencoding: raw\ndata file: /etc/hostname\n\n"
    refused("apart.nrrd", nrrd, "its voxels are in another file, which is not read")


@pytest.mark.parametrize("suffix", [".mhd", ".mha"])
@pytest.mark.parametrize(
    "lines",
    [
        b"elementdatafile = ok.raw\nElementDataFile = %s\n",
        b"ELEMENTDATAFILE = LOCAL\nElementDataFile = %s\n",
        b"elementdatafile = ok.raw\nElementDataFile : %s\n",
        b"ElementDataFile : %s\nElementDataFile = ok.raw\n",
        b"elementdatafile = ok.raw\nElementDataFile = LIST\n%s\n",
    ],
)
def test_a_meta_image_does_not_fetch_its_voxels_from_elsewhere(suffix: str, lines: bytes, tmp_path: Path) -> None:
    header = b"ObjectType = Image\nNDims = 3\nDimSize = 2 2 2\nElementType = MET_UCHAR\n"
    elsewhere(tmp_path, f"case{suffix}", header, lines)


@pytest.mark.parametrize(
    "lines",
    [b"space origin: (0,0,0)\rdata file: %s\n\n", b"# much\n" * 2**18 + b"data file: %s\n\n"],
    ids=["behind a carriage return", "behind a mebibyte"],
)
def test_an_nrrd_does_not_fetch_its_voxels_from_elsewhere(lines: bytes, tmp_path: Path) -> None:
    header = b"NRRD0004\ntype: uchar\ndimension: 3\nspace: RAS\nsizes: 2 2 2\nencoding: raw\n"
    elsewhere(tmp_path, "case.nrrd", header, b"space directions: (1,0,0) (0,1,0) (0,0,1)\n" + lines)


def elsewhere(folder: Path, name: str, header: bytes, lines: bytes) -> None:
    (folder / "secret").write_bytes(b"password")
    (folder / "data").mkdir()
    (folder / "data" / "ok.raw").write_bytes(bytes(8))
    (folder / "data" / name).write_bytes(header + lines % bytes(folder / "secret"))
    with pytest.raises(DataError, match=r"its voxels|where its voxels are|its header has more than 1048576 bytes"):
        read_image(folder / "data" / name)


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n"], ids=["nothing", "a line", "a line of Windows"])
def test_the_last_line_of_a_header_may_end_as_it_likes(end: bytes, tmp_path: Path) -> None:
    meta = b"ObjectType = Image\nNDims = 3\nElementSpacing = 1 1 1\nDimSize = 2 2 2\nElementType = MET_UCHAR\n"
    header = meta + b"ElementDataFile = my voxels.raw"
    (tmp_path / "my voxels.raw").write_bytes(bytes(range(8)))
    (tmp_path / "case.mhd").write_bytes(header.replace(b"\n", end or b"\n") + end)
    assert read_image(tmp_path / "case.mhd")[0].flatten().tolist() == [0, 4, 2, 6, 1, 5, 3, 7]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ('space directions: (1000,0,0) (0,1000,0) (0,0,2000)\nspace units: "um" "um" "um"', "its header says um"),
        ('spacings: 0.1 0.1 0.2\nunits: "cm" "cm" "cm"', "its header says cm"),
        ("kinds: domain domain domain", "does not say how large a voxel is"),
        ("spacings: 1 1 nan", "does not say how large a voxel is"),
        ('space directions: (1,0,0) (0,1,0) (0,0,2)\nspace units: "mm" "mm" "mm"', ""),
        ('spacings: 1 1 2e0\nunits: "mm" "millimeter" ""', ""),
    ],
)
def test_an_nrrd_says_its_lengths_in_millimetres(lines: str, told: str, tmp_path: Path) -> None:
    space = "space: left-posterior-superior\n" * ("directions" in lines)
    header = f"NRRD0004\ntype: uchar\ndimension: 3\n{space}sizes: 2 2 2\nencoding: raw\n{lines}\n\n"
    lengths_are_looked_at(tmp_path / "case.nrrd", header.encode(), told)


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ("ElementSpacing = 1 1 2\nDistanceUnits = um", "its header says um"),
        ("Offset = 1 2 3", "does not say how large a voxel is"),
        ("ElementSpacing = 1 1 2\nDistanceUnits = mm", ""),
        ("ElementSize = 1 1 2", ""),
    ],
)
def test_a_meta_image_says_its_lengths_in_millimetres(lines: str, told: str, tmp_path: Path) -> None:
    header = (
        f"ObjectType = Image\nNDims = 3\n{lines}\nDimSize = 2 2 2\nElementType = MET_UCHAR\nElementDataFile = LOCAL\n"
    )
    lengths_are_looked_at(tmp_path / "case.mha", header.encode(), told)


def lengths_are_looked_at(file: Path, header: bytes, told: str) -> None:
    """A reader would take 1 mm where the header says nothing, and every number for mm."""
    file.write_bytes(header + bytes(range(8)))
    if told:
        with pytest.raises(DataError, match=rf"{file.name}: .*{told}"):
            read_image(file)
    else:
        assert np.linalg.norm(read_image(file)[1][:3, :3], axis=0).tolist() == [1, 1, 2]
