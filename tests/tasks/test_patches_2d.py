# SPDX-License-Identifier: Apache-2.0
"""2-D patches: photographs and slices keep their size, training draws patches, predictions lie on the file's pixels."""

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor

from evaluating import evaluate_at
from medpfl.core.mixers import Mean
from medpfl.data.images.declare import Images
from medpfl.data.intensity import Window
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.data.volumes.new import VolumesPreparation
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.models.unet import UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.inference import decide_samples
from medpfl.tasks.segmentation import Segmentation
from small_volumes import write_volume_sites

SHAPES = [(70, 45), (33, 90), (12, 20), (64, 64), (40, 41), (50, 30), (20, 34), (31, 17)]
TASK = Segmentation("skin", size=(16, 32), architecture=UNet((2, 4)), patches=True)


def photographs(folder: Path, side: int = 1) -> Path:
    """Of several sizes; bright squares, by default single pixels, which no resize would keep, are looked for."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True)
    for number, shape in enumerate(SHAPES):
        mask = (rng.random(shape) < 0.02).astype(np.uint8)
        mask[3, 5] = 1
        mask = np.stack([np.roll(mask, (i, j), (0, 1)) for i in range(side) for j in range(side)]).max(axis=0)
        Image.fromarray(np.repeat(mask[..., None] * 255, 3, axis=2)).save(folder / "images" / f"{number}.png")
        Image.fromarray(mask * 255).save(folder / "masks" / f"{number}.png")
    declared = {
        "kind": "images",
        "files": "images/*.png",
        "masks": {"files": "masks/*.png", "labels": {0: "skin", 1: "spot"}, "label_map": {255: 1}},
        "split": {"fractions": {"train": 0.5, "validation": 0.25, "test": 0.25}},
    }
    policy = {"least_hospitals": 1, "least_samples": 1, "least_scored": 1, "least_update": 1}
    site = folder / "site.yaml"
    site.write_text(yaml.safe_dump({"site": folder.name, "policy": policy, "datasets": {"skin": declared}}))
    return site


def bright(inputs: Tensor) -> Tensor:
    """A network that calls what is brighter than the middle a spot."""
    return torch.cat([-inputs[:, :1], inputs[:, :1]], dim=1)


@pytest.fixture
def data(tmp_path: Path) -> SiteData:
    return TASK.load(load_site_file(photographs(tmp_path / "anna")))


def test_photographs_stay_as_large_as_they_are_and_patches_are_drawn_from_them(data: SiteData) -> None:
    everything: list[Any] = [part.targets for part in data.splits.values()]
    assert {shape for part in everything for shape in part.shapes} == set(SHAPES)
    assert data.input_shape == (3, 16, 32)
    samples, chosen = data.splits["train"], torch.tensor([0, 1, 2])
    inputs, masks = TASK.present(samples, chosen, torch.Generator().manual_seed(1))
    again, _ = TASK.present(samples, chosen, torch.Generator().manual_seed(1))
    assert torch.equal(inputs, again) and inputs.shape == (3, 3, 16, 32) and masks.shape == (3, 16, 32)
    assert torch.equal(masks, (inputs[:, 0] > 0.5).to(torch.uint8)) and masks[2].any()
    for seed in range(20):  # the last third holds foreground
        assert TASK.present(samples, chosen, torch.Generator().manual_seed(seed))[1][2].any()


def test_windows_slide_over_a_photograph_and_every_pixel_counts(data: SiteData) -> None:
    samples = data.splits["test"]
    decided = decide_samples(TASK, bright, samples, torch.device("cpu"))
    found = TASK.evaluate(decided, samples)
    assert found.metrics["dice"] == 1.0 and [case["case"] for case in found.cases] == samples.names
    resized = Segmentation("skin", size=(16, 32), architecture=UNet((2, 4)))
    assert torch.equal(resized.infer(bright, torch.ones(1, 3, 16, 32)), bright(torch.ones(1, 3, 16, 32)))


@pytest.mark.parametrize("shape", [(70, 45), (5, 7)])
def test_it_is_monais_sliding_window(shape: tuple[int, int]) -> None:
    from monai.inferers import SlidingWindowInferer

    torch.manual_seed(0)
    network = torch.nn.Conv2d(3, 2, 5, padding=2).eval()
    image = torch.randn(1, 3, *shape)
    with torch.inference_mode():
        expected = SlidingWindowInferer((16, 32), sw_batch_size=4, overlap=0.5, mode="gaussian")(image, network)
        assert torch.equal(TASK.infer(network, image), expected)


def test_predictions_lie_on_the_files_own_pixels(tmp_path: Path) -> None:
    site = load_site_file(photographs(tmp_path / "anna"))
    preparation = TASK.load(site).preparation
    assert preparation is not None
    assert isinstance(site.dataset("skin", Images), Images)
    for case in preparation.new_cases(tmp_path / "anna" / "images", TASK.spec):
        assert case.save is not None
        case.save(TASK.infer(bright, case.inputs), tmp_path / "out", ["skin", "spot"], False)
    for number, shape in enumerate(SHAPES):
        written = np.asarray(Image.open(tmp_path / "out" / f"{number}.png"))
        truth = np.asarray(Image.open(tmp_path / "anna" / "masks" / f"{number}.png")) // 255
        assert written.shape == shape and np.array_equal(written, truth)


def test_slices_of_volumes_are_cases_of_their_own_size_and_are_scored_as_volumes(tmp_path: Path) -> None:
    intensity = Window(low=0, high=20)
    spacing = (2.0, 2.0, 2.0)
    task = Segmentation(
        "organ", size=(4, 4), spacing=spacing, architecture=UNet((2, 4)), intensity=intensity, patches=True
    )
    sites = write_volume_sites(tmp_path / "sites", ("berta",))
    data = task.load(load_site_file(sites["berta"]))
    samples = data.splits["test"]
    whole: Any = samples.targets
    decided = torch.cat([whole.whole(row).flatten() for row in range(len(samples))])
    masks = list(samples.masks(decided))
    content = json.loads((tmp_path / "sites" / "berta" / "list.json").read_text())
    for item, (found, true) in zip(content["test"], masks, strict=True):
        label: Any = nib.load(tmp_path / "sites" / "berta" / item["label"])
        assert np.array_equal(found.numpy(), np.asarray(label.dataobj)) and torch.equal(found, true)
    assert len(samples) == sum(found.shape[2] for found, _ in masks) and len(masks) == 2
    assert task.evaluate(decided, samples).metrics["dice"] == 1.0
    # Where the grid is the file's, prediction is exact: the label map itself goes in as the image, and comes out.
    file = tmp_path / "one.nii.gz"
    values = masks[0][0].numpy().astype(np.float32) * 20
    nib.save(nib.Nifti1Image(values, np.diag([2.0, 2.0, 2.0, 1.0])), file)
    [case] = list(VolumesPreparation().new_cases(file, task.spec))
    assert case.save is not None and tuple(case.inputs.shape[2:]) == values.shape[:2]

    def halves(inputs: Tensor) -> Tensor:
        return torch.cat([0.5 - inputs, inputs - 0.5], dim=1)

    (out := tmp_path / "out").mkdir()
    case.save(task.infer(halves, case.inputs), out, ["background", "organ"], False)
    written: Any = nib.load(out / "one.nii.gz")
    assert np.array_equal(np.asarray(written.dataobj), values > 0)


@pytest.mark.slow
def test_a_trained_models_dice_comes_out_of_the_written_files(tmp_path: Path) -> None:
    sites = {name: photographs(tmp_path / name, side=4) for name in ("anna", "berta")}
    method = FedAvg(steps=40, lr=0.02, batch_size=3)
    job = Job("t", 2, Settings(rounds=1, references=(), finetune=0), {"fedavg": Mean()}, method, TASK)
    simulate(job, sites, tmp_path / "results", tmp_path / "home")
    model = load_deployed(tmp_path / "home" / "anna" / "t" / "models" / "fedavg-best.safetensors")
    site = load_site_file(sites["anna"])
    evaluation = evaluate_at(model, site, "test")
    assert evaluation.metrics["dice"] > 0.5  # it has learnt something
    predict(model, tmp_path / "anna" / "images", tmp_path / "out")
    for case in evaluation.cases:
        name = Path(str(case["case"])).name
        found = np.asarray(Image.open(tmp_path / "out" / name)) > 0
        truth = np.asarray(Image.open(tmp_path / "anna" / "masks" / name)) > 0
        assert 2 * (found & truth).sum() / (found.sum() + truth.sum()) == pytest.approx(case["dice"], abs=1e-6)
