# SPDX-License-Identifier: Apache-2.0
"""Broken label maps in DICOM: segmentations (SEG) and structure sets (RTSTRUCT)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom

from broken_inputs.broken import Broken, Change, Group, cut, declared, listed, of_data
from dicom_labels import write_contours, write_seg
from dicom_series import affine_of, write_series
from hospitals import write_site

SEG, CONTOURS = "labels/p00.dcm", "labels/p03.dcm"
SQUARE = np.array([[0.6, 0.6, 2], [5.4, 0.6, 2], [5.4, 4.4, 2], [0.6, 4.4, 2]])


def write(folder: Path) -> None:
    """Five series: of two the label map is a segmentation, of three a structure set."""
    items = []
    for number in range(5):
        name, affine = f"p{number:02}", affine_of(0.1 * number)
        values = np.random.default_rng(number).integers(-900, 1500, (7, 9, 5))
        series, label = write_series(folder / "images" / name, values, affine), folder / "labels" / f"{name}.dcm"
        mask = np.zeros(values.shape, bool)
        mask[1:6, 1:5, 2] = True
        if number < 2:
            write_seg(label, series, {"Liver": mask})
        else:
            frame = str(pydicom.dcmread(next(series.iterdir())).FrameOfReferenceUID)
            write_contours(label, affine, {"Liver": [SQUARE], "BODY": []}, frame)
        items.append({"image": f"images/{name}", "label": f"labels/{name}.dcm", "patient": name})
    lists = {"training": items[:3], "validation": items[3:4], "test": items[4:]}
    (folder / "list.json").write_text(json.dumps(lists))
    organ = {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}
    write_site(folder, {"organ": {**organ, "structures": {"Liver": 1}}})


def within(name: str, change: Callable[[Any], object]) -> Change:
    """A label map's file is another."""

    def apply(folder: Path) -> None:
        header = pydicom.dcmread(folder / name)
        change(header)
        header.save_as(folder / name)

    return apply


def place(header: Any) -> Any:
    """Where a segmentation's first frame lies."""
    return header.PerFrameFunctionalGroupsSequence[0].PlanePositionSequence[0]


def points(change: Callable[[Any], Any]) -> Change:
    """The only contour has other points (x, y, z, x, y, z, ... in mm)."""

    def apply(header: Any) -> None:
        contour = header.ROIContourSequence[0].ContourSequence[0]
        contour.ContourData = change(np.array(contour.ContourData, float).reshape(-1, 3)).ravel().round(6).tolist()

    return within(CONTOURS, apply)


GROUPS = [
    Group(
        "DICOM segmentations and structure sets",
        write,
        of_data,
        [
            Broken("cut in the middle (SEG)", SEG, cut(SEG)),
            Broken("cut in the middle (RTSTRUCT)", CONTOURS, cut(CONTOURS)),
            Broken(
                "another frame of reference than the image",
                SEG,
                within(SEG, lambda h: setattr(h, "FrameOfReferenceUID", "1.2")),
            ),
            Broken(
                "pixels between the image's voxels",
                SEG,
                within(SEG, lambda h: setattr(place(h), "ImagePositionPatient", [12.7, -20.0, 0.5])),
            ),
            Broken(
                "a segment beside the image",
                SEG,
                within(SEG, lambda h: setattr(place(h), "ImagePositionPatient", [12.0, -20.0, 40.5])),
            ),
            Broken(
                "a segment of another name",
                SEG,
                within(SEG, lambda h: setattr(h.SegmentSequence[0], "SegmentLabel", "Livr")),
            ),
            Broken("a structure that is no label", "datasets.organ", declared(structures={"Liver": 2})),
            Broken("a contour between two slices", CONTOURS, points(lambda there: there + np.array([0, 0, 2]))),
            Broken("a contour beside the image", CONTOURS, points(lambda there: there + np.array([500, 0, 0]))),
            Broken(
                "contours that are points",
                CONTOURS,
                within(
                    CONTOURS,
                    lambda h: setattr(h.ROIContourSequence[0].ContourSequence[0], "ContourGeometricType", "POINT"),
                ),
            ),
            Broken("a segmentation as an image", SEG, listed("training", 0, image=SEG)),
        ],
    )
]
