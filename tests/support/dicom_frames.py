# SPDX-License-Identifier: Apache-2.0
"""Enhanced (multi-frame) DICOM images as a scanner writes them: all slices in one file, their places in it."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import EnhancedCTImageStorage, ExplicitVRLittleEndian, generate_uid

from dicom_series import LPS


def write_frames(
    file: Path,
    values: NDArray[Any],
    affine: NDArray[np.float64],
    order: Sequence[int] = (),
    rescale: Sequence[tuple[float, float]] = (),
    change: Callable[[Any], None] = lambda header: None,
) -> Path:
    """One file; ``values``: i x j x k stored integers, ``affine``: RAS mm, ``order``: of the slices in the file (as
    they lie), ``rescale``: slope and intercept of each slice (1 and 0)."""
    file.parent.mkdir(parents=True, exist_ok=True)
    place = LPS @ affine
    lengths = np.linalg.norm(place[:3, :3], axis=0)
    depth = values.shape[2]
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = EnhancedCTImageStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
    header.SOPClassUID, header.SOPInstanceUID = EnhancedCTImageStorage, meta.MediaStorageSOPInstanceUID
    header.Modality, header.PatientID, header.PatientName = "CT", "anonymous", "Anonymous"
    header.StudyInstanceUID, header.SeriesInstanceUID = generate_uid(), generate_uid()
    header.FrameOfReferenceUID, header.InstanceNumber = generate_uid(), 1
    header.ImageType = ["ORIGINAL", "PRIMARY", "VOLUME", "NONE"]
    header.SamplesPerPixel, header.PhotometricInterpretation = 1, "MONOCHROME2"
    header.BitsAllocated = header.BitsStored = 16
    header.HighBit, header.PixelRepresentation, header.NumberOfFrames = 15, 1, depth
    measures, turned, shared = Dataset(), Dataset(), Dataset()
    measures.PixelSpacing = [float(lengths[1]), float(lengths[0])]
    measures.SliceThickness = measures.SpacingBetweenSlices = float(lengths[2])
    directions = [*(place[:3, 0] / lengths[0]), *(place[:3, 1] / lengths[1])]
    turned.ImageOrientationPatient = [float(f"{v:.12g}") for v in directions]
    shared.PixelMeasuresSequence, shared.PlaneOrientationSequence = Items([measures]), Items([turned])
    header.SharedFunctionalGroupsSequence = Items([shared])
    frames = []
    for number, k in enumerate(order or range(depth)):
        there, content, scale, frame = Dataset(), Dataset(), Dataset(), Dataset()
        there.ImagePositionPatient = [float(f"{v:.12g}") for v in place[:3, 3] + k * place[:3, 2]]
        content.DimensionIndexValues, content.StackID, content.InStackPositionNumber = [1, number + 1], "1", number + 1
        scale.RescaleSlope, scale.RescaleIntercept = rescale[k] if rescale else (1.0, 0.0)
        scale.RescaleType = "US"
        frame.PlanePositionSequence, frame.FrameContentSequence = Items([there]), Items([content])
        frame.PixelValueTransformationSequence = Items([scale])
        frames.append(frame)
    header.PerFrameFunctionalGroupsSequence = Items(frames)
    pixels = np.stack([values[:, :, k].T for k in (order or range(depth))]).astype(np.int16)
    header.Rows, header.Columns = pixels.shape[1:]
    header.PixelData = pixels.tobytes()
    change(header)
    header.save_as(file, enforce_file_format=True)
    return file
