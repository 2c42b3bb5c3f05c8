# SPDX-License-Identifier: Apache-2.0
"""Label maps as DICOM segmentations and structure sets: the same masks, on the image's own grid, or a sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray

from dicom_labels import write_contours, write_seg
from dicom_series import affine_of, write_series
from medpfl.core.errors import DataError
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.volumes.contours import filled
from medpfl.data.volumes.declare import VolumeCase, Volumes
from medpfl.data.volumes.prepare import read_image
from medpfl.deployed.labels import dice_of

pytest.importorskip("highdicom", reason="needs the extra 'dicom'")
SHAPE = (7, 9, 5)
VALUES = np.random.default_rng(0).integers(-900, 1500, SHAPE).astype(np.int16)


def masks() -> dict[str, NDArray[np.bool_]]:
    """Two structures that do not overlap, with nothing in the first, the middle and the last slice."""
    rng, shares = np.random.default_rng(1), np.zeros(SHAPE)
    shares[:, :, [1, 3]] = rng.random((7, 9, 2))
    return {"Liver": shares > 0.6, "Tumour": (shares > 0.1) & (shares < 0.4)}


def dataset(**values: Any) -> Volumes:
    labels = {0: "background", 1: "liver", 2: "tumour"}
    return Volumes(**{"kind": "volumes", "datalist": "-", "labels": labels, **values})


def read(label: Path, image: Path, **values: Any) -> NDArray[Any]:
    found = dataset(**values).read(VolumeCase("p", "p", "list", (image,), label)).target
    assert isinstance(found, np.ndarray)
    return found


def upside_down(number: int, header: Any) -> None:
    header.InstanceNumber = SHAPE[2] - number


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "turn", "turned"),
    [("BINARY", 0.0, False), ("BINARY", 0.3, True), ("FRACTIONAL", 0.3, False), ("LABELMAP", 0.3, True)],
)
def test_a_segmentation_read_back_is_what_was_written(tmp_path: Path, kind: str, turn: float, turned: bool) -> None:
    """Also if the slices' order is another when it is read; frames without a structure are not in the file."""
    series = write_series(tmp_path / "series", VALUES, affine_of(turn))
    file = write_seg(tmp_path / "seg" / "one.dcm", series, masks(), kind)
    assert int(pydicom.dcmread(file).NumberOfFrames) < 2 * SHAPE[2]
    expected = masks()["Liver"] + 2 * masks()["Tumour"]
    if turned:
        for each in series.iterdir():
            header = pydicom.dcmread(each)
            upside_down(int(header.InstanceNumber) - 1, header)
            header.save_as(each)
        expected = expected[:, :, ::-1]
    np.testing.assert_array_equal(read(file, series), expected)
    np.testing.assert_array_equal(read(file.parent, series, structures={"Liver": 1, "Tumour": 2}), expected)
    np.testing.assert_array_equal(read(file, series, structures={"Tumour": 1}), expected == 2)
    np.testing.assert_array_equal(read(file, series, label_map={1: 2, 2: 1}), np.array([0, 2, 1])[expected])


@pytest.mark.slow
@pytest.mark.parametrize("whole", [100, 255])
def test_a_share_of_one_half_counts(tmp_path: Path, whole: int) -> None:
    series = write_series(tmp_path / "series", VALUES, affine_of())
    shares = np.zeros(SHAPE)
    shares[1, 1:4, 2] = [0.49, 0.5, 0.51]
    file = write_seg(tmp_path / "seg.dcm", series, {"Liver": shares}, "FRACTIONAL", whole)
    np.testing.assert_array_equal(read(file, series), shares >= 0.5)


@pytest.mark.slow
def test_structures_that_overlap_are_put_in_the_order_that_is_said(tmp_path: Path) -> None:
    series = write_series(tmp_path / "series", VALUES, affine_of())
    liver = np.zeros(SHAPE, bool)
    liver[1:6, 1:8, 1:4] = True
    tumour = np.zeros(SHAPE, bool)
    tumour[2:4, 2:5, 2] = True
    file = write_seg(tmp_path / "seg.dcm", series, {"Liver": liver, "Tumour": tumour})
    with pytest.raises(DataError, match=r"seg\.dcm: its segments overlap; say with 'structures' which counts"):
        read(file, series)
    expected = liver + np.int64(1) * tumour
    np.testing.assert_array_equal(read(file, series, structures={"Liver": 1, "Tumour": 2}), expected)
    np.testing.assert_array_equal(read(file, series, structures={"Tumour": 2, "Liver": 1}), liver)


def square(low: float, high: float, k: float) -> list[tuple[float, float, float]]:
    return [(low, low, k), (high, low, k), (high, high, k), (low, high, k)]


@pytest.mark.parametrize("turn", [0.0, 0.3])
def test_contours_become_the_voxels_within(tmp_path: Path, turn: float) -> None:
    """With a hole, two parts in one slice, and a structure of several names."""
    affine = affine_of(turn)
    series = write_series(tmp_path / "series", VALUES, affine)
    frame = pydicom.dcmread(next(series.iterdir())).FrameOfReferenceUID
    regions = {
        "Liver": [square(0.6, 5.4, 1), square(1.6, 3.4, 1), square(0.6, 2.4, 3)],
        "GTV-1": [square(3.6, 5.4, 3)],
        "BODY": [square(0, 6, 0)],
        "empty": [],
    }
    file = write_contours(tmp_path / "rs.dcm", affine, regions, str(frame))
    expected = np.zeros(SHAPE, int)
    expected[1:6, 1:6, 1], expected[2:4, 2:4, 1], expected[1:3, 1:3, 3], expected[4:6, 4:6, 3] = 1, 0, 1, 2
    found = read(file, series, structures={"Liver": 1, "gtv": 2, "GTV-1": 2})
    np.testing.assert_array_equal(found, expected)
    assert not read(file, series, structures={"empty": 1}).any()
    by_name = read(file, series, labels={0: "background", 1: "Liver", 2: "GTV-1"})
    np.testing.assert_array_equal(by_name, expected)


def test_every_voxel_is_in_one_of_two_polygons_that_share_an_edge() -> None:
    """Also where edges go through the voxels' centres; together they are the whole, and its half where it is cut."""
    whole = np.array([[1.0, 1.0], [8.0, 1.0], [8.0, 6.0], [1.0, 6.0]])
    left, right = np.array([*whole[[0]], [5, 1], [3, 6], *whole[[3]]]), np.array([[5, 1], *whole[[1, 2]], [3, 6]])
    parts = [filled([each], (10, 8)) for each in (left, right)]
    assert not (parts[0] & parts[1]).any() and parts[0].sum() and parts[1].sum()
    np.testing.assert_array_equal(parts[0] | parts[1], filled([whole], (10, 8)))
    np.testing.assert_array_equal(filled([left, right], (10, 8)), filled([whole], (10, 8)))
    assert filled([whole], (10, 8)).sum() == 7 * 5


def other_frame(header: Any) -> None:
    header.FrameOfReferenceUID = "1.2.3"


def moved(by: float) -> Callable[[Any], None]:
    def change(header: Any) -> None:
        for each in header.PerFrameFunctionalGroupsSequence:
            there = each.PlanePositionSequence[0]
            there.ImagePositionPatient = [there.ImagePositionPatient[0] + by, *there.ImagePositionPatient[1:]]

    return change


def finer(header: Any) -> None:
    header.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = [1.0, 0.75]


@pytest.mark.parametrize(
    ("change", "structures", "words"),
    [
        (other_frame, {}, "its frame of reference is another than that of series"),
        (moved(0.9), {}, "its pixels do not lie on the voxels of its image"),
        (moved(3.0), {}, "a part of 'Liver' lies outside its image"),
        (finer, {}, "its pixels do not lie on the voxels of its image"),
        (lambda h: None, {"Livr": 1}, "has no structure 'Livr'; did you mean 'Liver'?"),
        (lambda h: None, {"Kidney": 1, "Renal": 1}, "has no structure 'Kidney or Renal'; it has: Liver, Tumour"),
        (lambda h: setattr(h, "PixelData", h.PixelData[:4]), {}, "cannot be read as a DICOM segmentation"),
    ],
)  # fmt: skip
def test_segmentations_that_do_not_fit(tmp_path: Path, change: Any, structures: dict[str, int], words: str) -> None:
    series = write_series(tmp_path / "series", VALUES, affine_of())
    file = write_seg(tmp_path / "one.dcm", series, masks())
    header = pydicom.dcmread(file)
    change(header)
    header.save_as(file)
    with pytest.raises(DataError) as caught:
        read(file, series, structures=structures)
    assert words in str(caught.value) and str(caught.value).startswith(f"{file}: ")
    assert not any(word in caught.value.public for word in ("Liver", "one.dcm", "anonymous"))


@pytest.mark.parametrize(
    ("contour", "kind", "words"),
    [
        (square(1, 4, 9), "CLOSED_PLANAR", "a contour of 'Liver' lies outside its image"),
        (square(-9, -4, 2), "CLOSED_PLANAR", "a contour of 'Liver' lies outside its image"),
        (square(1, 4, 1.5), "CLOSED_PLANAR", "a contour of 'Liver' does not lie in a slice of its image"),
        ([(1, 1, 0), (1, 4, 2), (4, 4, 4)], "CLOSED_PLANAR", "a contour of 'Liver' does not lie in a slice"),
        (square(1, 4, 1), "POINT", "'Liver' has contours that are no areas (POINT); expected CLOSED_PLANAR"),
    ],
)  # fmt: skip
def test_contours_that_do_not_fit(tmp_path: Path, contour: Any, kind: str, words: str) -> None:
    series = write_series(tmp_path / "series", VALUES, affine_of())
    frame = str(pydicom.dcmread(next(series.iterdir())).FrameOfReferenceUID)
    file = write_contours(tmp_path / "rs.dcm", affine_of(), {"Liver": [contour]}, frame, kind)
    with pytest.raises(DataError) as caught:
        read(file, series, structures={"Liver": 1})
    assert f"{file}: {words}" in str(caught.value)
    with pytest.raises(DataError, match=r"has no structure 'liver'; did you mean 'Liver'\?"):
        read(file, series, structures={"liver": 1})
    other = write_contours(tmp_path / "other.dcm", affine_of(), {"Liver": [square(1, 4, 1)]})
    with pytest.raises(DataError, match="its frame of reference is another than that of series"):
        read(other, series, structures={"Liver": 1})


def test_structures_that_no_label_has() -> None:
    with pytest.raises(ValueError, match="structures: 'Liver' is mapped to 3; expected a label but the first"):
        dataset(structures={"Liver": 3})
    with pytest.raises(ValueError, match="structures: 'Liver' is liver, which 'annotated' does not name"):
        dataset(structures={"Liver": 1}, annotated=["tumour"])


@pytest.mark.parametrize("kind", ["segmentation", "structure set"])
def test_where_they_are_no_label_maps_a_sentence_says_so(tmp_path: Path, kind: str) -> None:
    """Of a structure set it said that a tag is missing, or the file ends; of a segmentation that it must be a label
    map, which it was."""
    series = write_series(tmp_path / "p1" / "ct", VALUES, affine_of())
    file = tmp_path / "p1" / "labels" / "one.dcm"
    if kind == "segmentation":
        write_seg(file, series, masks())
    else:
        write_contours(file, affine_of(), {"Liver": [square(1, 4, 1)]})
    with pytest.raises(DataError, match=rf"one\.dcm: expected an image, got a DICOM {kind}, which is read as a label"):
        read_image(file)
    with pytest.raises(DataError, match=r"one\.dcm: a DICOM segm.* for which 'medpfl site init'"):
        write_site_file(tmp_path, tmp_path / "site.yaml", Answers({"site": "here", "dataset": "d"}))
    written = nib.Nifti1Image(np.zeros(SHAPE, np.uint8), affine_of())
    nib.save(written, tmp_path / "p1.nii.gz")
    with pytest.raises(DataError, match=r"one\.dcm: Dice is told of label maps in voxels, and this is a DICOM segm"):
        dice_of(tmp_path / "p1.nii.gz", file, 2, [[1]])
