# SPDX-License-Identifier: Apache-2.0
"""NRRD and MetaImage (MHA, MHD) files, read by SimpleITK: the header first, the voxels once their number is known."""

import math
import re
import zlib
from mmap import ACCESS_READ, mmap
from pathlib import Path
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError, unreadable
from medpfl.data.untrusted import check_held, check_values
from medpfl.data.volumes.checksums import check_sum

ITK = (".nrrd", ".mha", ".mhd")
_HEADER = 2**20
"""Bytes of a header, at most."""
_ELSEWHERE = b"ElementDataFile"
"""MetaImage's key for where the voxels are; its reader takes no other letters for it."""
_NO_MILLIMETRES = re.compile(r"[nuµμcd]?m|microns?|(nano|micro|centi)?met(er|re)s?|inch(es)?", re.IGNORECASE)
_UNITS_NRRD = re.compile(r"^(?:space )?units:(.*)$", re.IGNORECASE | re.MULTILINE)
_UNITS_META = re.compile(r"^DistanceUnits\s*=(.*)$", re.MULTILINE)
_VOXEL_NRRD = re.compile(r"^(?:spacings|space directions):(.*)$", re.IGNORECASE | re.MULTILINE)
_VOXEL_META = re.compile(r"^Element(?:Spacing|Size)\s*=(.*)$", re.MULTILINE)
_LENGTH = re.compile(r"\([^()]*\)|[-+.\d][-+.\de]*", re.IGNORECASE)
"""A direction of an axis, or a spacing; neither "none" nor "nan"."""


def is_itk(file: Path) -> bool:
    """Whether a file is one of these, by its name."""
    return file.suffix.lower() in ITK


def read_itk(file: Path) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """CHWD values and the affine, voxel to mm in RAS.

    Raises:
        DataError: SimpleITK is not installed; the header names a file that does not lie beside it, more values than are
            read, or no volume; or the file is broken.
    """
    try:
        import SimpleITK as sitk
    except ImportError as error:
        raise DataError(f"{file}: files of this kind are read by SimpleITK: pip install 'medpfl[imaging]'") from error
    _check_data_file(file)
    try:
        return _read(sitk, file)
    except RuntimeError as error:  # its words are lines of C++
        beside = ", or the file of its voxels is not beside it" if file.suffix.lower() == ".mhd" else ""
        raise DataError(unreadable(file, f"an image ({file.suffix[1:].upper()})") + beside) from error


def _read(sitk: ModuleType, file: Path) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    reader = sitk.ImageFileReader()
    reader.SetImageIO("NrrdImageIO" if file.suffix.lower() == ".nrrd" else "MetaImageIO")
    reader.SetFileName(str(file))
    reader.ReadImageInformation()
    size, channels = reader.GetSize(), reader.GetNumberOfComponents()
    if len(size) != 3:
        raise DataError(f"{file}: expected a volume with 3 axes, got {len(size)}")
    check_values(file, (*size, channels))
    if _in_itself(file):
        one = sitk.Image([1, 1, 1], reader.GetPixelID(), channels).GetSizeOfPixelComponent()
        check_held(file, one * math.prod(size) * channels, file.stat().st_size)
        try:
            check_sum(file, one * math.prod(size) * channels)
        except (zlib.error, EOFError) as error:
            raise DataError(unreadable(file, f"an image ({file.suffix[1:].upper()})", error)) from error
    image = reader.Execute()
    _check_lengths(file)
    values = sitk.GetArrayFromImage(image).astype(np.float32)  # D x W x H [x C], the axes in the other order
    moved = values.transpose(2, 1, 0)[None] if channels == 1 else values.transpose(3, 2, 1, 0)
    affine = np.eye(4)
    affine[:3, :3] = np.array(image.GetDirection()).reshape(3, 3) * np.array(image.GetSpacing())
    affine[:3, 3] = image.GetOrigin()
    return np.ascontiguousarray(moved), np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine  # ITK's x and y point left and back


def _check_lengths(file: Path) -> None:
    """Refuse a header that gives lengths in another unit than mm, or does not say how large a voxel is: the reader does
    not look at the unit, and takes 1 mm for what is not there.

    Raises:
        DataError: with what the header says.
    """
    with file.open("rb") as opened:
        text = opened.read(_HEADER).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    nrrd = file.suffix.lower() == ".nrrd"
    header = text.partition(b"\n\n" if nrrd else _ELSEWHERE)[0].decode("utf-8", "replace")
    units = _UNITS_NRRD.findall(header) if nrrd else _UNITS_META.findall(header)
    for unit in (one.strip() for line in units for one in (line.split('"') if nrrd else [line])):
        if _NO_MILLIMETRES.fullmatch(unit):
            raise DataError(f"{file}: expected lengths in millimetres, its header says {unit}")
    found = (_VOXEL_NRRD if nrrd else _VOXEL_META).findall(header)
    if not any(len(_LENGTH.findall(line)) >= 3 for line in found):
        raise DataError(f"{file}: its header does not say how large a voxel is")


def _in_itself(file: Path) -> bool:
    """Whether the voxels lie behind the header."""
    return file.suffix.lower() != ".mhd"


def _check_data_file(file: Path) -> None:
    """Refuse a header that fetches its voxels from elsewhere on the machine, however it says so: what the readers of
    these formats skip and what ends a line for them is not what one would think."""
    if file.suffix.lower() == ".nrrd":
        _check_nrrd(file)
    elif file.stat().st_size:  # what is empty cannot be mapped, and is none
        with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as text:
            _check_meta(file, text)


def _check_nrrd(file: Path) -> None:
    with file.open("rb") as opened:
        text = opened.read(_HEADER)
    header, end, _ = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n").partition(b"\n\n")
    if not end and len(text) == _HEADER:
        raise DataError(f"{file}: its header has more than {_HEADER} bytes, which are not read")
    if re.search(rb"^\s*data\s*file\s*:", header, re.IGNORECASE | re.MULTILINE):
        raise DataError(f"{file}: its voxels are in another file, which is not read; write both into one .nrrd file")


def _check_meta(file: Path, text: mmap) -> None:
    """The key must stand in the file once, whatever else does: which of several counts depends on what is before them,
    on their letters and on the sign behind them."""
    at = text.find(_ELSEWHERE)
    if at >= 0 and text.find(_ELSEWHERE, at + 1) >= 0:
        raise DataError(f"{file}: it says more than once where its voxels are ({_ELSEWHERE.decode()})")
    behind = text[at + len(_ELSEWHERE) : at + _HEADER] if at >= 0 else b""
    found = re.match(rb"[ \t]*=[ \t]*([^\r\n]*?)[ \t]*(?:\r?\n|\Z)", behind)
    name = found[1].decode("utf-8", "replace") if found else ""
    local = name.upper() == "LOCAL"
    if not local and (not re.fullmatch(r"[\w.\- ]+", name) or name.startswith(".") or name.upper().startswith("LIST")):
        raise DataError(f"{file}: its voxels must be in the file itself or in one file beside it, got '{name[:80]}'")
