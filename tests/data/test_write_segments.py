# SPDX-License-Identifier: Apache-2.0
"""Segmentations written as DICOM-SEG: read back they are the masks, on the input's voxels, and name its series."""

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
from numpy.typing import NDArray

from dicom_frames import write_frames
from dicom_series import LPS, affine_of, write_series
from medpfl.core.errors import DataError
from medpfl.data.volumes.prepare import read_image
from medpfl.data.volumes.structures import read_structures
from medpfl.data.volumes.write_segments import write_segments

highdicom = pytest.importorskip("highdicom", reason="needs the extra 'dicom'")
SHAPE = (7, 9, 5)
VALUES = np.random.default_rng(0).integers(-900, 1500, SHAPE).astype(np.int16)
NAMES = ["background", "liver", "tumour"]


def classes() -> NDArray[np.uint8]:
    found = np.random.default_rng(1).integers(0, 3, SHAPE).astype(np.uint8)
    found[..., 2] = 0
    return found


def upside_down(number: int, header: Any) -> None:
    header.InstanceNumber = SHAPE[2] - number


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["series", "reversed", "frames"])
def test_read_back_it_is_the_mask(kind: str, tmp_path: Path) -> None:
    """Turned against the body's axes; by our reader, and by highdicom's, which finds the same places in the world."""
    if kind == "frames":
        source = write_frames(tmp_path / "one.dcm", VALUES, affine_of(0.3), (2, 0, 4, 1, 3), change=complete)
    else:
        source = write_series(tmp_path / "a", VALUES, affine_of(0.3), upside_down if kind == "reversed" else plain)
    _, place = read_image(source)
    mask, file = classes(), tmp_path / "out.seg.dcm"
    write_segments(file, source, mask, place, NAMES)
    np.testing.assert_array_equal(read_structures(file, source, SHAPE, place, {}), mask)
    np.testing.assert_array_equal(read_structures(file, source, SHAPE, place, {"tumour": 1}), mask == 2)
    volume = highdicom.seg.segread(file).get_volume(combine_segments=True)
    for value in (1, 2):
        there = volume.affine @ np.r_[np.argwhere(volume.array == value).T, np.ones((1, (mask == value).sum()))]
        ours = LPS @ place @ np.r_[np.argwhere(mask == value).T, np.ones((1, (mask == value).sum()))]
        np.testing.assert_allclose(sorted(there.T.round(3).tolist()), sorted(ours.T.round(3).tolist()), atol=2e-3)
    made = pydicom.dcmread(file)
    header = pydicom.dcmread(source if source.is_file() else next(source.iterdir()))
    for tag in ("StudyInstanceUID", "FrameOfReferenceUID", "PatientID"):
        assert made[tag].value == header[tag].value
    assert made.ReferencedSeriesSequence[0].SeriesInstanceUID == header.SeriesInstanceUID
    assert [each.SegmentLabel for each in made.SegmentSequence] == NAMES[1:]
    assert not list(tmp_path.glob(".*"))


def plain(number: int, header: Any) -> None:
    pass


def complete(header: Any) -> None:
    """What every file has, if only empty."""
    for empty in ("PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID", "AccessionNumber"):
        setattr(header, empty, "")
    header.ReferringPhysicianName = header.Manufacturer = ""


@pytest.mark.slow
def test_a_mask_of_nothing(tmp_path: Path) -> None:
    source = write_series(tmp_path / "a", VALUES, affine_of())
    _, place = read_image(source)
    write_segments(tmp_path / "b.dcm", source, np.zeros(SHAPE, np.uint8), place, NAMES)
    assert not read_structures(tmp_path / "b.dcm", source, SHAPE, place, {}).any()


def test_a_series_that_lacks_what_a_segmentation_repeats(tmp_path: Path) -> None:
    def without(number: int, header: Any) -> None:
        del header.StudyInstanceUID

    source = write_series(tmp_path / "a", VALUES, affine_of(), without)
    _, place = read_image(source)
    with pytest.raises(DataError, match=r"a: no DICOM-SEG can be written for it: it is no complete DICOM .*StudyInst"):
        write_segments(tmp_path / "b.dcm", source, classes(), place, NAMES)
    assert not list(tmp_path.glob("*.dcm"))


def test_a_single_frame_whose_place_stands_with_what_all_share(tmp_path: Path) -> None:
    """DICOM allows it, and the image is read; a segmentation of it ended with an error of Python's."""

    def shared(header: Any) -> None:
        complete(header)
        [frame] = header.PerFrameFunctionalGroupsSequence
        header.SharedFunctionalGroupsSequence[0].PlanePositionSequence = frame.PlanePositionSequence
        del frame.PlanePositionSequence

    source, mask = (
        write_frames(tmp_path / "one.dcm", VALUES[..., :1], affine_of(0.3), change=shared),
        classes()[..., :1],
    )
    _, place = read_image(source)
    write_segments(tmp_path / "b.dcm", source, mask, place, NAMES)
    np.testing.assert_array_equal(read_structures(tmp_path / "b.dcm", source, mask.shape, place, {}), mask)
