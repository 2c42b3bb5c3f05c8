# SPDX-License-Identifier: Apache-2.0
"""Folders of new cases as hospitals have them: no case is left out, hidden, or written over another one's."""

import csv
import json
import os
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from PIL import Image
from pydantic import JsonValue

from dicom_frames import write_frames
from dicom_series import affine_of, write_series
from medpfl.component import spec_of
from medpfl.core.errors import DataError
from medpfl.core.formulas import as_it_was
from medpfl.data.volumes.new import find_volumes
from medpfl.deployed.evaluate import write_cases
from medpfl.deployed.model_file import Deployed, History, ModelMeta, Recipe, build_networks
from medpfl.deployed.predict import predict
from medpfl.methods.local import Local
from medpfl.models.unet import UNet
from medpfl.tasks.contract import Evaluation
from medpfl.tasks.segmentation import Segmentation

RNG = np.random.default_rng(0)


def untrained(preparation: dict[str, JsonValue], classes: list[str]) -> Deployed:
    """A model with random weights: what it finds is no matter here."""
    method, task = Local(), Segmentation("organ", size=(16, 16), spacing=(2, 2, 4), architecture=UNet((4, 8)))
    recipe = Recipe(
        method=spec_of(method), task=spec_of(task), deployed="local", classes=classes, input_shape=[1, 16, 16],
        hospitals=1,
    )  # fmt: skip
    history = History(
        job="j", site="s", model="local", choice="last", round=1, cases={"test": 1}, samples_by_class={}, test={},
        calibration=None, preparation=preparation,
    )  # fmt: skip
    meta = ModelMeta(recipe=recipe, history=history, parameters=1, versions={})
    return Deployed(method, "local", build_networks(method, task, recipe, 1).eval(), task, meta)


def of_volumes() -> Deployed:
    return untrained({"kind": "volumes"}, ["background", "organ"])


def write_volume(path: Path, shape: tuple[int, int, int] = (9, 8, 4)) -> None:
    path.parent.mkdir(exist_ok=True)
    nib.save(nib.Nifti1Image(RNG.normal(size=shape).astype(np.float32), np.diag([2, 2, 4, 1])), path)


def write_image(path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    Image.fromarray(RNG.integers(0, 256, (20, 20), dtype=np.uint8)).save(path)


def test_a_name_that_is_not_in_utf8(tmp_path: Path) -> None:
    write_image(tmp_path / "new" / "a.png")
    os.rename(tmp_path / "new" / "a.png", os.fsencode(tmp_path / "new") + b"/M\xfcller.png")
    model = untrained({"kind": "images", "channels": 1}, ["background", "lesion"])
    with pytest.raises(DataError, match=r"^M\\udcfcller: the name is not in UTF-8; rename the file"):
        predict(model, tmp_path / "new", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_name_of_a_case_is_a_formula(tmp_path: Path) -> None:
    """A file that a hospital was given may be called so, and its staff opens predictions.csv in a spreadsheet."""
    names = ["=HYPERLINK(1)", "+a", "-1", "@SUM(A1)", "plain"]
    for name in names:
        write_image(tmp_path / "new" / f"{name}.png")
    model = untrained({"kind": "images", "channels": 1}, ["background", "lesion"])
    done = predict(model, tmp_path / "new", tmp_path / "out")
    assert sorted(str(row["case"]) for row in done.rows) == sorted(names)
    with done.file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(row["case"] for row in rows) == ["'+a", "'=HYPERLINK(1)", "'@SUM(A1)", "-1", "plain"]
    assert sorted(as_it_was(row["case"]) for row in rows) == sorted(names)
    assert not [cell for row in rows for cell in row.values() if cell[:1] in ("=", "+", "@")]


def test_signs_and_numbers_stay_as_they_are(tmp_path: Path) -> None:
    """Classes are called so."""
    for text in ("+", "-", "-1", "+0.5", "a=b", "'quoted", ""):
        assert as_it_was(text) == text
    path = tmp_path / "cases.csv"
    write_cases(path, Evaluation({}, [{"case": "=1+1", "predicted": "+", "p": -0.5}]))
    assert path.read_text().splitlines() == ["case,predicted,p", "'=1+1,+,-0.5"]


def test_probabilities_and_a_volume_of_their_name(tmp_path: Path) -> None:
    for name in ("a", "a_probabilities"):
        write_volume(tmp_path / "new" / f"{name}.nii.gz")
    done = predict(of_volumes(), tmp_path / "new", tmp_path / "out")
    assert [row["case"] for row in done.rows] == ["a", "a_probabilities"]
    with pytest.raises(DataError, match=r"would replace another volume's 'a_probabilities.nii.gz'; predict them one"):
        predict(of_volumes(), tmp_path / "new", tmp_path / "shown", probabilities=True)
    assert not (tmp_path / "shown").exists()


def test_a_datalist_beside_the_folder_of_its_volumes(tmp_path: Path) -> None:
    write_volume(tmp_path / "images" / "a.nii.gz")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "d.json").write_text(json.dumps({"test": ["../images/a.nii.gz"]}))
    done = predict(of_volumes(), tmp_path / "lists" / "d.json", tmp_path / "out")
    assert [row["file"] for row in done.rows] == ["images_a.nii.gz"]  # the name began with a dot, and was hidden


def test_an_item_of_a_datalist_that_is_misspelt(tmp_path: Path) -> None:
    items = [{"image": "a.nii.gz"}, {"imgae": "b.nii.gz"}]
    (tmp_path / "d.json").write_text(json.dumps({"name": "organs", "test": items, "authors": [{"name": "we"}]}))
    with pytest.raises(DataError, match=r"d.json: test\[1\] names no 'image', and would be left out"):
        find_volumes(tmp_path / "d.json")
    (tmp_path / "d.json").write_text(json.dumps({"name": "organs", "test": items[:1], "authors": [{"name": "we"}]}))
    assert find_volumes(tmp_path / "d.json") == [("a", (tmp_path / "a.nii.gz",))]


def test_a_patient_with_a_text_beside_the_slices_is_not_left_out(tmp_path: Path) -> None:
    for patient in ("p1", "p2"):
        write_series(tmp_path / "new" / patient, RNG.integers(0, 99, (9, 8, 4)), affine_of())
    assert [name for name, _ in find_volumes(tmp_path / "new")] == ["p1", "p2"]
    (tmp_path / "new" / "p2" / "!About.txt").write_text("exported")  # stands before the slices
    assert [name for name, _ in find_volumes(tmp_path / "new")] == ["p1", "p2"]
    with pytest.raises(DataError, match=r"!About.txt: cannot be read as DICOM"):
        predict(of_volumes(), tmp_path / "new", tmp_path / "out")


def test_a_patient_whose_slices_lie_deeper_is_not_left_out(tmp_path: Path) -> None:
    for folder in ("p1", "p2/CT"):
        write_series(tmp_path / "new" / folder, RNG.integers(0, 99, (9, 8, 4)), affine_of())
    with pytest.raises(
        DataError, match=r"new/p2/CT: this DICOM series lies a folder deeper than p1's and would be left"
    ):
        find_volumes(tmp_path / "new")
    (tmp_path / "new" / "p2" / "CT").rename(tmp_path / "new" / "p3")
    assert [name for name, _ in find_volumes(tmp_path / "new")] == ["p1", "p3"]


def test_volumes_of_every_format_that_is_read_are_found(tmp_path: Path) -> None:
    """A patient in one of FreeSurfer's files, or in a multi-frame DICOM file, was left out where others lay beside."""
    pytest.importorskip("highdicom", reason="needs the extra 'dicom'")
    write_volume(tmp_path / "new" / "a.nii.gz")
    values = RNG.integers(0, 99, (9, 8, 4)).astype(np.int16)
    nib.save(nib.MGHImage(values.astype(np.float32), affine_of()), tmp_path / "new" / "b.mgz")
    nib.save(nib.Nifti1Pair(values, affine_of()), tmp_path / "new" / "c.img")
    write_frames(tmp_path / "new" / "d.dcm", values, affine_of())
    write_series(tmp_path / "new" / "e", values, affine_of())
    (tmp_path / "new" / "notes.txt").write_text("none of them")
    assert [name for name, _ in find_volumes(tmp_path / "new")] == ["a", "b", "c", "d", "e"]
    done = predict(of_volumes(), tmp_path / "new", tmp_path / "out")
    assert [row["file"] for row in done.rows] == [f"{name}.nii.gz" for name in "abcde"]


def test_series_beside_a_multi_frame_file_are_not_left_out(tmp_path: Path) -> None:
    values = RNG.integers(0, 99, (9, 8, 4)).astype(np.int16)
    write_frames(tmp_path / "new" / "one.dcm", values, affine_of())
    assert [name for name, _ in find_volumes(tmp_path / "new")] == ["new"]
    write_series(tmp_path / "new" / "p1", values, affine_of())
    with pytest.raises(DataError, match=r"new: holds DICOM files, and beside them folders with .* 'p1'"):
        find_volumes(tmp_path / "new")


def test_earlier_predictions_are_no_series(tmp_path: Path) -> None:
    write_volume(tmp_path / "new" / "a.nii.gz")
    write_series(tmp_path / "series", RNG.integers(0, 99, (9, 8, 4)), affine_of())
    write_volume(tmp_path / "new" / "out" / "a.nii.gz")
    next((tmp_path / "series").iterdir()).rename(tmp_path / "new" / "out" / "a.seg.dcm")
    assert [name for name, _ in find_volumes(tmp_path / "new")] == ["a"]


def test_white_is_the_structure_only_where_there_is_one(tmp_path: Path) -> None:
    write_image(tmp_path / "new" / "a.png")
    (tmp_path / "labels").mkdir()
    half = np.zeros((20, 20), np.uint8)
    half[:10] = 255
    Image.fromarray(half).save(tmp_path / "labels" / "a.png")
    one, two = (untrained({"kind": "images", "channels": 1}, ["none", "lesion", "scar"][:count]) for count in (2, 3))
    dice = predict(one, tmp_path / "new", tmp_path / "out", labels=tmp_path / "labels").rows[0]["dice"]
    with pytest.raises(DataError, match="expected the classes' numbers 0 to 2, got 255"):
        predict(two, tmp_path / "new", tmp_path / "other", labels=tmp_path / "labels")
    Image.fromarray(half.astype(np.uint16) * 257).save(tmp_path / "labels" / "a.png")  # white of 16 bits
    again = predict(one, tmp_path / "new", tmp_path / "again", labels=tmp_path / "labels").rows[0]
    assert again["dice"] == dice
