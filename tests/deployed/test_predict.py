# SPDX-License-Identifier: Apache-2.0
"""Prediction without a federation: segmentations lie on the input's own voxels, whatever its geometry and format."""

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dicom_series import affine_of, write_series
from evaluating import evaluate_at
from medpfl.core.errors import DataError, MedPFLError
from medpfl.core.mixers import Identity
from medpfl.data.site_file import load_site_file, read_for_study
from medpfl.data.volumes.structures import read_structures
from medpfl.demo.phantom import write_phantoms
from medpfl.deployed.model_file import Deployed, load_deployed
from medpfl.deployed.predict import evaluate_on, evaluate_on_all, predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.local import Local
from medpfl.models.unet import UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation

pytestmark = pytest.mark.slow

SPACING = (4.0, 4.0, 8.0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The folder of four phantom hospitals, and a model trained at the first."""
    folder = tmp_path_factory.mktemp("predict")
    write_phantoms(folder)
    task = Segmentation("organ", size=(48, 48), spacing=SPACING, architecture=UNet((8, 16)))
    settings = Settings(rounds=1, references=(), finetune=0)
    job = Job("small", 1, settings, {"local": Identity()}, Local(steps=60, lr=0.01), task)
    alone = {"hospital-a": folder / "hospital-a.yaml"}
    simulate(job, alone, folder / "results", folder / "home", read=read_for_study)
    return folder, folder / "home" / "hospital-a" / "small" / "models" / "local-last.safetensors"


@pytest.fixture(scope="module")
def model(trained: tuple[Path, Path]) -> Deployed:
    return load_deployed(trained[1])


def blob(shape: tuple[int, ...]) -> NDArray[np.float32]:
    """A bright box in noise, which the phantoms' model takes for the organ."""
    values = np.random.default_rng(0).normal(1.0, 0.1, shape).astype(np.float32)
    values[shape[0] // 3 : shape[0] // 2, shape[1] // 3 : shape[1] // 2, shape[2] // 4 : -shape[2] // 4] = 2.0
    return values


def dice(found: NDArray[Any], truth: NDArray[Any]) -> float:
    both = float((found & truth).sum())
    return 2 * both / float(found.sum() + truth.sum())


def test_on_the_tasks_own_grid_it_is_the_networks_decision(model: Deployed, tmp_path: Path) -> None:
    image = blob((48, 48, 6))
    affine = np.diag([*SPACING, 1.0])
    nib.save(nib.Nifti1Image(image, affine), tmp_path / "one.nii.gz")
    done = predict(model, tmp_path / "one.nii.gz", tmp_path / "out", probabilities=True)
    inputs = torch.from_numpy((image - image.mean()) / image.std()).permute(2, 0, 1)[:, None].float()
    expected = model(inputs).softmax(dim=1).permute(2, 3, 0, 1).numpy()
    written: Any = nib.load(tmp_path / "out" / "one.nii.gz")
    assert (
        np.array_equal(np.asarray(written.dataobj), expected.argmax(axis=-1)) and written.get_data_dtype() == np.uint8
    )
    shares: Any = nib.load(tmp_path / "out" / "one_probabilities.nii.gz")
    np.testing.assert_allclose(np.asarray(shares.dataobj), expected, atol=1e-4)
    millilitres = expected.argmax(axis=-1).sum() * np.prod(SPACING) / 1000
    assert millilitres > 0
    assert done.rows == [{"case": "one", "file": "one.nii.gz", "organ_ml": pytest.approx(millilitres)}]
    assert next(csv.DictReader(done.file.open()))["case"] == "one"
    # The model's own test is told, and told to be no result of this image.
    assert re.search(r"^How the model did before, on other cases \(8 test cases of hospital-a\): dice 0", done.note)
    assert "This says nothing about the cases predicted now." in done.note and "not a medical device" in done.note


def test_the_evaluated_dice_comes_out_of_the_written_files(
    trained: tuple[Path, Path], model: Deployed, tmp_path: Path
) -> None:
    """Dice of the files, on the hospital's own voxels (3 mm), agrees with Dice on the task's grid up to resampling."""
    site_file = load_site_file(trained[0] / "hospital-a.yaml")
    evaluation = evaluate_at(model, site_file, "test")
    tests = json.loads((trained[0] / "hospital-a" / "datalist.json").read_text())["test"]
    (trained[0] / "hospital-a" / "only.json").write_text(json.dumps({"test": tests}))
    predict(model, trained[0] / "hospital-a" / "only.json", tmp_path / "out")
    for case, item in zip(evaluation.cases, tests, strict=True):
        truth: Any = nib.load(trained[0] / "hospital-a" / item["label"])
        name = item["image"].replace("/", "_")
        found: Any = nib.load(tmp_path / "out" / name)
        assert np.array_equal(found.affine, truth.affine) and found.shape == truth.shape
        value = dice(np.asarray(found.dataobj) == 1, np.asarray(truth.dataobj) == 1)
        assert value == pytest.approx(case["dice"], abs=0.06)
    assert evaluation.metrics["dice"] > 0.5


@pytest.mark.parametrize("axes", ["LPS", "RSA", "PIR"])
def test_turned_input_gives_turned_output(model: Deployed, tmp_path: Path, axes: str) -> None:
    plain = nib.Nifti1Image(blob((40, 44, 6)), affine_of(0.0))
    turn = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(plain.affine), nib.orientations.axcodes2ornt(axes)
    )
    turned = plain.as_reoriented(turn)
    nib.save(plain, tmp_path / "plain.nii.gz")
    nib.save(turned, tmp_path / "turned.nii.gz")
    for name in ("plain", "turned"):
        predict(model, tmp_path / f"{name}.nii.gz", tmp_path / name)
    first, second = (nib.load(tmp_path / name / f"{name}.nii.gz") for name in ("plain", "turned"))
    assert np.array_equal(second.affine, turned.affine)
    again = first.as_reoriented(turn)  # type: ignore[attr-defined]
    same = np.asarray(again.dataobj) == np.asarray(second.dataobj)  # type: ignore[attr-defined]
    assert same.mean() > 0.999


def test_dicom_in_nifti_out(model: Deployed, tmp_path: Path) -> None:
    values, affine = (blob((96, 83, 6)) * 100).astype(np.int16), affine_of(0.2)
    nib.save(nib.Nifti1Image(values.astype(np.float32), affine), tmp_path / "n.nii.gz")
    (tmp_path / "in").mkdir()
    write_series(tmp_path / "in" / "d", values, affine)
    predict(model, tmp_path / "n.nii.gz", tmp_path / "a")
    done = predict(model, tmp_path / "in", tmp_path / "b", dicom=True)
    first, second = nib.load(tmp_path / "a" / "n.nii.gz"), nib.load(tmp_path / "b" / "d.nii.gz")
    np.testing.assert_allclose(second.affine, affine, atol=1e-4)
    found = np.asarray(first.dataobj)
    assert found.any() and (found == np.asarray(second.dataobj)).mean() > 0.999
    predict(model, tmp_path / "in" / "d", tmp_path / "c")
    assert (tmp_path / "c" / "d.nii.gz").read_bytes()
    assert done.rows[0]["dicom"] == "d.seg.dcm"
    series, written = tmp_path / "in" / "d", np.asarray(second.dataobj)
    segments = read_structures(tmp_path / "b" / "d.seg.dcm", series, written.shape, second.affine, {"organ": 1})
    np.testing.assert_array_equal(segments, written)
    with pytest.raises(DataError, match=r"'n' is no DICOM image, so no DICOM-SEG can be written of it"):
        predict(model, tmp_path / "n.nii.gz", tmp_path / "e", dicom=True)
    assert not (tmp_path / "e").exists()


def test_the_header_says_the_same_place(model: Deployed, tmp_path: Path) -> None:
    image = nib.Nifti1Image(blob((20, 20, 5)), None)
    image.set_sform(np.diag([4.0, 4.0, 8.0, 1.0]), code=4)
    image.set_qform(np.diag([4.0, 4.0, 8.0, 1.0]), code=1)
    image.header.set_xyzt_units("mm")
    nib.save(image, tmp_path / "x.nii")
    predict(model, tmp_path / "x.nii", tmp_path / "out")
    header: Any = nib.load(tmp_path / "out" / "x.nii.gz").header
    assert (int(header["sform_code"]), int(header["qform_code"])) == (4, 1)
    assert header.get_xyzt_units()[0] == "mm" and header.get_zooms() == (4.0, 4.0, 8.0)


def test_a_segmentation_lies_where_the_sform_says(model: Deployed, tmp_path: Path) -> None:
    """The organ is found, and measured, in voxels of the sform's size, though the qform has another."""
    image = nib.Nifti1Image(blob((48, 48, 6)), None)
    image.set_sform(np.diag([4.0, 4.0, 8.0, 1.0]), code=1)
    image.set_qform(np.diag([1.0, 1.0, 2.0, 1.0]), code=1)
    nib.save(image, tmp_path / "x.nii")
    row = predict(model, tmp_path / "x.nii", tmp_path / "out").rows[0]
    found: Any = nib.load(tmp_path / "out" / "x.nii.gz")
    np.testing.assert_array_equal(found.affine, np.diag([4.0, 4.0, 8.0, 1.0]))
    np.testing.assert_array_equal(found.get_qform(), np.diag([1.0, 1.0, 2.0, 1.0]))
    assert float(row["organ_ml"]) == pytest.approx((np.asarray(found.dataobj) == 1).sum() * 0.128) != 0


def test_a_link_gives_its_own_name(model: Deployed, tmp_path: Path) -> None:
    write(tmp_path / "8f3a.nii.gz", blob((16, 16, 3)))
    (tmp_path / "patient.nii.gz").symlink_to(tmp_path / "8f3a.nii.gz")
    assert predict(model, tmp_path / "patient.nii.gz", tmp_path / "out").rows[0]["case"] == "patient"


def test_slices_larger_than_in_training_are_seen_whole(model: Deployed, tmp_path: Path) -> None:
    image = np.random.default_rng(0).normal(1.0, 0.1, (101, 90, 4)).astype(np.float32)
    image[4:14, 4:14] = 2.0  # in the corner that training would crop
    nib.save(nib.Nifti1Image(image, np.diag([*SPACING, 1.0])), tmp_path / "big.nii.gz")
    predict(model, tmp_path / "big.nii.gz", tmp_path / "out")
    found = np.asarray(nib.load(tmp_path / "out" / "big.nii.gz").dataobj)
    assert found.shape == image.shape and found[5:13, 5:13].mean() > 0.5


def write(path: Path, values: NDArray[Any]) -> None:
    nib.save(nib.Nifti1Image(values, np.diag([*SPACING, 1.0])), path)


def test_a_folder_that_holds_something_is_left_as_it_is(model: Deployed, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("mine")
    with pytest.raises(MedPFLError, match="holds files already; name a new folder"):
        predict(model, tmp_path / "in", tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]


def test_what_cannot_be_predicted_is_named_and_nothing_is_left_behind(model: Deployed, tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    write(folder / "a.nii.gz", blob((48, 48, 3)))
    (folder / "b.nii.gz").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"b\.nii\.gz: cannot be read as an image"):
        predict(model, folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    write(folder / "b.nii.gz", np.stack([blob((48, 48, 3))] * 2, axis=-1))
    with pytest.raises(DataError, match="b: the model takes inputs of 1 channels, got 2 channels"):
        predict(model, folder, tmp_path / "out2")
    write(folder / "b.nii.gz", blob((48, 48, 3))[:, :, 0])
    with pytest.raises(DataError, match=r"b\.nii\.gz: expected a volume with 3 axes, got 2"):
        predict(model, folder, tmp_path / "out3")
    with pytest.raises(DataError, match=r"nowhere: no such file"):
        predict(model, tmp_path / "nowhere", tmp_path / "out4")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="holds no volume "):
        predict(model, tmp_path / "empty", tmp_path / "out5")
    write(folder / "a.nii", blob((48, 48, 3)))
    with pytest.raises(DataError, match="another volume would be written to 'a' too"):
        predict(model, folder, tmp_path / "out6")
    (tmp_path / "list.json").write_text("[1")
    with pytest.raises(DataError, match=r"list\.json: cannot be read as a datalist"):
        predict(model, tmp_path / "list.json", tmp_path / "out7")
    assert not list(tmp_path.rglob("*.part.nii.gz"))
    with pytest.raises(DataError, match=r"nowhere: no such file"):
        predict(model, tmp_path / "nowhere", tmp_path / "not" / "yet" / "there")
    assert not (tmp_path / "not").exists()


def test_outputs_that_are_not_numbers_are_no_prediction(trained: tuple[Path, Path], tmp_path: Path) -> None:
    """The largest of several NaN is the first class: every mask was empty, as of a healthy patient."""
    broken = load_deployed(trained[1])
    with torch.no_grad():
        next(broken.networks.parameters()).fill_(float("nan"))
    write(tmp_path / "a.nii.gz", blob((48, 48, 3)))
    with pytest.raises(DataError, match="a: the model's outputs are not numbers"):
        predict(broken, tmp_path / "a.nii.gz", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_evaluating_elsewhere(trained: tuple[Path, Path], model: Deployed) -> None:
    found = evaluate_at(model, load_site_file(trained[0] / "hospital-d.yaml"), "test")
    assert len(found.cases) == 8 and 0 <= found.metrics["dice"] <= 1
    other = replace(model, task=replace(model.task, size=(40, 48)))  # type: ignore[type-var]
    with pytest.raises(DataError, match=r"inputs of shape \[1, 48, 48\], the data have \[1, 40, 48\]"):
        evaluate_at(other, load_site_file(trained[0] / "hospital-d.yaml"), "test")


def test_all_hospitals_together(trained: tuple[Path, Path], model: Deployed) -> None:
    """Dice is a mean over cases, so here the union's is the mean weighted by the hospitals' test volumes."""
    data = {name: model.task.load(load_site_file(trained[0] / f"{name}.yaml")) for name in ("hospital-a", "hospital-c")}
    each, together = evaluate_on_all(model, data, "test")
    cases = {name: data[name].splits["test"].names for name in data}
    for name, found in each.items():
        assert found == evaluate_on(model, data[name], "test")
    assert [case["case"] for case in together.cases] == [case for names in cases.values() for case in names]
    assert [case["dice"] for case in together.cases] == [c["dice"] for found in each.values() for c in found.cases]
