# SPDX-License-Identifier: Apache-2.0
"""A segmentation as DICOM-SEG, for the archives and viewers that have the series it is of."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl import __version__
from medpfl.core.errors import DataError
from medpfl.data.volumes.dicom import LPS
from medpfl.data.volumes.frames import frames_of, needed

_LONGEST = 64
"""Characters of a segment's label."""


def is_dicom(source: Path) -> bool:
    """Whether a volume is a DICOM series or a multi-frame DICOM file."""
    return source.is_dir() or source.suffix.lower() == ".dcm"


def write_segments(
    file: Path, source: Path, classes: NDArray[Any], affine: NDArray[np.float64], names: list[str]
) -> None:
    """Write a BINARY segmentation that refers to its series, with a segment for every class but the first, whole or not
    at all. It holds what the series says of the patient.

    Args:
        source: the volume, a series' folder or a multi-frame file.
        classes: H x W x D, indices of ``names``, on the voxels of the volume as it was read.
        affine: the volume's, voxel to mm in RAS.
        names: of the classes.

    Raises:
        DataError: highdicom is not installed, or the series lacks what a segmentation must repeat of it.
    """
    needed(source)
    images, positions = _source(source)
    to_voxels = np.linalg.inv(LPS @ affine)
    heights = (to_voxels @ np.c_[positions, np.ones(len(positions))].T)[2].round().astype(int)
    frames = classes.transpose(2, 1, 0)[heights]
    pixels = np.stack([frames == value for value in range(1, len(names))], axis=-1).astype(np.uint8)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one of them repeats the patient's name
            made = _segmentation(images, pixels, names)
    except (AttributeError, KeyError, ValueError, TypeError) as error:  # by what the series lacks
        words = " ".join(str(error).split())[:160]
        raise DataError(f"{source}: no DICOM-SEG can be written for it: it is no complete DICOM ({words})") from error
    temporary = file.with_name(f".{file.name}.part")
    made.save_as(temporary)
    temporary.replace(file)


def _segmentation(images: list[Any], pixels: NDArray[np.uint8], names: list[str]) -> Any:
    import highdicom as hd
    from pydicom.sr.codedict import codes

    by = hd.AlgorithmIdentificationSequence("MedPFL", codes.DCM.ArtificialIntelligence, __version__)
    what = codes.SCT.AnatomicalStructure  # all that is known of a class is its name
    described = [
        hd.seg.SegmentDescription(number, name[:_LONGEST], what, what, "AUTOMATIC", by)
        for number, name in enumerate(names[1:], start=1)
    ]
    return hd.seg.Segmentation(
        source_images=images,
        pixel_array=pixels,
        segmentation_type="BINARY",
        segment_descriptions=described,
        series_instance_uid=hd.UID(),
        series_number=1000,
        sop_instance_uid=hd.UID(),
        instance_number=1,
        manufacturer="MedPFL",
        manufacturer_model_name="medpfl predict",
        software_versions=__version__,
        device_serial_number="1",
        series_description="Segmentation by a model; not for diagnosis",
    )


def _source(source: Path) -> tuple[list[Any], NDArray[np.float64]]:
    """The images of a volume, and where each slice's first pixel lies, n x 3 mm in LPS."""
    import pydicom

    if found := frames_of(source):
        image = pydicom.dcmread(found[0])
        frames = image.PerFrameFunctionalGroupsSequence
        for frame in frames:  # the place of a single one may stand with what all share, where highdicom does not look
            if "PlanePositionSequence" not in frame:
                frame.PlanePositionSequence = image.SharedFunctionalGroupsSequence[0].PlanePositionSequence
        return [image], np.array([_position(frame.PlanePositionSequence[0]) for frame in frames])
    files = [path for path in sorted(source.iterdir()) if path.is_file() and not path.name.startswith(".")]
    images = [pydicom.dcmread(file) for file in files]
    return images, np.array([_position(image) for image in images])


def _position(there: Any) -> list[float]:
    return [float(value) for value in there.ImagePositionPatient]
