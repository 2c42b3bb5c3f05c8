# SPDX-License-Identifier: Apache-2.0
"""Is a folder one complete DICOM series? MONAI's reader would stack whatever lies there, in any distance, and warn."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError, unreadable
from medpfl.data.untrusted import check_values

LPS = np.diag([-1.0, -1.0, 1.0, 1.0])
"""DICOM's x and y point left and back, ours right and to the front."""
SEGMENTATIONS = ("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7")
"""SOP classes of segmentations: a bit or a share a segment, and a label map."""
CONTOURS = "1.2.840.10008.5.1.4.1.1.481.3"
"""SOP class of an RTSTRUCT."""
GREY = ("MONOCHROME1", "MONOCHROME2")
"""What a volume's pixels may be; MONAI's reader would take the colours of a slice for three slices, and the numbers of
a palette's entries for intensities."""
_NEEDED = (
    "InstanceNumber", "SeriesInstanceUID", "ImagePositionPatient", "ImageOrientationPatient",
    "PhotometricInterpretation", "Rows", "Columns", "PixelSpacing",
)  # fmt: skip


def dicom_file(path: Path) -> Path | None:
    """The one DICOM file that a path means: itself, by its suffix, or the only file of a folder."""
    if path.is_file():
        return path if path.suffix.lower() == ".dcm" else None
    files = _files(path) if path.is_dir() else []
    return files[0] if len(files) == 1 else None


def patient_of(path: Path) -> str:
    """The PatientID of a series' first file; "" where there is none, or the path is no DICOM.

    Raises:
        DataError: the file is one of those that are not read.
    """
    files = _files(path) if path.is_dir() else [path] if path.suffix.lower() == ".dcm" else []
    return str(check_size(files[:1])[0][1].get("PatientID") or "").strip() if files else ""


@dataclass(frozen=True)
class _Slice:
    """What a file of a series says of itself: ``place``, ``turned`` and ``spacing`` in mm, as DICOM has them."""

    file: Path
    series: str
    size: tuple[int, int]
    number: int
    place: NDArray[np.float64]
    turned: NDArray[np.float64]
    spacing: NDArray[np.float64]


def check_series(path: Path) -> list[Path]:
    """The files of one regular series of slices, from one end to the other.

    Args:
        path: their folder, or a file that is a slice alone.

    Raises:
        DataError: no slices, a file that is no DICOM or in colour, several series, missing tags, other sizes or
            directions, a missing or double slice.
    """
    files = [path] if path.is_file() else _files(path)
    if not files:
        raise DataError(f"{path}: the folder holds no DICOM files")
    slices = [_slice_of(file, header) for file, header in check_size(files)]
    first = slices[0]
    for one in slices[1:]:
        if one.series != first.series:
            raise DataError(f"{one.file}: belongs to another series than {first.file.name}; one folder, one series")
        if one.size != first.size:
            raise DataError(
                f"{one.file}: expected {first.size[0]} x {first.size[1]} pixels as in {first.file.name}, "
                f"got {one.size[0]} x {one.size[1]}"
            )
        for tag, found, other in (
            ("ImageOrientationPatient", one.turned, first.turned),
            ("PixelSpacing", one.spacing, first.spacing),
        ):
            if not np.allclose(found, other, atol=1e-3):
                raise DataError(f"{one.file}: its {tag} differs from that of {first.file.name}")
    normal = np.cross(first.turned[:3], first.turned[3:])
    # Scanners may number slices as they were taken, the odd ones first: only their places tell their order. The numbers
    # tell from which end it goes.
    slices.sort(key=lambda one: float(one.place @ normal))
    if slices[0].number > slices[-1].number:
        slices.reverse()
    steps = np.diff([one.place for one in slices], axis=0)
    lengths = np.linalg.norm(steps, axis=1)
    if len(steps) and lengths.min() < 1e-3:
        at = int(lengths.argmin())
        raise DataError(f"{slices[at + 1].file}: lies at the position of {slices[at].file.name}")
    if len(steps) and not np.allclose(steps, np.median(steps, axis=0), atol=0.1 * float(np.median(lengths))):
        at = int(np.abs(steps - np.median(steps, axis=0)).max(axis=1).argmax())
        raise DataError(
            f"{path}: slices are not evenly spaced: {lengths[at]:.3g} mm between {slices[at].file.name} and "
            f"{slices[at + 1].file.name}, elsewhere {np.median(lengths):.3g} mm"
        )
    return [one.file for one in slices]


def _slice_of(file: Path, header: Any) -> _Slice:
    try:
        if int(header.get("NumberOfFrames") or 1) > 1:
            raise DataError(
                f"{file}: holds several frames, so it is a volume itself; expected a slice, or no other file"
            )
        colours = header.get("PhotometricInterpretation", GREY[0])
        if colours not in GREY:
            raise DataError(f"{file}: expected grey pixels, got {colours}")
        for tag in _NEEDED:
            if header.get(tag) is None:
                raise DataError(f"{file}: the DICOM tag {tag} is missing, or the file ends before it")
        if header.get("ModalityLUTSequence"):
            raise DataError(f"{file}: its pixels are numbers of a table (ModalityLUTSequence), which is not read")
        return _Slice(
            file,
            str(header.SeriesInstanceUID),
            (int(header.Rows), int(header.Columns)),
            int(header.InstanceNumber),
            _numbers(file, header, "ImagePositionPatient", 3),
            _numbers(file, header, "ImageOrientationPatient", 6),
            _numbers(file, header, "PixelSpacing", 2),
        )
    except DataError:
        raise
    except Exception as error:  # pydicom raises anything on a broken header; the sentence keeps the cause
        raise DataError(unreadable(file, "DICOM", error)) from error


def check_size(files: Sequence[Path]) -> list[tuple[Path, Any]]:
    """The files' headers, read without the pixels.

    Raises:
        DataError: a file is no DICOM, its header is compressed (nothing says how large it would become), its pixels are
            compressed in a way that is not read, or they are too many.
    """
    import pydicom
    from pydicom.uid import DeflatedExplicitVRLittleEndian

    slices: list[tuple[Path, Any]] = []
    count = 0
    for file in files:
        try:
            syntax = pydicom.filereader.read_file_meta_info(file).get("TransferSyntaxUID")
            if syntax == DeflatedExplicitVRLittleEndian:
                raise DataError(f"{file}: its header is compressed (deflated), which is not read")
            if syntax and not _is_decoded(syntax):
                raise DataError(
                    f"{file}: its pixels are compressed as {syntax.name}, which is not read; decompress the files "
                    "beforehand, with DCMTK's dcmdjpeg or GDCM's gdcmconv --raw, say"
                )
            header = pydicom.dcmread(file, stop_before_pixels=True)
            per_pixel = int(header.get("NumberOfFrames") or 1) * int(header.get("SamplesPerPixel") or 1)
            stored, high = header.get("BitsStored"), header.get("HighBit")
            if stored is not None and high is not None and int(high) != int(stored) - 1:
                raise DataError(
                    f"{file}: its values do not stand in the lowest bits of a pixel (BitsStored {stored}, HighBit "
                    f"{high}), which is not read"
                )
            count += per_pixel * int(header.get("Rows") or 0) * int(header.get("Columns") or 0)
        except DataError:
            raise
        except Exception as error:  # pydicom raises anything on a broken file; the sentence keeps the cause
            raise DataError(unreadable(file, "DICOM", error)) from error
        slices.append((file, header))
    check_values(files[0], (count,))
    return slices


def _is_decoded(syntax: Any) -> bool:
    """Whether a transfer syntax is read by what is installed here; a private one is left to its reader."""
    from pydicom.pixels.decoders.base import get_decoder

    if not syntax.is_transfer_syntax or not syntax.is_encapsulated:
        return True
    try:
        return bool(get_decoder(syntax).is_available)
    except NotImplementedError:
        return False


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


def _numbers(file: Path, header: Any, tag: str, count: int) -> NDArray[np.float64]:
    found = np.array([float(value) for value in np.atleast_1d(header[tag].value)])
    if found.shape != (count,) or not np.isfinite(found).all():
        raise DataError(f"{file}: its DICOM tag {tag} does not hold {count} numbers")
    return found
