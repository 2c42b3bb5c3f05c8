# SPDX-License-Identifier: Apache-2.0
"""Label maps in DICOM: which structures a file holds, which are wanted, and whether they belong to the image."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError, meant, unreadable
from medpfl.data.volumes.contours import contoured
from medpfl.data.volumes.dicom import CONTOURS, SEGMENTATIONS, check_size, dicom_file
from medpfl.data.volumes.segments import segmented


@dataclass(frozen=True)
class _Structure:
    """A segment or a region of interest: its number and name in the file, and its frame of reference, if known."""

    number: int
    name: str
    frame: str


def structures_of(path: Path) -> Path | None:
    """The DICOM segmentation (SEG) or structure set (RTSTRUCT) that a path means; None: another kind of file.

    Raises:
        DataError: it cannot be read, or is too large.
    """
    file = dicom_file(path)
    header = check_size([file])[0][1] if file else {}
    return file if header.get("SOPClassUID") in (*SEGMENTATIONS, CONTOURS) else None


def is_structure_set(file: Path) -> bool:
    """Whether a file is an RTSTRUCT, whose structures have names that mean something, and numbers that do not."""
    return bool(check_size([file])[0][1].get("SOPClassUID") == CONTOURS)


def read_structures(
    file: Path, image: Path, shape: tuple[int, ...], place: NDArray[np.float64], wanted: dict[str, int]
) -> NDArray[np.int64]:
    """A label map on an image's grid.

    Args:
        image: its file, or the folder of its series, for the frame of reference.
        shape: the image's, H x W x D.
        place: its affine, voxel to mm in RAS.
        wanted: names of structures and their values. Where several overlap, the last counts. Empty: every segment by
            its number.

    Returns:
        H x W x D, values of ``wanted`` or numbers of segments; 0 elsewhere.

    Raises:
        DataError: a structure is missing, lies elsewhere than the image's voxels, or in another frame of reference; two
            segments that are taken by number overlap.
    """
    try:
        return _read(file, image, shape, place, wanted)
    except DataError:
        raise
    except Exception as error:  # pydicom raises anything on a broken file; the sentence keeps the cause
        raise DataError(unreadable(file, "a DICOM segmentation or structure set", error)) from error


def _read(
    file: Path, image: Path, shape: tuple[int, ...], place: NDArray[np.float64], wanted: dict[str, int]
) -> NDArray[np.int64]:
    import pydicom

    content = pydicom.dcmread(file)
    contours = content.SOPClassUID == CONTOURS
    known = _regions(content) if contours else _segments(content)
    chosen = _chosen(file, known, wanted) if wanted else [(each, each.number) for each in known if each.number]
    frame = _frame_of(image)
    found = np.zeros(shape, np.int64)
    for structure, value in chosen:
        if frame and structure.frame and structure.frame != frame:
            raise DataError(f"{file}: its frame of reference is another than that of {image.name}")
        draw = contoured if contours else segmented
        mask = draw(file, content, structure.number, structure.name, shape, place)
        if not wanted and (found[mask] > 0).any():
            raise DataError(f"{file}: its segments overlap; say with 'structures' which counts: the one named last")
        found[mask] = value
    return found


def _segments(content: Any) -> list[_Structure]:
    frame = str(content.get("FrameOfReferenceUID") or "")
    return [
        _Structure(int(each.SegmentNumber), str(each.SegmentLabel).strip(), frame)
        for each in content.get("SegmentSequence") or []
    ]


def _regions(content: Any) -> list[_Structure]:
    return [
        _Structure(int(each.ROINumber), str(each.ROIName).strip(), str(each.get("ReferencedFrameOfReferenceUID") or ""))
        for each in content.get("StructureSetROISequence") or []
    ]


def _chosen(file: Path, known: list[_Structure], wanted: dict[str, int]) -> list[tuple[_Structure, int]]:
    """The structures that are wanted, in the order in which they are; of each value one name at least must be there."""
    there = {each.name for each in known}
    for name, value in wanted.items():
        names = [other for other, also in wanted.items() if also == value]
        if not there & set(names):
            hint = meant(name, sorted(there)) or f"; it has: {', '.join(sorted(there)) or 'none'}"
            raise DataError(f"{file}: has no structure '{' or '.join(names)}'{hint}")
    return [(each, value) for name, value in wanted.items() for each in known if each.name == name]


def _frame_of(image: Path) -> str:
    """An image's frame of reference; empty where it has none, as in NIfTI."""
    import pydicom

    file = dicom_file(image)
    if image.is_dir() and file is None:
        file = next((path for path in sorted(image.iterdir()) if path.is_file() and path.name[0] != "."), None)
    if file is None:
        return ""
    return str(pydicom.dcmread(file, specific_tags=["FrameOfReferenceUID"]).get("FrameOfReferenceUID") or "")
