# SPDX-License-Identifier: Apache-2.0
"""Label maps in DICOM: segmentations as highdicom writes them, and structure sets."""

from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from numpy.typing import NDArray
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.sequence import Sequence as Items
from pydicom.uid import ExplicitVRLittleEndian, RTStructureSetStorage, generate_uid

from dicom_series import LPS


def write_seg(file: Path, series: Path, masks: dict[str, NDArray[Any]], kind: str = "BINARY", whole: int = 255) -> Path:
    """A SEG of a series without empty frames; ``masks``: name to i x j x k, with k as the slices' instance numbers;
    ``whole``: of shares, the number that stands for 1."""
    import highdicom as hd
    from pydicom.sr.codedict import codes

    slices = sorted((pydicom.dcmread(each) for each in series.iterdir()), key=lambda header: int(header.InstanceNumber))
    described = [
        hd.seg.SegmentDescription(number, name, codes.SCT.Organ, codes.SCT.Organ, "MANUAL")
        for number, name in enumerate(masks, start=1)
    ]
    pixels = np.stack([mask.transpose(2, 1, 0) for mask in masks.values()], axis=-1)
    if kind == "LABELMAP":
        pixels = (pixels * np.arange(1, pixels.shape[-1] + 1)).max(axis=-1)
    pixels = pixels.astype(np.float32 if kind == "FRACTIONAL" else np.uint8)
    one = hd.seg.Segmentation(
        slices, pixels, kind, described, hd.UID(), 9, hd.UID(), 1, "Maker", "Model", "1", "1", omit_empty_frames=True,
        max_fractional_value=whole,
    )  # fmt: skip
    file.parent.mkdir(parents=True, exist_ok=True)
    one.save_as(file)
    return file


def write_contours(
    file: Path, affine: NDArray[np.float64], regions: dict[str, list[Any]], frame: str = "", kind: str = "CLOSED_PLANAR"
) -> Path:
    """An RTSTRUCT; ``regions``: name to contours of points n x 3 in voxels of ``affine`` (RAS mm)."""
    meta = FileMetaDataset()
    meta.MediaStorageSOPClassUID, meta.MediaStorageSOPInstanceUID = RTStructureSetStorage, generate_uid()
    meta.TransferSyntaxUID = ExplicitVRLittleEndian
    header = FileDataset(None, {}, file_meta=meta, preamble=b"\0" * 128)
    header.SOPClassUID, header.SOPInstanceUID = RTStructureSetStorage, meta.MediaStorageSOPInstanceUID
    header.Modality, header.PatientID, header.StructureSetLabel = "RTSTRUCT", "anonymous", "one"
    header.StudyInstanceUID, header.SeriesInstanceUID = generate_uid(), generate_uid()
    named, drawn = [], []
    for number, (name, contours) in enumerate(regions.items(), start=1):
        region, roi, items = Dataset(), Dataset(), []
        region.ROINumber, region.ROIName, region.ROIGenerationAlgorithm = number, name, "MANUAL"
        region.ReferencedFrameOfReferenceUID = frame or generate_uid()
        for points in contours:
            contour = Dataset()
            world = np.c_[np.asarray(points, float), np.ones(len(points))] @ (LPS @ affine).T
            contour.ContourGeometricType, contour.NumberOfContourPoints = kind, len(points)
            contour.ContourData = [float(f"{v:.10g}") for v in world[:, :3].ravel()]
            items.append(contour)
        roi.ReferencedROINumber, roi.ContourSequence = number, Items(items)
        named.append(region)
        drawn.append(roi)
    header.StructureSetROISequence, header.ROIContourSequence = Items(named), Items(drawn)
    file.parent.mkdir(parents=True, exist_ok=True)
    header.save_as(file, enforce_file_format=True)
    return file
