# SPDX-License-Identifier: Apache-2.0
"""The super model on NIfTI files: one network a volume, which is told; Dice on the input's own voxels; bad input."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

from evaluating import evaluate_at
from medpfl.cli import app
from medpfl.core.errors import DataError
from medpfl.core.mixers import Mean, ServerAdam, SoftPull
from medpfl.data.site_file import load_site_file
from medpfl.demo.phantom import write_phantoms
from medpfl.deployed.labels import dice_of
from medpfl.deployed.model_file import Deployed, load_deployed
from medpfl.deployed.predict import _run, predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedsm import FedSM, SuperModel
from medpfl.models.unet import UNet
from medpfl.rounds.server.joint import read_result
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation

pytestmark = pytest.mark.slow

TWO = ("hospital-a", "hospital-b")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Phantom hospitals, and FedSM trained at two of them: demo/, results/."""
    folder = tmp_path_factory.mktemp("super")
    write_phantoms(folder / "demo")
    task = Segmentation("organ", size=(48, 48), spacing=(4.0, 4.0, 8.0), architecture=UNet((8, 16)))
    mixers = {"global": Mean(), "personal": SoftPull(lam=0.9), "selector": ServerAdam(lr=0.02)}
    settings = Settings(rounds=8, references=(), finetune=0)
    job = Job("fedsm", 2, settings, mixers, FedSM(steps=6, lr=0.01), task)
    files = {site: folder / "demo" / f"{site}.yaml" for site in TWO}
    simulate(job, files, folder / "results", folder / "home")
    return folder


@pytest.fixture(scope="module")
def model(trained: Path) -> Deployed:
    read_result(trained / "results").with_gamma(0.0).write(trained / "super.safetensors", None)
    return load_deployed(trained / "super.safetensors")


def cases_of(trained: Path, site: str, count: int, target: Path) -> tuple[Path, Path]:
    """The first test volumes of a hospital, and their labels, in folders of their own."""
    for kind in ("images", "labels"):
        (target / kind).mkdir(parents=True)
        for number in range(count):
            name = f"{site}_test{number:02d}.nii.gz"
            shutil.copy(trained / "demo" / site / kind / name, target / kind / name)
    return target / "images", target / "labels"


def test_which_model_served_how_sure_and_dice(trained: Path, model: Deployed, tmp_path: Path) -> None:
    images, labels = cases_of(trained, "hospital-b", 3, tmp_path / "in")
    done = predict(model, images, tmp_path / "out", labels=labels)
    rows = list(csv.DictReader(done.file.open()))
    assert list(rows[0]) == ["case", "served_by", "selector", "file", "organ_ml", "dice"]
    assert isinstance(model.method, SuperModel)
    for row in rows:
        assert row["served_by"] in TWO and 0.5 <= float(row["selector"]) <= 1
        written: Any = nib.load(tmp_path / "out" / row["file"])
        truth: Any = nib.load(labels / row["file"])
        assert np.array_equal(written.affine, truth.affine) and written.shape == truth.shape
        found, there = np.asarray(written.dataobj) == 1, np.asarray(truth.dataobj) == 1
        dice = 2 * float((found & there).sum()) / float(found.sum() + there.sum())
        assert float(row["dice"]) == pytest.approx(dice, abs=1e-6)
    mean = np.mean([float(row["dice"]) for row in rows])
    assert f"Dice of these cases: {mean:.4f}, mean of 3 with a label." in done.note and "Served by: " in done.note


def test_one_network_segments_all_slices_of_a_volume(model: Deployed, tmp_path: Path) -> None:
    """That of the mean log-probability over the slices, which the selector sees cut as in training."""
    assert isinstance(model.method, SuperModel)
    model.networks.cpu()
    for seed, shape in ((0, (48, 48, 5)), (1, (56, 64, 4))):
        image = np.random.default_rng(seed).normal(1.0, 0.3, shape).astype(np.float32)
        image[15:30, 15:30, 1:3] += 2.0
        image[:, :, 0] = 1.0  # an empty slice has no say
        case = save(tmp_path / f"{seed}.nii.gz", image)
        row = predict(model, case, tmp_path / f"out{seed}").rows[0]
        slices = torch.from_numpy((image - image.mean()) / image.std()).permute(2, 0, 1)[:, None].float()
        edges = [(length - 48) // 2 for length in shape[:2]]
        seen = slices[:, :, edges[0] : edges[0] + 48, edges[1] : edges[1] + 48]
        with torch.inference_mode():
            shares = model.method.scores(model.networks, seen[1:]).mean(dim=0).softmax(dim=0)
            expected = model.networks[f"personal_{int(shares.argmax())}"](slices).argmax(dim=1)
        assert row["served_by"] == TWO[int(shares.argmax())]
        assert row["selector"] == pytest.approx(float(shares.max()), abs=1e-4)
        written: Any = nib.load(tmp_path / f"out{seed}" / row["file"])
        same = np.asarray(written.dataobj) == expected.permute(1, 2, 0).numpy()
        assert same.mean() > 0.999


def test_labels_of_a_datalist_count_and_unlabelled_cases_have_no_dice(
    trained: Path, model: Deployed, tmp_path: Path
) -> None:
    cases_of(trained, "hospital-a", 2, tmp_path / "in")
    items = [
        {"image": f"images/hospital-a_test0{n}.nii.gz", "label": f"labels/hospital-a_test0{n}.nii.gz"} for n in (0, 1)
    ]
    del items[1]["label"]
    (tmp_path / "in" / "list.json").write_text(json.dumps({"test": items}))
    done = predict(model, tmp_path / "in" / "list.json", tmp_path / "out")
    rows = list(csv.DictReader(done.file.open()))
    assert 0 <= float(rows[0]["dice"]) <= 1 and rows[1]["dice"] == "" and "mean of 1 with a label" in done.note


def test_dice_is_for_every_segmentation_model(trained: Path, tmp_path: Path) -> None:
    images, labels = cases_of(trained, "hospital-a", 1, tmp_path / "in")
    own = load_deployed(trained / "home" / "hospital-a" / "fedsm" / "models" / "personal-last.safetensors")
    done = predict(own, images, tmp_path / "out", labels=labels)
    assert "dice" in done.rows[0] and "served_by" not in done.rows[0]


def save(path: Path, values: NDArray[Any], affine: NDArray[np.float64] | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, np.diag([4.0, 4.0, 8.0, 1.0]) if affine is None else affine), path)
    return path


def test_labels_that_do_not_fit_are_named(model: Deployed, tmp_path: Path) -> None:
    image = np.random.default_rng(0).normal(1, 0.1, (48, 48, 4)).astype(np.float32)
    case = save(tmp_path / "one.nii.gz", image)
    label = np.zeros((48, 48, 4), np.uint8)
    moved = np.diag([4.0, 4.0, 8.0, 1.0])
    moved[0, 3] = 30
    for number, (values, affine, words) in enumerate(
        (
            (label[:, :, :3], None, r"the label map has shape \(48, 48, 3\), its image \(48, 48, 4\)"),
            (np.stack([label] * 2, axis=-1), None, r"the label map has shape \(2, 48, 48, 4\), its image"),
            (label, moved, "its geometry .* does not fit that of one.nii.gz: they lie up to 30 mm apart"),
            (label + 3, None, "expected the classes' numbers 0 to 1, got 3"),
        )
    ):
        save(tmp_path / str(number) / "one.nii.gz", values, affine)
        with pytest.raises(DataError, match=words):
            predict(model, case, tmp_path / f"out{number}", labels=tmp_path / str(number))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: holds no label of 'one': expected one\.nii\.gz, one\.nii or one\.png"):
        predict(model, case, tmp_path / "out", labels=tmp_path / "empty")
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match="nowhere: the labels must be a folder"):
        predict(model, case, tmp_path / "out", labels=tmp_path / "nowhere")


def test_other_channels_or_dimensions_are_named(model: Deployed, tmp_path: Path) -> None:
    flat = np.zeros((48, 48), np.float32)
    with pytest.raises(DataError, match="expected a volume with 3 axes, got 2"):
        predict(model, save(tmp_path / "flat.nii.gz", flat), tmp_path / "1")
    two = np.zeros((48, 48, 3, 2), np.float32)
    with pytest.raises(DataError, match="two: the model takes inputs of 1 channels, got 2 channels"):
        predict(model, save(tmp_path / "two.nii.gz", two), tmp_path / "2")


def test_masks_of_images(tmp_path: Path) -> None:
    found = np.zeros((4, 4), np.uint8)
    found[:2] = 1
    truth = np.zeros((4, 4), np.uint8)
    truth[1:3] = 1
    Image.fromarray(found).save(tmp_path / "found.png")
    for name, values in (("numbers", truth), ("white", truth * 255)):
        Image.fromarray(values).save(tmp_path / f"{name}.png")
        assert dice_of(tmp_path / "found.png", tmp_path / f"{name}.png", 2, [(1,)]) == 0.5
    empty = np.zeros((4, 4), np.uint8)
    Image.fromarray(empty).save(tmp_path / "empty.png")
    assert dice_of(tmp_path / "empty.png", tmp_path / "empty.png", 2, [(1,)]) == 1.0
    Image.fromarray(empty[:2]).save(tmp_path / "half.png")
    with pytest.raises(DataError, match=r"half\.png: the label map has shape \(2, 4\), its image \(4, 4\)"):
        dice_of(tmp_path / "found.png", tmp_path / "half.png", 2, [(1,)])


def test_long_slices_are_segmented_window_by_window(model: Deployed) -> None:
    network = model.networks["global"].cpu()
    inputs = torch.randn(1, 1, 64, 700, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        whole = network(inputs)
    sizes: list[tuple[int, ...]] = []
    hook = network.register_forward_pre_hook(lambda _, given: sizes.append(tuple(given[0].shape)))
    found = _run(network, inputs, 512)
    hook.remove()
    assert sizes and all(size[2:] == (64, 512) for size in sizes)
    assert found.shape == whole.shape and (found.argmax(dim=1) == whole.argmax(dim=1)).double().mean() > 0.99


def test_the_commands(trained: Path, tmp_path: Path) -> None:
    def medpfl(*arguments: str | Path) -> str:
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
        assert result.exit_code == 0, result.output
        return " ".join(result.output.split())

    sites = tmp_path / "sites"
    sites.mkdir()
    for site in TWO:
        (sites / f"{site}.yaml").write_text((trained / "demo" / f"{site}.yaml").read_text())
        (sites / site).symlink_to(trained / "demo" / site)
    path = tmp_path / "super.safetensors"
    assert "gamma 0.9 (the usual one" in medpfl("super", trained / "results", "-o", path)
    printed = medpfl("super", trained / "results", "-o", path, "--sites", sites)
    assert "client average" in printed and "chosen on validation" in printed
    assert "| client average | 16 |" in path.with_suffix(".md").read_text()
    images, labels = cases_of(trained, "hospital-a", 1, tmp_path / "in")
    printed = medpfl("predict", path, images, "-o", tmp_path / "out", "--labels", labels)
    assert "Dice of these cases: " in printed and "Served by: " in printed
    assert "on other cases (16 test cases of all hospitals): dice" in printed
    medpfl("evaluation-job", path, "-o", tmp_path / "jobs", "--name", "test-super")
    where = tmp_path / "evaluated"
    medpfl("simulate", tmp_path / "jobs" / "test-super", "--sites", sites, "--results", where)
    again = tmp_path / "again.safetensors"
    assert "chosen on validation" in medpfl("super", path, "--evaluation", where, "-o", again)
    assert again.with_suffix(".md").read_text() == path.with_suffix(".md").read_text()
    assert evaluate_at(load_deployed(again), load_site_file(sites / "hospital-a.yaml"), "test").metrics["dice"] > 0
    for arguments, words in (
        (["super", str(path), "-o", str(again), "--gamma", "1.5"], "gamma must be in [0, 1], got 1.5"),
        (["super", str(path), "-o", "x", "--gamma", "1"], "must end in .safetensors"),
        (["super", str(path), "-o", str(again), "--sites", str(trained / "demo")], "hospital-c is not among"),
        (["super", str(path), "-o", str(again), "--sites", "y", "--gamma", "1"], "give one of --gamma"),
        (["export", str(path), "-o", str(tmp_path / "e"), "--format", "onnx"], "no export format can hold"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1 and words in str(result.exception)
