# SPDX-License-Identifier: Apache-2.0
"""Broken volumes: NIfTI, NRRD, MetaImage and DICOM, their label maps and their lists."""

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import SimpleITK as sitk

from broken_inputs.broken import (
    Broken,
    Change,
    Group,
    cut,
    cut_inside,
    declared,
    holding,
    listed,
    of_data,
    replaced,
    without,
)
from dicom_frames import write_frames
from dicom_series import write_series
from hospitals import AFFINE, SHAPE, change_json, save, scan, write_site

NIFTI, NRRD, MHA, MHD, DICOM = "images/p00.nii.gz", "images/p01.nrrd", "images/p02.mha", "images/p03.mhd", "images/p04"
FRAMES = "images/p05.dcm"
LABEL = "labels/p00.nii.gz"


def write(folder: Path) -> None:
    """Six cases in six formats, with label maps in NIfTI and a datalist."""
    places = [NIFTI, NRRD, MHA, MHD, DICOM, FRAMES]
    items = []
    for number, name in enumerate(places):
        values, label = scan(number)
        volume = save(folder / "images" / f"p{number:02}.nii.gz", values)
        save(folder / "labels" / f"p{number:02}.nii.gz", label)
        if name == DICOM:
            write_series(folder / name, values.astype(np.int16), AFFINE)
        elif name == FRAMES:
            write_frames(folder / name, values.astype(np.int16), AFFINE)
        elif not name.endswith(".nii.gz"):
            sitk.WriteImage(as_itk(values), str(folder / name))
        if not name.endswith(".nii.gz"):
            volume.unlink()
        items.append({"image": name, "label": f"labels/p{number:02}.nii.gz", "patient": f"p{number:02}"})
    lists = {"training": items[:4], "validation": items[4:5], "test": items[5:]}
    (folder / "list.json").write_text(json.dumps(lists))
    labels = {0: "background", 1: "organ"}
    write_site(folder, {"organ": {"kind": "volumes", "datalist": "list.json", "labels": labels}})


def as_itk(values: Any) -> Any:
    """A volume in the geometry of ``AFFINE``; ITK's x and y point left and back."""
    image = sitk.GetImageFromArray(values.transpose(2, 1, 0))
    image.SetSpacing([2.0, 2.0, 4.0])
    image.SetDirection([-1.0, 0, 0, 0, -1.0, 0, 0, 0, 1.0])
    return image


def image(values: Any, affine: Any = AFFINE, name: str = NIFTI) -> Change:
    return lambda folder: save(folder / name, values, affine)


def flat_header(folder: Path) -> None:
    """No thickness in the affine (srow_z, from byte 312) nor in pixdim (from byte 76); nibabel would not write it."""
    data = bytearray(gzip.decompress((folder / NIFTI).read_bytes()))
    assert np.frombuffer(data, "<f4", 4, 312).tolist() == [0, 0, 4, 0]
    data[312:328], data[88:92] = bytes(16), bytes(4)
    (folder / NIFTI).write_bytes(gzip.compress(data))


def slice_of(change: Callable[[Any], object], number: int = 2) -> Change:
    """One slice of the DICOM series is another; it is found by its number, for files have another order."""

    def apply(folder: Path) -> None:
        for file in sorted((folder / DICOM).iterdir()):
            header = pydicom.dcmread(file)
            if header.InstanceNumber == number + 1:
                change(header)
                header.save_as(file)

    return apply


def frames(change: Callable[[Any], object]) -> Change:
    """The multi-frame DICOM file is another."""

    def apply(folder: Path) -> None:
        header = pydicom.dcmread(folder / FRAMES)
        change(header)
        header.save_as(folder / FRAMES)

    return apply


def at(header: Any, number: int) -> Any:
    """Where a frame lies."""
    return header.PerFrameFunctionalGroupsSequence[number].PlanePositionSequence[0]


def larger(header: Any) -> None:
    header.Rows, header.PixelData = header.Rows * 2, header.PixelData * 2


def copied(folder: Path) -> None:
    """One patient's volume and label map once more, as another patient's of another split."""
    shutil.copy(folder / NIFTI, folder / "images/p05.nii.gz")
    listed("test", 0, image="images/p05.nii.gz")(folder)
    shutil.copy(folder / LABEL, folder / "labels/p05.nii.gz")


def one_slice(folder: Path) -> Path:
    return sorted((folder / DICOM).iterdir())[0]


def with_nan() -> Any:
    values = scan(0)[0]
    values[0, 0, 0] = np.nan
    return values


SHIFTED = AFFINE.copy()
SHIFTED[0, 3] = 30.0
GROUPS = [
    Group(
        "Lists of volumes",
        write,
        of_data,
        [
            Broken("there is none", "list.json", without("list.json")),
            Broken("not JSON", "list.json", holding("list.json", "{")),
            Broken("no training cases", "list.json", holding("list.json", "{}")),
            Broken("an entry without an image", "list.json: training[1]", listed("training", 1, image=None)),
            Broken("an entry without a label map", "list.json: training[1]", listed("training", 1, label=None)),
            Broken("a volume that is not there", "images/x.nii.gz", listed("training", 1, image="images/x.nii.gz")),
            Broken(
                "test cases that are no list",
                "list.json",
                lambda f: change_json(f / "list.json", lambda c: c.update(test=3)),
            ),
            Broken(
                "cases in a list of another name",
                "list.json",
                lambda f: change_json(f / "list.json", lambda c: c.update(val=c["training"][:1])),
            ),
            Broken("no test cases", "list.json", lambda f: change_json(f / "list.json", lambda c: c.update(test=[]))),
            Broken("one patient in two splits", "test[0]", listed("test", 0, patient="p00")),
            Broken("one volume in two splits", "test[0]", copied),
            Broken("one case with two channels", "list.json: training[0]", listed("training", 0, image=[NIFTI, NIFTI])),
        ],
    ),
    Group(
        "NIfTI volumes",
        write,
        of_data,
        [
            Broken("empty", NIFTI, holding(NIFTI, "")),
            Broken("a text", NIFTI, holding(NIFTI, "hello")),
            Broken("cut in the middle", NIFTI, cut(NIFTI)),
            Broken("a sound .gz of a volume that ends too early", NIFTI, cut_inside(NIFTI)),
            Broken("values that are not finite", NIFTI, image(with_nan())),
            Broken("two axes", NIFTI, image(np.ones((8, 10), np.float32))),
            Broken("no thickness of its slices", NIFTI, flat_header),
        ],
    ),
    Group(
        "Label maps",
        write,
        of_data,
        [
            Broken("labels with a gap", "datasets.organ", declared(labels={0: "a", 2: "b"})),
            Broken("a single label", "datasets.organ.labels", declared(labels={0: "a"})),
            Broken("a value that becomes no label", "datasets.organ", declared(label_map={255: 7})),
            Broken("a value that is not declared", LABEL, image(np.full(SHAPE, 3, np.uint8), name=LABEL)),
            Broken("a fraction", LABEL, image(np.full(SHAPE, 0.5, np.float32), name=LABEL)),
            Broken("another shape than the volume", LABEL, image(np.ones((8, 10, 7), np.uint8), name=LABEL)),
            Broken("beside the volume", LABEL, image(scan(0)[1], SHIFTED, LABEL)),
            Broken("cut in the middle", LABEL, cut(LABEL)),
        ],
    ),
    Group(
        "NRRD and MetaImage volumes",
        write,
        of_data,
        [
            Broken("NRRD that is a text", NRRD, holding(NRRD, "hello")),
            Broken("NRRD cut in the middle", NRRD, cut(NRRD)),
            Broken(
                "NRRD with its voxels elsewhere",
                NRRD,
                holding(NRRD, "NRRD0004\ntype: short\ndata file: /etc/hosts\n\n"),
            ),
            Broken("MHA cut in the middle", MHA, cut(MHA)),
            Broken("MHD whose voxels are not there", MHD, without("images/p03.raw")),
            Broken("MHD with its voxels elsewhere", MHD, replaced(MHD, "p03.raw", "../p03.raw")),
        ],
    ),
    Group(
        "DICOM series",
        write,
        of_data,
        [
            Broken("a folder without files", DICOM, lambda f: [file.unlink() for file in (f / DICOM).iterdir()]),
            Broken("a file that is no DICOM", DICOM, lambda f: one_slice(f).write_text("notes")),
            Broken(
                "a slice cut in the middle", DICOM, lambda f: one_slice(f).write_bytes(one_slice(f).read_bytes()[:700])
            ),
            Broken("a slice without its position", DICOM, slice_of(lambda h: delattr(h, "ImagePositionPatient"))),
            Broken("slices of two series", DICOM, slice_of(lambda h: setattr(h, "SeriesInstanceUID", "1.2.3"))),
            Broken("a slice of another size", DICOM, slice_of(larger)),
            Broken(
                "a gap between slices",
                DICOM,
                slice_of(lambda h: setattr(h, "ImagePositionPatient", [*h.ImagePositionPatient[:2], 99.0]), 5),
            ),
        ],
    ),
    Group(
        "Multi-frame DICOM",
        write,
        of_data,
        [
            Broken("cut in the middle", FRAMES, cut(FRAMES)),
            Broken(
                "frames without functional groups",
                FRAMES,
                frames(lambda h: delattr(h, "PerFrameFunctionalGroupsSequence")),
            ),
            Broken("a frame without its position", FRAMES, frames(lambda h: delattr(at(h, 3), "ImagePositionPatient"))),
            Broken(
                "two frames at one position",
                FRAMES,
                frames(lambda h: setattr(at(h, 3), "ImagePositionPatient", at(h, 2).ImagePositionPatient)),
            ),
            Broken(
                "a gap between frames",
                FRAMES,
                frames(lambda h: setattr(at(h, 5), "ImagePositionPatient", [*at(h, 5).ImagePositionPatient[:2], 99.0])),
            ),
            Broken(
                "frames in colour", FRAMES, frames(lambda h: setattr(h, "PhotometricInterpretation", "PALETTE COLOR"))
            ),
        ],
    ),
]
