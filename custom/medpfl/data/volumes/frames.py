# SPDX-License-Identifier: Apache-2.0
"""Multi-frame (enhanced) DICOM images: one file is a volume, and each frame says where it lies."""

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.volumes.dicom import CONTOURS, GREY, LPS, SEGMENTATIONS, check_size, dicom_file

SLACK = 0.1
"""Steps between slices may differ by so much of a step, as in a series."""
_GROUPS = (
    ("PlanePositionSequence", "ImagePositionPatient"),
    ("PlaneOrientationSequence", "ImageOrientationPatient"),
    ("PixelMeasuresSequence", "PixelSpacing"),
)


def frames_of(path: Path) -> tuple[Path, Any] | None:
    """The multi-frame file that a path means (itself, or the only file of a folder), and its header; else None.

    Raises:
        DataError: it is no DICOM, too large, or a segmentation or structure set.
    """
    file = dicom_file(path)
    if file is None:
        return None
    header = check_size([file])[0][1]
    if (kind := header.get("SOPClassUID")) in (*SEGMENTATIONS, CONTOURS):
        found = "structure set" if kind == CONTOURS else "segmentation"
        raise DataError(f"{file}: expected an image, got a DICOM {found}, which is read as a label map only")
    several = int(header.get("NumberOfFrames") or 1) > 1 or "PerFrameFunctionalGroupsSequence" in header
    return (file, header) if several else None


def read_frames(file: Path, header: Any) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """CHWD values, each frame rescaled by its own slope and intercept, sorted along the normal of rows and columns; and
    the affine, voxel to mm in RAS.

    Raises:
        DataError: highdicom is not installed; the frames are in colour, say not where they lie, are several at one
            place, turned differently, or unevenly spaced.
        Exception: the file cannot be read, whatever highdicom raises.
    """
    highdicom = needed(file)
    _check_frames(file, header)
    image = highdicom.Image.from_dataset(_content(file), copy=False)
    # Slope and intercept alone, as in a series: neither a window nor an inverted display.
    plain = {"apply_real_world_transform": False, "apply_presentation_lut": False}
    volume = image.get_volume(rtol=SLACK, **plain)
    values = volume.array.transpose(2, 1, 0)[..., ::-1].astype(np.float32)[None]
    affine = volume.affine[:, [2, 1, 0, 3]]
    affine[:3, 3] += affine[:3, 2] * (values.shape[3] - 1)  # highdicom counts against the normal, others along it
    affine[:3, 2] *= -1
    return np.ascontiguousarray(values), LPS @ affine


def _content(file: Path) -> Any:
    """The file, with nothing but the value in the bits of each pixel. highdicom takes all bits that are allocated: the
    upper 4 of 16, where 12 are stored, may hold an overlay, or zeros where a value is below zero."""
    import pydicom

    content = pydicom.dcmread(file)
    syntax = content.file_meta.TransferSyntaxUID
    stored = content.get("BitsStored")  # which floating-point pixels do not have
    if stored is not None and int(stored) < int(content.BitsAllocated) and not syntax.is_encapsulated:
        values = content.pixel_array
        content.PixelData = values.astype(values.dtype.newbyteorder("<" if syntax.is_little_endian else ">")).tobytes()
    return content


def needed(file: Path) -> ModuleType:
    """highdicom.

    Raises:
        DataError: it is not installed.
    """
    try:
        import highdicom
    except ImportError as error:
        raise DataError(f"{file}: files of this kind are read by highdicom: pip install 'medpfl[dicom]'") from error
    module: ModuleType = highdicom
    return module


def _check_frames(file: Path, header: Any) -> None:
    """Whether the functional groups tell one regular volume; the library's own words would be of its insides."""
    colours = header.get("PhotometricInterpretation")
    if colours not in GREY:
        raise DataError(f"{file}: expected grey frames, got {colours}")
    frames = header.get("PerFrameFunctionalGroupsSequence") or []
    shared = (header.get("SharedFunctionalGroupsSequence") or [{}])[0]
    count = int(header.get("NumberOfFrames") or 1)
    if len(frames) != count:
        told = f"its functional groups are of {len(frames)}" if frames else "nothing says where they lie"
        raise DataError(f"{file}: it has {count} frames, and {told}")
    found: dict[str, list[list[float]]] = {tag: [] for _, tag in _GROUPS}
    for number, frame in enumerate(frames, start=1):
        for group, tag in _GROUPS:
            there = (frame.get(group) or shared.get(group) or [{}])[0]
            if there.get(tag) is None:
                raise DataError(f"{file}: frame {number} lacks {tag} in its functional groups")
            found[tag].append([float(value) for value in there.get(tag)])
    for tag in ("ImageOrientationPatient", "PixelSpacing"):
        if not np.allclose(found[tag], found[tag][0], atol=1e-3):
            raise DataError(f"{file}: {tag} is not the same in all frames; expected one volume")
    along = np.cross(found["ImageOrientationPatient"][0][:3], found["ImageOrientationPatient"][0][3:])
    steps = np.diff(np.sort(np.array(found["ImagePositionPatient"]) @ along))
    if len(steps) and steps.min() < 1e-3:
        raise DataError(
            f"{file}: several of its frames lie at one position (other times, echoes or weights); expected one volume"
        )
    if len(steps) and not np.allclose(steps, np.median(steps), atol=SLACK * float(np.median(steps))):
        farthest = float(steps[np.abs(steps - np.median(steps)).argmax()])
        raise DataError(
            f"{file}: its frames are not evenly spaced: {farthest:.3g} mm between two of them, elsewhere "
            f"{np.median(steps):.3g} mm"
        )
