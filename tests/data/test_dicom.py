# SPDX-License-Identifier: Apache-2.0
"""DICOM series: the same patient in NIfTI and in DICOM is the same array in the same place; broken series are named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

from medpfl.core.errors import DataError
from medpfl.data.volumes.declare import VolumeCase, Volumes
from medpfl.data.volumes.prepare import read_image

SHAPE = (7, 9, 5)
LPS = np.diag([-1.0, -1.0, 1.0, 1.0])


def affine_of(turn: float = 0.0) -> NDArray[np.float64]:
    """RAS affine: voxels of 1.5 x 2 x 4 mm, turned about the body axis by ``turn`` radians."""
    cosine, sine = np.cos(turn), np.sin(turn)
    rotation = np.array([[cosine, -sine, 0], [sine, cosine, 0], [0, 0, 1]])
    affine = np.eye(4)
    affine[:3, :3] = rotation @ np.diag([1.5, 2.0, 4.0])
    affine[:3, 3] = [-12.0, 20.0, -7.5]
    return affine


def write_series(
    folder: Path,
    values: NDArray[Any],
    affine: NDArray[np.float64],
    change: Callable[[int, Any], None] = lambda number, header: None,
    slope: float = 1.0,
    intercept: float = 0.0,
) -> Path:
    """One DICOM file a slice, as a scanner writes them; ``values``: i x j x k stored integers, ``affine``: RAS mm."""
    folder.mkdir(parents=True)
    series, study = generate_uid(), generate_uid()
    place = LPS @ affine
    lengths = np.linalg.norm(place[:3, :3], axis=0)
    for k in range(values.shape[2]):
        meta = FileMetaDataset()
        meta.MediaStorageSOPClassUID = CTImageStorage
        meta.MediaStorageSOPInstanceUID = generate_uid()
        meta.TransferSyntaxUID = ExplicitVRLittleEndian
        header = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
        header.SOPClassUID, header.SOPInstanceUID = CTImageStorage, meta.MediaStorageSOPInstanceUID
        header.Modality, header.PatientID = "CT", "anonymous"
        header.StudyInstanceUID, header.SeriesInstanceUID = study, series
        header.InstanceNumber = k + 1
        header.ImagePositionPatient = [float(v) for v in place[:3, 3] + k * place[:3, 2]]
        directions = [*(place[:3, 0] / lengths[0]), *(place[:3, 1] / lengths[1])]
        header.ImageOrientationPatient = [float(f"{v:.12g}") for v in directions]
        header.PixelSpacing = [float(lengths[1]), float(lengths[0])]  # between rows, between columns
        header.SliceThickness = float(lengths[2])
        header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
        header.BitsAllocated = header.BitsStored = 16
        header.HighBit, header.PixelRepresentation = 15, 1
        header.RescaleSlope, header.RescaleIntercept = slope, intercept
        pixels = np.ascontiguousarray(values[:, :, k].T.astype(np.int16))  # rows x columns
        header.Rows, header.Columns = pixels.shape
        header.PixelData = pixels.tobytes()
        change(k, header)
        # The file names' order is not the slices' order.
        header.save_as(folder / f"{(k * 3) % 5 + k // 5 * 5:03d}.dcm", enforce_file_format=True)
    return folder


def scan() -> tuple[NDArray[np.int16], NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    return rng.integers(-900, 1500, SHAPE).astype(np.int16), (rng.random(SHAPE) < 0.3).astype(np.uint8)


@pytest.mark.parametrize("turn", [0.0, 0.3])
def test_nifti_and_dicom_of_one_patient_are_the_same(tmp_path: Path, turn: float) -> None:
    values, label = scan()
    affine = affine_of(turn)
    nib.save(nib.Nifti1Image(values.astype(np.float32) * 2 - 100, affine), tmp_path / "i.nii.gz")
    nib.save(nib.Nifti1Image(label, affine), tmp_path / "l.nii.gz")
    series = write_series(tmp_path / "series", values, affine, slope=2, intercept=-100)
    masks = write_series(tmp_path / "masks", label, affine)
    dataset = Volumes(kind="volumes", datalist="-", labels={0: "background", 1: "organ"})
    items = [
        dataset.read(VolumeCase("p", "p", "list", (image,), target))
        for image, target in (
            (tmp_path / "i.nii.gz", tmp_path / "l.nii.gz"),
            (series, masks),
            (series, tmp_path / "l.nii.gz"),
        )
    ]
    for item in items[1:]:
        np.testing.assert_array_equal(item.image, items[0].image)
        np.testing.assert_array_equal(item.target, items[0].target)
        np.testing.assert_allclose(item.affine, items[0].affine, atol=1e-4)
    assert items[0].spacing == pytest.approx((1.5, 2.0, 4.0))


def test_slices_from_feet_to_head_or_head_to_feet(tmp_path: Path) -> None:
    values, _ = scan()

    def reverse(number: int, header: Any) -> None:
        header.InstanceNumber = SHAPE[2] - number

    plain, place = read_image(write_series(tmp_path / "up", values, affine_of()))
    turned, other = read_image(write_series(tmp_path / "down", values, affine_of(), reverse))
    np.testing.assert_array_equal(plain, turned[..., ::-1])
    np.testing.assert_allclose((place @ [0, 0, 4, 1])[:3], other[:3, 3], atol=1e-4)


def only(number: int, **values: Any) -> Callable[[int, Any], None]:
    def change(k: int, header: Any) -> None:
        if k == number:
            for tag, value in values.items():
                if value is None:
                    delattr(header, tag)
                else:
                    setattr(header, tag, value)

    return change


def farther(k: int, header: Any) -> None:
    if k == 4:
        header.ImagePositionPatient = [*header.ImagePositionPatient[:2], header.ImagePositionPatient[2] + 4.0]


def halved(k: int, header: Any) -> None:
    if k == 2:
        header.Rows //= 3
        header.PixelData = header.PixelData[: header.Rows * header.Columns * 2]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (only(2, SeriesInstanceUID="1.2.3"), ["001.dcm", "belongs to another series than 000.dcm"]),
        (only(1, InstanceNumber=None), ["003.dcm", "the DICOM tag InstanceNumber is missing"]),
        (only(0, ImagePositionPatient=None), ["000.dcm", "tag ImagePositionPatient is missing"]),
        (only(0, ImageOrientationPatient=None), ["000.dcm", "tag ImageOrientationPatient is missing"]),
        (only(0, PixelSpacing=None), ["000.dcm", "tag PixelSpacing is missing"]),
        (only(3, PixelSpacing=[2.0, 2.0]), ["004.dcm", "its PixelSpacing differs from that of 000.dcm"]),
        (only(3, ImageOrientationPatient=[0, 1, 0, 1, 0, 0]), ["004.dcm", "its ImageOrientationPatient differs"]),
        (only(3, ImagePositionPatient=[12.0, -20.0, -3.5]), ["004.dcm", "evenly spaced|lies at the position"]),
        (farther, ["not evenly spaced: 8 mm between 004.dcm and 002.dcm, elsewhere 4 mm"]),
        (halved, ["001.dcm", "expected 9 x 7 pixels as in 000.dcm, got 3 x 7"]),
        (only(1, PixelData=b"\0\0"), ["cannot be read as an image"]),
    ],
)  # fmt: skip
def test_a_broken_series_is_named(tmp_path: Path, change: Callable[[int, Any], None], words: list[str]) -> None:
    values, _ = scan()
    series = write_series(tmp_path / "series", values, affine_of(), change)
    with pytest.raises(DataError) as caught:
        read_image(series)
    for word in words:
        assert any(part in str(caught.value) for part in word.split("|")), caught.value
    assert str(series) in str(caught.value) and str(series) not in caught.value.public


def test_folders_that_are_no_series(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the folder holds no DICOM files"):
        read_image(tmp_path / "empty")
    values, _ = scan()
    series = write_series(tmp_path / "series", values, affine_of())
    (series / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"notes\.txt: cannot be read as DICOM: InvalidDicomError"):
        read_image(series)
    (series / "notes.txt").unlink()
    for file in sorted(series.iterdir())[1:]:
        file.unlink()
    with pytest.raises(DataError, match="expected a volume with 3 axes, got 2"):
        read_image(series)


def test_a_missing_slice(tmp_path: Path) -> None:
    values, _ = scan()
    series = write_series(tmp_path / "series", values, affine_of())
    gone = next(file for file in series.iterdir() if pydicom.dcmread(file).InstanceNumber == 3)
    gone.unlink()
    with pytest.raises(DataError, match="not evenly spaced: 8 mm between"):
        read_image(series)
