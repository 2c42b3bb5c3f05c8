# SPDX-License-Identifier: Apache-2.0
"""Methods on volumes of differing shape: what each wants of the data beside its training comes from fixed views."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from every_method import EVERY
from medpfl.check.trial import try_job
from medpfl.compare.examples import _slice
from medpfl.compare.pooled import train_pooled
from medpfl.data.rows import CaseRows
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.hospital import Hospital
from medpfl.methods.local import Pooled
from medpfl.methods.site import Site
from medpfl.models.dynunet import DynUNet
from medpfl.models.unet import UNet
from medpfl.privacy.lots import RecordNoise
from medpfl.privacy.noise import Stream
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation
from small_volumes import VOLUMES, write_volume_sites

SUPERVISED = DynUNet(filters=(4, 4, 8), norm="batch", deep_supervision=True)
TASKS = {
    "UNet": VOLUMES,
    "deep supervision": dataclasses.replace(VOLUMES, architecture=SUPERVISED),
}


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("FedAP", "UNet"),
        ("IFCA", "deep supervision"),
        ("MoE", "deep supervision"),
        ("FedSMExtra", "UNet"),
        ("FedSMEnsemble", "deep supervision"),
        ("DSFL", "UNet"),
    ],
)
@pytest.mark.slow
def test_methods_that_look_at_the_data_take_volumes(tmp_path: Path, name: str, task: str) -> None:
    sites = write_volume_sites(tmp_path / "sites")
    datasets = yaml.safe_load(sites["berta"].read_text())["datasets"]
    for file in sites.values():
        content = yaml.safe_load(file.read_text())
        content["datasets"]["shared"] = {**datasets["organ"], "public": True}
        file.write_text(yaml.safe_dump(content))
    small = EVERY[name]
    settings = Settings(rounds=1, references=(), finetune=0)
    job = Job("small", 2, settings, dict(small.components), small.method(batch_size=3), TASKS[task])
    simulate(job, sites, tmp_path / "results", tmp_path / "home")
    [model, *_] = (tmp_path / "home" / "anna" / "small" / "models").glob("*-last.safetensors")
    history = load_deployed(model).meta.history
    assert history is not None and history.cases == {"train": 6, "validation": 2, "test": 2}
    assert 0 <= history.test["dice"] <= 1  # type: ignore[operator]


def test_statistics_see_the_centre_of_every_volume_once(tmp_path: Path) -> None:
    data = VOLUMES.load(load_site_file(write_volume_sites(tmp_path)["anna"]))
    models = torch.nn.ModuleDict({"fedavg": VOLUMES.network(data)})
    hospital = Hospital(
        task=VOLUMES, data=data, models=models, device=torch.device("cpu"), roster=("anna",), name="anna", seed=0
    )
    seen = torch.cat(list(Site(hospital, FedAvg(), 1).training_inputs(4)))
    rows = data.splits["train"].inputs
    assert isinstance(rows, CaseRows) and torch.equal(seen, rows[:]) and seen.shape == (6, 1, *VOLUMES.size)


def noisy(task: Segmentation, data: SiteData) -> Hospital:
    """A hospital whose training is noised."""
    models = torch.nn.ModuleDict({"model": task.network(data)})
    noise = RecordNoise(1.0, 1.0, (), Stream("00" * 32))
    return Hospital(
        task=task, data=data, models=models, device=torch.device("cpu"), roster=("anna",), name="anna", seed=0,
        noise=noise,
    )  # fmt: skip


def test_patches_of_every_slice_hold_foreground_where_lots_show_a_volume_s_slices_together(tmp_path: Path) -> None:
    """The organ is in low slices: as long as a volume's slices came in their own order, and the last third of them were
    cut around foreground, there was none to be cut around."""
    task = dataclasses.replace(VOLUMES, size=(4, 4), patches=True, architecture=UNet((2, 4), norm="group"))
    data = task.load(load_site_file(write_volume_sites(tmp_path, sides=(24, 30))["anna"]))
    hospital = noisy(task, data)
    train = data.splits["train"]
    assert isinstance(train.targets, CaseRows)
    organ = torch.tensor([bool(train.targets.whole(row).any()) for row in range(len(train))])
    found = []
    for batch in Site(hospital, FedAvg(batch_size=3), 1).training_batches(steps=20):
        assert batch.place.rows is not None
        there = organ[batch.place.rows]
        found.append(batch.targets.flatten(1).any(dim=1)[there])
    share = float(torch.cat(found).double().mean())
    assert 1 / 4 < share < 1 / 2  # a third, and what other patches hold by chance


def test_a_slice_of_many_weighs_less_in_an_update_under_noise_than_the_only_one_of_a_case(tmp_path: Path) -> None:
    """A case's gradient is the mean over its slices, so that one of a single slice has all of its case's weight."""
    task = dataclasses.replace(VOLUMES, size=(8, 8), architecture=UNet((2, 4), norm="group"))
    data = task.load(load_site_file(write_volume_sites(tmp_path)["anna"]))
    train = data.splits["train"]
    kept = torch.from_numpy(np.flatnonzero((train.case == 0) | (np.diff(train.case, prepend=-1) > 0)))
    few = dataclasses.replace(train, inputs=train.inputs[kept], targets=train.targets[kept], case=train.case[kept])
    data = dataclasses.replace(data, splits={**data.splits, "train": few})
    hospital = noisy(task, data)
    site = Site(hospital, FedAvg(batch_size=6, optimizer="sgd"), 1)  # all 6 cases are in every lot
    for batch in site.training_batches(steps=1):
        site.step("model", task.loss(hospital.models["model"](batch.inputs), batch.targets))
    count = int((few.case == 0).sum())
    (behind,) = site.behind.values()
    assert count > 5 and behind.effective == pytest.approx(36 / (5 + 1 / count))


@pytest.mark.slow
def test_pooled_training_holds_the_volumes_of_all(tmp_path: Path) -> None:
    """And its score is the mean of the hospitals' own."""
    sites = write_volume_sites(tmp_path / "sites")
    parts = {site: VOLUMES.load(load_site_file(file)) for site, file in sites.items()}
    job = Job("pooled", 2, Settings(rounds=1, references=(), finetune=0), {}, Pooled(steps=3), VOLUMES)
    _, lines = train_pooled(job, parts, sites["anna"], tmp_path)
    assert {line.site for line in lines} == {"anna", "berta"}


def test_a_job_is_tried_on_a_hospitals_volumes_before_it_joins(tmp_path: Path) -> None:
    found = try_job("job", VOLUMES, load_site_file(write_volume_sites(tmp_path)["anna"]))
    assert (
        found.failure == ""
        and found.shape == (1, 8, 8, 4)
        and found.samples == {"train": 6, "validation": 2, "test": 2}
    )
    assert found.memory > 10 * 7**3 * 5 and found.scratch == 0


@pytest.mark.slow
def test_a_page_shows_the_slice_with_most_of_the_organ(tmp_path: Path) -> None:
    sites = write_volume_sites(tmp_path / "sites")
    settings = Settings(rounds=1, references=(), finetune=0)
    simulate(Job("t", 2, settings, {}, FedAvg(steps=2, batch_size=3), VOLUMES), sites, tmp_path / "r", tmp_path / "h")
    model = load_deployed(tmp_path / "h" / "anna" / "t" / "models" / "fedavg-last.safetensors")
    samples = VOLUMES.load(load_site_file(sites["anna"])).splits["test"]
    image, truth, found = _slice(model, samples, 1)
    assert isinstance(samples.targets, CaseRows)
    whole = samples.targets.whole(1)
    assert image.shape == (1, *whole.shape[:2]) and truth.shape == found.shape == whole.shape[:2]
    assert (truth > 0).sum() == (whole > 0).sum(dim=(0, 1)).max()
