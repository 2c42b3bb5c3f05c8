# SPDX-License-Identifier: Apache-2.0
"""DICOM series as a scanner writes them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian, generate_uid

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
    digits: int = 12,
) -> Path:
    """One DICOM file a slice, as a scanner writes them; ``values``: i x j x k stored integers, ``affine``: RAS mm;
    directions with so many digits."""
    folder.mkdir(parents=True)
    series, study, frame = generate_uid(), generate_uid(), generate_uid()
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
        header.StudyInstanceUID, header.SeriesInstanceUID, header.FrameOfReferenceUID = study, series, frame
        for empty in ("PatientName", "PatientBirthDate", "PatientSex", "StudyDate", "StudyTime", "StudyID"):
            setattr(header, empty, "")  # a file has these, if only empty
        header.AccessionNumber, header.ReferringPhysicianName, header.Manufacturer = "", "", ""
        header.InstanceNumber = k + 1
        header.ImagePositionPatient = [float(v) for v in place[:3, 3] + k * place[:3, 2]]
        directions = [*(place[:3, 0] / lengths[0]), *(place[:3, 1] / lengths[1])]
        header.ImageOrientationPatient = [float(f"{v:.{digits}g}") for v in directions]
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
