# SPDX-License-Identifier: Apache-2.0
"""Is a folder one complete DICOM series? MONAI's reader would stack whatever lies there, in any distance, and warn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from medpfl.core.errors import DataError, unreadable
from medpfl.data.untrusted import check_values

LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""DICOM's x and y point left and back, ours right and to the front."""
SEGMENTATIONS = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")
"""SOP classes of segmentations: a bit or a share a segment, and a label map."""


def dicom_file(path: Path) -> Path | None:
    """The one DICOM file that a path means: itself, by its suffix, or the only file of a folder."""
    if path.is_file():
        return path if path.suffix.lower() == ".dcm" else None
    files = _files(path) if path.is_dir() else []
    return files[0] if len(files) == 1 else None


def check_series(folder: Path) -> list[Path]:
    """The files of a folder that is one regular series of slices, from one end to the other.

    Raises:
        DataError: no slices, a file that is no DICOM, several series, missing tags, other sizes or directions, a
            missing or double slice.
    """
    files = _files(folder)
    if not files:
        raise DataError(f"{folder}: the folder holds no DICOM files")
    slices = check_size(files)
    for file, header in slices:
        if int(header.get("NumberOfFrames") or 1) > 1:
            raise DataError(
                f"{file}: holds several frames, so it is a volume itself; expected a slice, or no other file"
            )
        for tag in ("InstanceNumber", "ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "Rows"):
            if header.get(tag) is None:
                raise DataError(f"{file}: the DICOM tag {tag} is missing, or the file ends before it")
        if header.get("ModalityLUTSequence"):
            raise DataError(f"{file}: its pixels are numbers of a table (ModalityLUTSequence), which is not read")
    first_file, first = slices[0]
    for file, header in slices[1:]:
        if header.SeriesInstanceUID != first.SeriesInstanceUID:
            raise DataError(f"{file}: belongs to another series than {first_file.name}; one folder, one series")
        if (header.Rows, header.Columns) != (first.Rows, first.Columns):
            raise DataError(
                f"{file}: expected {first.Rows} x {first.Columns} pixels as in {first_file.name}, "
                f"got {header.Rows} x {header.Columns}"
            )
        for tag, slack in (("ImageOrientationPatient", 1e-3), ("PixelSpacing", 1e-3)):
            if not np.allclose(_numbers(header, tag), _numbers(first, tag), atol=slack):
                raise DataError(f"{file}: its {tag} differs from that of {first_file.name}")
    turned = _numbers(first, "ImageOrientationPatient")
    normal = np.cross(turned[:3], turned[3:])

    def order(entry: tuple[Path, Any]) -> tuple[int, float]:
        """Where all slices have one number, as some software writes them, only their places tell."""
        return int(entry[1].InstanceNumber), float(_numbers(entry[1], "ImagePositionPatient") @ normal)

    slices.sort(key=order)
    positions = np.array([_numbers(header, "ImagePositionPatient") for _, header in slices])
    steps = np.diff(positions, axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    if len(steps) and lengths.min() < 1e-3:
        place = int(lengths.argmin())
        raise DataError(f"{slices[place + 1][0]}: lies at the position of {slices[place][0].name}")
    if len(steps) and not np.allclose(steps, np.median(steps, axis=0), atol=0.1 * float(np.median(lengths))):
        place = int(np.abs(steps - np.median(steps, axis=0)).max(axis=1).argmax())
        raise DataError(
            f"{folder}: slices are not evenly spaced: {lengths[place]:.3g} mm between {slices[place][0].name} and "
            f"{slices[place + 1][0].name}, elsewhere {np.median(lengths):.3g} mm"
        )
    return [file for file, _ in slices]


def check_size(files: Sequence[Path]) -> list[tuple[Path, Any]]:
    """The files' headers, read without the pixels.

    Raises:
        DataError: a file is no DICOM, its header is compressed (nothing says how large it would become), or the pixels
            are too many.
    """
    import pydicom
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    slices: list[tuple[Path, Any]] = []
    count = 0
    for file in files:
        try:
            if pydicom.filereader.read_file_meta_info(file).get("TransferSyntaxUID") == DeflatedExplicitVRLittleEndian:
                raise DataError(f"{file}: its header is compressed (deflated), which is not read")
            header = pydicom.dcmread(file, stop_before_pixels=True)
            per_pixel = int(header.get("NumberOfFrames") or 1) * int(header.get("SamplesPerPixel") or 1)
            count += per_pixel * int(header.get("Rows") or 0) * int(header.get("Columns") or 0)
        except DataError:
            raise
        except Exception as error:  # pydicom raises anything on a broken file; the sentence keeps the cause
            raise DataError(unreadable(file, "DICOM", error)) from error
        slices.append((file, header))
    check_values(files[0], (count,))
    return slices


def geometry_tags(header: Any) -> dict[str, dict[str, list[float]]]:
    """Where a slice lies, in the form in which MONAI's reader wants it: by tag, in DICOM's JSON.

    MONAI's own way there is pydicom's ``to_json_dict``. That leaves out every number of more than 16 characters, which
    much software writes, so that the slice would lie nowhere; and it changes a setting of the whole process while it
    works, by which a thread that reads another file at that moment refuses it.
    """
    tags = {tag: header.get(tag) for tag in ("ImageOrientationPatient", "ImagePositionPatient", "PixelSpacing")}
    codes = dict(zip(tags, ("00200037", "00200032", "00280030"), strict=True))
    return {
        codes[tag]: {"Value": [float(value) for value in found]} for tag, found in tags.items() if found is not None
    }


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and not path.name.startswith("."))


def _numbers(header: Any, tag: str) -> list[float]:
    return [float(value) for value in header[tag].value]
