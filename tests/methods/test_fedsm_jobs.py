# SPDX-License-Identifier: Apache-2.0
"""FedSM's jobs for prostate MR and fundus photographs, on generated files laid out as their page says."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from numpy.typing import NDArray
from PIL import Image

from medpfl.core.errors import DataError
from medpfl.core.mixers import SoftPull
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.job import Job, load_job
from medpfl.methods.fedsm import FedSM
from medpfl.rounds.server.joint import read_result, study_here
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "methods" / "fedsm.md").read_text(encoding="utf-8")
SITES = ("client_a", "client_b", "client_c", "client_d")
LISTS = (("training", 2), ("validation", 1), ("testing", 1))


def documented(dataset: str, part: int) -> dict[str, Any]:
    """The declaration on the method's page: that of the ``part``-th of its YAML blocks with this dataset."""
    blocks = [yaml.safe_load(block.split("```")[0]) for block in PAGE.split("```yaml\n")[1:]]
    found = [block["datasets"] for block in blocks if dataset in block.get("datasets", {})]
    declared: dict[str, Any] = found[part][dataset]
    return declared


def write_site(folder: Path, site: str, dataset: str, declared: dict[str, Any]) -> Path:
    path = folder / f"{site}.yaml"
    policy = {"least_samples": 1, "least_update": 1, "least_scored": 1}
    content = {"site": site, "policy": policy, "datasets": {dataset: declared}}
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def gland(shape: tuple[int, int, int], centre: tuple[float, float], radius: float) -> NDArray[np.uint8]:
    """A cylinder through the inner slices, 1; its inner part, 2."""
    x, y, z = np.meshgrid(*(np.arange(length) for length in shape), indexing="ij")
    away = np.hypot(x - centre[0], y - centre[1])
    inside = (z > 0) & (z < shape[2] - 1)
    return ((away < radius) & inside).astype(np.uint8) + ((away < radius / 2) & inside)


def write_prostate(folder: Path, site: str, number: int, declared: dict[str, Any], channels: int = 1) -> Path:
    """<site>/Image and <site>/Mask with volumes of the same names, and <site>.json: what NVFlare's scripts leave.

    Every hospital has a scanner of its own: brightness, voxels, orientation; two have the gland as two zones.
    """
    rng = np.random.default_rng(number)
    voxel = (0.75 + 0.25 * (number % 2), 0.75 + 0.25 * (number % 2), 3.6)
    shape = (32 + 4 * number, 32, 6)
    lists: dict[str, list[dict[str, str]]] = {}
    for key, count in LISTS:
        lists[key] = []
        for _ in range(count):
            label = gland(shape, (shape[0] / 2 + rng.uniform(-2, 2), 16 + rng.uniform(-2, 2)), 8)
            image = rng.normal(100 * (number + 1), 10, shape) + 60 * (label > 0)
            if channels > 1:
                image = np.stack([image] * channels, axis=-1)
            affine = np.diag([*voxel, 1.0])
            name = f"{site}/{{}}/case{sum(map(len, lists.values()))}.nii.gz"
            shown = label if number % 2 else (label > 0).astype(np.uint8)
            for part, values in (("Image", image.astype(np.float32)), ("Mask", shown)):
                target = folder / name.format(part)
                target.parent.mkdir(parents=True, exist_ok=True)
                turned = nib.Nifti1Image(values, affine)
                if number == 1:  # left to right the other way round, as most scanners store it
                    turned = turned.as_reoriented(np.array([[0, -1], [1, -1], [2, 1]]))
                nib.save(turned, target)
            lists[key].append({"image": name.format("Image"), "label": name.format("Mask")})
    (folder / f"{site}.json").write_text(json.dumps(lists))
    return write_site(folder, site, "prostate", {**declared, "datalist": f"{site}.json"})


def write_slices(folder: Path, site: str, number: int, declared: dict[str, Any]) -> Path:
    """<site>/Image/<case>/<slice>.png and the same under Mask, 255 inside: what NVFlare's 2-D script leaves."""
    rng = np.random.default_rng(number)
    for case in range(4):
        label = gland((40, 32, 4), (20 + rng.uniform(-2, 2), 16), 9) > 0
        image = rng.integers(0, 60, label.shape) + 40 * number + 60 * label
        for part, values in (("Image", image), ("Mask", 255 * label)):
            target = folder / site / part / f"case{case}"
            target.mkdir(parents=True, exist_ok=True)
            for index in (1, 2):  # only slices with a label
                Image.fromarray(values[:, :, index].astype(np.uint8)).save(target / f"{index}.png")
    text = json.dumps(declared).replace("I2CVB", site)
    return write_site(folder, site, "prostate", json.loads(text))


def write_fundus(folder: Path, site: str, number: int, declared: dict[str, Any]) -> Path:
    """<site>/images/<patient>_<eye>.jpg and <site>/masks, of another size each; REFUGE's values in two of them."""
    rng = np.random.default_rng(number)
    height, width = 44 + 2 * number, 60
    coded = declared["masks"]["label_map"] if number % 2 else {0: 0, 128: 1, 255: 2}
    value = {meant: stored for stored, meant in coded.items()}
    for name in ("images", "masks"):
        (folder / site / name).mkdir(parents=True, exist_ok=True)
    for patient in range(4):
        for eye in "LR":
            label = gland((height, width, 3), (height / 2, width / 2 + rng.uniform(-5, 5)), 12)[:, :, 1]
            colour = np.stack([120 + 50 * (label > 0), 60 + 20 * number + 40 * label, 40 + 0 * label], axis=-1)
            noisy = np.clip(colour + rng.normal(0, 5, colour.shape), 0, 255).astype(np.uint8)
            Image.fromarray(noisy).save(folder / site / "images" / f"p{patient}_{eye}.jpg", quality=95)
            stored = np.vectorize(value.__getitem__)(label).astype(np.uint8)
            Image.fromarray(stored).save(folder / site / "masks" / f"p{patient}_{eye}.bmp")
    text = json.dumps(declared).replace('"images/', f'"{site}/images/').replace('"masks/', f'"{site}/masks/')
    mine = json.loads(text)
    mine["masks"]["label_map"] = coded
    return write_site(folder, site, "fundus", mine)


def tiny(name: str, size: tuple[int, int]) -> Job:
    """The shipped job with its networks for one round of one small batch at a small size, without the references."""
    job = load_job(ROOT / "jobs" / name)
    assert isinstance(job, Job) and isinstance(job.method, FedSM) and isinstance(job.task, Segmentation)
    return replace(
        job,
        settings=replace(job.settings, rounds=1, references=()),
        method=replace(job.method, steps=1, batch_size=4),
        task=replace(job.task, size=size),
    )


def loaded(job: Job, site_file: Path) -> SiteData:
    return job.task.load(load_site_file(site_file, site_file.stem))


def trained(job: Job, files: dict[str, Path], folder: Path) -> dict[str, Any]:
    """One round in this process; then the super model is put together and tried at every hospital."""
    coordinator = simulate(job, files, folder / "results", folder / "home")
    assert coordinator.done == 1
    summary: dict[str, Any] = json.loads((folder / "results" / "summary.json").read_text())
    studies = study_here(read_result(folder / "results"), {site: files[site] for site in coordinator.joined})
    assert list(studies) == coordinator.joined
    return summary


@pytest.mark.parametrize(("name", "lam"), [("fedsm_prostate", 0.3), ("fedsm_fundus", 0.7)])
def test_the_jobs_have_the_paper_s_settings(name: str, lam: float) -> None:
    """Section 4 of the paper, its best lambda for these data, and the page's split."""
    job = load_job(ROOT / "jobs" / name)
    assert isinstance(job, Job) and isinstance(job.task, Segmentation)
    assert job.settings.rounds == 150 and job.method.epochs == 1 and job.method.steps is None
    assert job.method.optimizer == "adam" and job.task.size == (256, 256)
    assert job.mixers["personal"] == SoftPull(lam=lam)
    dataset = name.removeprefix("fedsm_")
    assert documented(dataset, -1)["split"]["fractions"] == {"train": 0.5, "validation": 0.25, "test": 0.25}


@pytest.mark.slow
def test_prostate_volumes(tmp_path: Path) -> None:
    job = tiny("fedsm_prostate", (32, 32))
    declared = documented("prostate", 0)
    files = {site: write_prostate(tmp_path, site, number, declared) for number, site in enumerate(SITES)}
    for number, site in enumerate(SITES):
        data = loaded(job, files[site])
        assert {split: len(samples.names) for split, samples in data.splits.items()} == {
            "train": 2, "validation": 1, "test": 1,
        }  # fmt: skip
        assert data.class_names == ["background", "prostate"]
        inputs, masks = data.splits["test"].inputs[:], data.splits["test"].targets[:]
        assert inputs.shape == (6, 1, 32, 32) and masks.unique().tolist() == [0, 1]
        # A disc of 8 voxels' radius in 4 of 6 slices, whatever the voxels: its area in pixels of 0.75 mm.
        area = np.pi * (8 * (1 + (number % 2) / 3)) ** 2
        assert (masks[1:5].sum(dim=(1, 2)) > 0.9 * area).all() and masks[0].sum() == masks[5].sum() == 0
        assert inputs[:, 0][masks == 1].mean() > inputs[:, 0][masks == 0].mean()
    odd = write_prostate(tmp_path, "client_e", 0, declared, channels=2)
    summary = trained(job, {**files, "client_e": odd}, tmp_path)
    # The fifth hospital forgot to take one channel out of its volumes of two; the others go on without it.
    assert summary["recipe"]["input_shape"] == [1, 32, 32]
    assert any("client_e: entry" in event["event"] for event in summary["events"])


@pytest.mark.slow
def test_prostate_slices_as_the_paper_has_them(tmp_path: Path) -> None:
    job = tiny("fedsm_prostate", (32, 32))
    declared = documented("prostate", -1)
    files = {site: write_slices(tmp_path, site, number, declared) for number, site in enumerate(SITES)}
    data = loaded(job, files["client_b"])
    assert {split: len(samples) for split, samples in data.splits.items()} == {"train": 4, "validation": 2, "test": 2}
    cases = {split: {name.split("/")[-2] for name in samples.names} for split, samples in data.splits.items()}
    assert len(set.union(*cases.values())) == sum(map(len, cases.values())) == 4  # no volume is in two splits
    assert data.splits["train"].inputs.shape[1:] == (1, 32, 32)
    assert all(mask.unique().tolist() == [0, 1] for mask in data.splits["train"].targets[:])
    assert trained(job, files, tmp_path)["recipe"]["preparation"] == {"kind": "images", "channels": 1}


@pytest.mark.slow
def test_fundus_images_with_disc_and_cup(tmp_path: Path) -> None:
    job = tiny("fedsm_fundus", (32, 48))
    declared = documented("fundus", 0)
    files = {site: write_fundus(tmp_path, site, number, declared) for number, site in enumerate(SITES)}
    for number, site in enumerate(SITES):
        data = loaded(job, files[site])
        assert data.class_names == ["background", "rim", "cup"]
        inputs, masks = data.splits["train"].inputs[:], data.splits["train"].targets[:]
        assert inputs.shape == (4, 3, 32, 48) and masks.unique().tolist() == [0, 1, 2]
        shares = torch.stack([(masks == value).float().mean() for value in range(3)])
        disc = np.pi * 12**2 / ((44 + 2 * number) * 60)
        assert shares[2].item() == pytest.approx(disc / 4, rel=0.1)
        assert shares[1].item() == pytest.approx(disc * 3 / 4, rel=0.1)
        green = inputs[:, 1]
        assert green[masks == 2].mean() > green[masks == 1].mean() > green[masks == 0].mean()
        patients = [{Path(name).stem.split("_")[0] for name in part.names} for part in data.splits.values()]
        assert len(set.union(*patients)) == sum(map(len, patients))  # both eyes of a patient are in one split
    summary = trained(job, files, tmp_path)
    assert summary["recipe"]["input_shape"] == [3, 32, 48] and summary["classes"] == ["background", "rim", "cup"]


def test_what_a_wrong_site_file_says(tmp_path: Path) -> None:
    job = tiny("fedsm_fundus", (32, 48))
    path = write_fundus(tmp_path, "client_b", 1, documented("fundus", 0))
    content = yaml.safe_load(path.read_text())
    del content["datasets"]["fundus"]["masks"]["label_map"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(DataError, match=r"p\d_L\.bmp: label value 128 is not declared; expected 0 to 2"):
        loaded(job, path)
    job = tiny("fedsm_prostate", (32, 32))
    path = write_prostate(tmp_path, "client_b", 1, documented("prostate", 0))
    content = yaml.safe_load(path.read_text())
    del content["datasets"]["prostate"]["label_map"]
    path.write_text(yaml.safe_dump(content))
    with pytest.raises(DataError, match=r"case\d\.nii\.gz: label value 2 is not declared; expected 0 to 1"):
        loaded(job, path)
