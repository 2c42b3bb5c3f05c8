# SPDX-License-Identifier: Apache-2.0
"""A site file that is changed while a run is interrupted: the run does not go on with inputs, label maps or a network
that are not those it began with."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from medpfl import store
from medpfl.component import spec_of
from medpfl.core.errors import MedPFLError
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.softpull import SoftPull
from medpfl.models.by_hospital import OwnChoice
from medpfl.models.lenet import LeNet5
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks import Classification, Segmentation
from medpfl.tasks.contract import Task
from pictures import TABLE, write_images
from small_jobs import small_job
from small_volumes import VOLUMES, write_volume_sites

REFUSED = "anna's data are not those with which this run began"
pytestmark = pytest.mark.slow

POLICY = {"least_samples": 5, "least_update": 4, "least_scored": 1}


def change(files: dict[str, Path], changed: Callable[[dict[str, Any]], None]) -> None:
    for file in files.values():
        content = yaml.safe_load(file.read_text())
        changed(content)
        file.write_text(yaml.safe_dump(content, sort_keys=False))


def pictures(folder: Path) -> dict[str, Path]:
    files = {}
    for site in ("anna", "berta"):
        write_images(folder / site, 18)
        content = {"policy": POLICY, "datasets": {"skin": TABLE}, "networks": {"skin": spec_of(LeNet5())}}
        files[site] = folder / site / f"{site}.yaml"
        files[site].write_text(yaml.safe_dump(content, sort_keys=False))
    return files


def of_masks(task: Task) -> Job:
    return small_job(3, None, SoftPull(lr=0.05, batch_size=2, steps=4), task)


LESIONS = of_masks(Segmentation("skin", size=(16, 16), architecture=UNet((4, 8))))
OWN = Job(
    "small", 1, Settings(rounds=3, references=(), finetune=0), {},
    MHpFLID(epochs=1, lr=1e-3, distill_lr=1e-3, batch_size=6),
    Classification("skin", size=(36, 36), architecture=OwnChoice()),
)  # fmt: skip


def goes_on(job: Job, files: dict[str, Path], folder: Path) -> str:
    return str(simulate(job, files, folder / "results", folder / "home").record.events)


def interrupted(job: Job, files: dict[str, Path], folder: Path) -> None:
    simulate(job, files, folder / "results", folder / "home", stop_after=1)


def other_values(content: dict[str, Any]) -> None:
    content["datasets"]["skin"]["masks"]["label_map"] = {255: 0, 0: 1}


def fewer_channels(content: dict[str, Any]) -> None:
    content["datasets"]["skin"]["channels"] = 1


def other_network(content: dict[str, Any]) -> None:
    content["networks"]["skin"] = spec_of(ResNet(width=4, depth=10, pool=False))


@pytest.mark.parametrize(("job", "changed"), [(LESIONS, other_values), (LESIONS, fewer_channels), (OWN, other_network)])
def test_a_run_does_not_go_on_with_images_declared_otherwise(
    job: Job, changed: Callable[[dict[str, Any]], None], tmp_path: Path
) -> None:
    """With other values of its masks it went on, and nothing said so; with other channels, or another network of the
    hospital's choice, each of its rounds ended in an error of Python's."""
    files = pictures(tmp_path / "sites")
    before = {site: file.read_text() for site, file in files.items()}
    interrupted(job, files, tmp_path)
    change(files, changed)
    with pytest.raises(MedPFLError, match=REFUSED):
        goes_on(job, files, tmp_path)
    for site, file in files.items():
        file.write_text(before[site])
    assert "resumed after round 1" in goes_on(job, files, tmp_path)


def test_a_run_does_not_go_on_with_label_maps_declared_otherwise(tmp_path: Path) -> None:
    files = write_volume_sites(tmp_path / "sites")
    job = of_masks(VOLUMES)
    interrupted(job, files, tmp_path)
    change(files, lambda content: content["datasets"]["organ"].update(label_map={1: 0, 0: 1}))
    with pytest.raises(MedPFLError, match=REFUSED):
        goes_on(job, files, tmp_path)


def test_a_run_goes_on_where_the_data_were_moved(tmp_path: Path) -> None:
    files = write_volume_sites(tmp_path / "sites")
    job = of_masks(VOLUMES)
    interrupted(job, files, tmp_path)
    for site in files:
        (tmp_path / "sites" / site).rename(tmp_path / "sites" / f"moved-{site}")
        content = yaml.safe_load(files[site].read_text())
        content["datasets"]["organ"]["datalist"] = str(tmp_path / "sites" / f"moved-{site}" / "list.json")
        files[site].write_text(yaml.safe_dump(content))
    assert "resumed after round 1" in goes_on(job, files, tmp_path)


def test_models_of_label_maps_declared_otherwise_are_kept(tmp_path: Path) -> None:
    """A finished job that was run again replaced them, as if the data had been the same."""
    files = write_volume_sites(tmp_path / "sites")
    job = small_job(1, None, SoftPull(lr=0.05, batch_size=2, steps=4), VOLUMES)
    home = tmp_path / "home" / "anna" / "small"
    goes_on(job, files, tmp_path)
    goes_on(job, files, tmp_path)
    assert not list(home.glob("models-*"))
    change(files, lambda content: content["datasets"]["organ"].update(label_map={1: 0, 0: 1}))
    goes_on(job, files, tmp_path)
    assert len(list(home.glob("models-*"))) == 1


def test_what_an_earlier_medpfl_kept_goes_on(tmp_path: Path) -> None:
    """It says nothing of how the site file declared the data."""
    files = write_volume_sites(tmp_path / "sites")
    job = of_masks(VOLUMES)
    interrupted(job, files, tmp_path)
    kept = list((tmp_path / "home").rglob("private-*.safetensors"))
    assert kept
    for file in kept:
        tensors, meta = store.read(file)
        store.save(file, tensors, {key: value for key, value in meta.items() if key not in ("declared", "format")})
    assert "resumed after round 1" in goes_on(job, files, tmp_path)
