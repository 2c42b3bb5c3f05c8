# SPDX-License-Identifier: Apache-2.0
"""Pretraining at one place is local training there, whatever the task: bit for bit what a hospital of that name learns
alone in as many rounds of an epoch."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from medpfl.core.errors import DataError
from medpfl.core.mixers import Mean
from medpfl.deployed.model_file import load_deployed
from medpfl.methods.fedavg import FedAvg
from medpfl.models.unet import UNet
from medpfl.rounds.pretrain import POOLED, pretrain
from medpfl.rounds.simulate import simulate
from medpfl.tasks import PartlyLabelled, Tabular
from medpfl.tasks.contract import Task
from medpfl.tasks.losses import CrossEntropy
from small_jobs import FEW, small_job, write_table_sites
from small_volumes import VOLUMES, write_volume_sites

PARTLY = PartlyLabelled("squares", architecture=UNet((4, 8), dropout=0.2), size=(16, 16))


def write_squares(folder: Path, site: str, annotated: list[str] | None) -> Path:
    """Images of two squares, of which the masks show those that are annotated."""
    rng = np.random.default_rng(len(site))
    for kind in ("images", "masks"):
        (folder / site / kind).mkdir(parents=True)
    for number in range(12):
        mask = np.zeros((16, 16), np.uint8)
        mask[2:7, 2:7], mask[9:14, 9:14] = 1, 2
        image = (60 * mask + rng.integers(0, 40, mask.shape)).astype(np.uint8)
        if annotated == ["one"]:
            mask[mask == 2] = 0
        for kind, pixels in (("images", image), ("masks", mask)):
            Image.fromarray(pixels).save(folder / site / kind / f"{number}.png")
    masks: dict[str, object] = {"files": "masks/*.png", "labels": {0: "background", 1: "one", 2: "two"}}
    masks |= {"annotated": annotated} if annotated else {}
    squares = {"kind": "images", "files": "images/*.png", "channels": 1, "masks": masks}
    path = folder / site / "site.yaml"
    path.write_text(yaml.safe_dump({"site": site, "datasets": {"squares": squares}}))
    return path


def places(folder: Path) -> dict[str, tuple[Task, Path]]:
    table = write_table_sites(folder / "tables", ["anna"])["anna"]
    blood = Tabular(dataset="blood", hidden=(4,))
    return {
        "table": (blood, table),
        "balanced weights": (replace(blood, loss=CrossEntropy(weights="balanced")), table),
        "some classes": (PARTLY, write_squares(folder, "berta", ["one"])),
        "patches": (VOLUMES, write_volume_sites(folder / "volumes", ("anna",))["anna"]),
    }


@pytest.mark.parametrize(
    ("what", "state"),
    [
        ("table", "keep"),
        ("table", "reset"),
        ("balanced weights", "keep"),
        ("some classes", "keep"),
        ("patches", "keep"),
    ],
)
def test_it_is_local_training(tmp_path: Path, what: str, state: Literal["keep", "reset"]) -> None:
    """Balanced weights were not known, what is not annotated was background, and of volumes the middle alone was
    seen; dropout was another one, and Adam's moments were kept where every round begins without them."""
    task, path = places(tmp_path)[what]
    declared = {**yaml.safe_load(path.read_text()), "site": POOLED, "policy": {"least_hospitals": 1, **FEW}}
    file = path.with_name("pooled.yaml")
    file.write_text(yaml.safe_dump(declared))
    method = FedAvg(lr=0.05, batch_size=3, optimizer_state=state)
    job = small_job(2, {"fedavg": Mean()}, method, task, min_clients=1)
    found, _ = pretrain(job, {POOLED: file}, 1.0, 2)

    settings = replace(job.settings, references=("local",), finetune=0)
    simulate(replace(job, settings=settings), {POOLED: file}, tmp_path / "results", tmp_path / "home")
    model = load_deployed(tmp_path / "home" / POOLED / "small" / "models" / "local-last.safetensors")
    alone = next(iter(model.networks.values())).state_dict()
    assert found.keys() == alone.keys()
    assert all(torch.equal(tensor, alone[key]) for key, tensor in found.items())


def test_who_annotates_other_classes_is_not_pooled(tmp_path: Path) -> None:
    files = {"anna": write_squares(tmp_path, "anna", None), "berta": write_squares(tmp_path, "berta", ["one"])}
    job = small_job(1, {"fedavg": Mean()}, FedAvg(), PARTLY)
    with pytest.raises(DataError, match="berta: it annotates other classes than the other data sets"):
        pretrain(job, files, 1.0, 1)
