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

from dicom_series import affine_of, write_series
from medpfl.core.errors import DataError
from medpfl.data.volumes.declare import VolumeCase, Volumes
from medpfl.data.volumes.prepare import read_image

SHAPE = (7, 9, 5)


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


@pytest.mark.filterwarnings("ignore:Invalid value for VR DS")  # pydicom's, as such a file is written
@pytest.mark.parametrize("slices", [2, 5])
def test_numbers_longer_than_dicom_allows_are_read(tmp_path: Path, slices: int) -> None:
    """Much software writes direction cosines with more than DICOM's 16 characters; what they say is clear."""
    values, affine = scan()[0][:, :, :slices], affine_of(0.3)
    _, place = read_image(write_series(tmp_path / "short", values, affine))
    array, exact = read_image(write_series(tmp_path / "long", values, affine, digits=17))
    np.testing.assert_allclose(exact, place, atol=1e-6)
    np.testing.assert_allclose(exact[:3, :2], affine[:3, :2], atol=1e-12)
    np.testing.assert_array_equal(array[0], values)


def test_reading_changes_no_setting_of_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads read beside each other: what one sets for a moment decides what another one refuses."""

    def touched(settings: object, value: int) -> None:
        pytest.fail(f"pydicom's reading_validation_mode was set to {value}")

    series = write_series(tmp_path / "series", scan()[0], affine_of())
    kind = type(pydicom.config.settings)
    mode = property(kind.reading_validation_mode.fget, touched)
    monkeypatch.setattr(kind, "reading_validation_mode", mode)
    read_image(series)


def test_slices_from_feet_to_head_or_head_to_feet(tmp_path: Path) -> None:
    values, _ = scan()

    def reverse(number: int, header: Any) -> None:
        header.InstanceNumber = SHAPE[2] - number

    plain, place = read_image(write_series(tmp_path / "up", values, affine_of()))
    turned, other = read_image(write_series(tmp_path / "down", values, affine_of(), reverse))
    np.testing.assert_array_equal(plain, turned[..., ::-1])
    np.testing.assert_allclose((place @ [0, 0, 4, 1])[:3], other[:3, 3], atol=1e-4)


@pytest.mark.parametrize("name", ["CT[1]", "CT*", "CT?"])
def test_a_folder_is_never_taken_for_the_one_beside_it(tmp_path: Path, name: str) -> None:
    """In a search pattern "CT[1]" means "CT1", which may be another patient's."""
    values, _ = scan()
    write_series(tmp_path / "CT1", values, affine_of())
    array, _ = read_image(write_series(tmp_path / name, values + 7, affine_of()))
    np.testing.assert_array_equal(array[0], values + 7)


def test_slices_of_one_number_are_put_in_order_by_their_places(tmp_path: Path) -> None:
    values, _ = scan()

    def same(number: int, header: Any) -> None:
        header.InstanceNumber = 1

    plain, place = read_image(write_series(tmp_path / "numbered", values, affine_of()))
    array, other = read_image(write_series(tmp_path / "same", values, affine_of(), same))
    np.testing.assert_array_equal(array, plain)
    np.testing.assert_allclose(other, place, atol=1e-6)


@pytest.mark.parametrize("numbers", [(1, 4, 2, 5, 3), (3, 5, 2, 4, 1)])
def test_slices_that_are_numbered_as_they_were_taken(tmp_path: Path, numbers: tuple[int, ...]) -> None:
    """The odd ones first: what counts is where they lie. From which end they go say the first and the last of them."""
    values, _ = scan()

    def taken(number: int, header: Any) -> None:
        header.InstanceNumber = numbers[number]
        header.RescaleIntercept = number

    array, place = read_image(write_series(tmp_path / "series", values, affine_of(), taken))
    expected = values + np.arange(SHAPE[2])
    if numbers[0] > numbers[-1]:
        array, place = array[..., ::-1], place @ np.diag([1, 1, -1, 1]) + place[:, 2:3] * [0, 0, 0, SHAPE[2] - 1]
    np.testing.assert_array_equal(array[0], expected)
    np.testing.assert_allclose(place, affine_of(), atol=1e-6)


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
    with pytest.raises(
        DataError, match=r"notes\.txt: cannot be read as DICOM: it is damaged, incomplete or something else"
    ):
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


def test_pixels_that_nothing_here_decompresses(tmp_path: Path) -> None:
    """A sound file, in the way many archives compress; it was called damaged."""

    def lossless(number: int, header: Any) -> None:
        header.file_meta.TransferSyntaxUID = pydicom.uid.HTJ2KLossless
        header.PixelData = pydicom.encaps.encapsulate([b"\xff\x4f\xff\x51" + bytes(60)])

    series = write_series(tmp_path / "series", scan()[0], affine_of(), lossless)
    with pytest.raises(
        DataError,
        match=r"\.dcm: its pixels are compressed as High-Throughput JPEG 2000 .*, which is not read; decompress",
    ):
        read_image(series)


@pytest.mark.parametrize("name", ["slice", "slice.dcm"])
@pytest.mark.parametrize("kind", ["RGB", "YBR_FULL", "PALETTE COLOR"])
def test_a_picture_in_colour_is_no_volume(tmp_path: Path, name: str, kind: str) -> None:
    """Its three colours would be three slices; of a palette, the numbers of its entries would be intensities."""

    def coloured(number: int, header: Any) -> None:
        header.PhotometricInterpretation, header.PixelRepresentation = kind, 0
        if kind != "PALETTE COLOR":
            header.SamplesPerPixel, header.PlanarConfiguration = 3, 0
            header.BitsAllocated, header.BitsStored, header.HighBit = 8, 8, 7
            header.PixelData = bytes(3 * header.Rows * header.Columns + 1)

    image = write_series(tmp_path / "slice", scan()[0][:, :, :1], affine_of(), coloured)
    if name != "slice":
        image = next(image.iterdir()).rename(tmp_path / name)
    with pytest.raises(DataError, match=f"expected grey pixels, got {kind}"):
        read_image(image)
    if name == "slice" and kind == "PALETTE COLOR":
        with pytest.raises(DataError, match=f"expected grey pixels, got {kind}"):
            read_image(write_series(tmp_path / "series", scan()[1].astype(np.int16), affine_of(), coloured))


@pytest.mark.parametrize(
    ("tag", "value", "words"),
    [
        ("SeriesInstanceUID", None, "the DICOM tag SeriesInstanceUID is missing"),
        ("Columns", None, "the DICOM tag Columns is missing"),
        ("ImagePositionPatient", [1.0, 2.0], "its DICOM tag ImagePositionPatient does not hold 3 numbers"),
        ("PixelSpacing", 1.0, "its DICOM tag PixelSpacing does not hold 2 numbers"),
        ("ImagePositionPatient", b"2>0", "cannot be read as DICOM.*2>0"),
    ],
)
@pytest.mark.filterwarnings("ignore:Invalid value for VR")  # pydicom's, as such a file is written and read
def test_a_damaged_header_is_named(tmp_path: Path, tag: str, value: Any, words: str) -> None:
    """Such files ended the data check and jobs with Python's errors."""
    series = write_series(tmp_path / "series", scan()[0], affine_of())
    file = sorted(series.iterdir())[2]
    header = pydicom.dcmread(file)
    if value is None:
        delattr(header, tag)
    elif isinstance(value, bytes):
        header.ImagePositionPatient = [0, 1, 220]
    else:
        setattr(header, tag, value)
    header.save_as(file)
    if isinstance(value, bytes):
        content = file.read_bytes()
        # With what stands beside it: UIDs hold any digits, and stand earlier.
        file.write_bytes(content.replace(b"\\220.0", b"\\" + value + b".0"))
    with pytest.raises(DataError, match=words) as caught:
        read_image(series)
    assert str(file) in str(caught.value)


def test_a_table_that_says_what_pixels_mean_is_not_passed_over(tmp_path: Path) -> None:
    """MONAI's reader knows slope and intercept alone: the volume would hold the numbers before the table."""

    def tabled(number: int, header: Any) -> None:
        table = pydicom.Dataset()
        table.LUTDescriptor, table.ModalityLUTType = [16, 0, 16], "HU"
        table.LUTData = np.arange(0, 1600, 100, np.uint16).tobytes()
        header.ModalityLUTSequence = [table]

    series = write_series(tmp_path / "series", scan()[1].astype(np.int16), affine_of(), tabled)
    with pytest.raises(DataError, match=r"its pixels are numbers of a table \(ModalityLUTSequence\)"):
        read_image(series)


def test_pixels_whose_values_do_not_stand_in_the_lowest_bits_are_refused(tmp_path: Path) -> None:
    """The reader takes the lowest bits of 12, wherever the 12 are."""

    def shifted(number: int, header: Any) -> None:
        header.BitsStored, header.HighBit, header.PixelRepresentation = 12, 15, 0

    series = write_series(tmp_path / "series", scan()[0], affine_of(), shifted)
    with pytest.raises(
        DataError, match=r"\.dcm: its values do not stand in the lowest bits .*BitsStored 12, HighBit 15"
    ):
        read_image(series)
