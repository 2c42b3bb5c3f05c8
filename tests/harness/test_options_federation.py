# SPDX-License-Identifier: Apache-2.0
"""Everything that a job may say of augmentation, losses, optimisation and start weights, together, over FLARE: as
``simulate``, bit for bit, from the job as it stands in its JSON files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from hospitals import change_yaml
from in_process import Harness
from medpfl import store
from medpfl.core.mixers import Identity, SoftPull
from medpfl.data.schema import digest_of_declared
from medpfl.data.site_file import load_site_file
from medpfl.job import Job, load_job
from medpfl.methods.optimizers import AdamW, Sgd
from medpfl.methods.schedules import Cosine, WarmUp
from medpfl.methods.softpull import SoftPull as SoftPulled
from medpfl.methods.start import Start
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.results.files import read_summary
from medpfl.tasks import Classification, Segmentation
from medpfl.tasks.contract import Task
from medpfl.tasks.losses import DiceFocal, Focal
from pictures import MASKS, TABLE, write_images
from small_jobs import FEW
from tools import assert_same, outcome, run, write_job

pytestmark = [pytest.mark.harness, pytest.mark.slow]
Make = Callable[..., Job]

SEGMENTED = Segmentation(
    "skin", size=(16, 16), architecture=UNet((4, 8)), loss=DiceFocal(), more_metrics=("dice_1",), augment="dermoscopy",
    flips=(0, 1),
)  # fmt: skip
CLASSIFIED = Classification(
    "skin", size=(16, 16), architecture=ResNet(width=4), loss=Focal(), sampling="balanced", score="auprc",
    more_metrics=("brier", "sensitivity"), augment="light", flips=(1,),
)  # fmt: skip


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two hospitals with images, masks and classes, whose files any copy of the site file finds."""
    files = {}
    for site, count in (("anna", 24), ("berta", 28)):
        folder = tmp_path_factory.mktemp(site)
        write_images(folder, count=count, size=(18, 16))
        skin = {**TABLE, "files": f"{folder}/images/*.png", "masks": {**MASKS, "files": f"{folder}/masks/*.png"}}
        skin["table"] = {"file": f"{folder}/list.csv", "image": "id"}
        files[site] = folder / f"{site}.yaml"
        files[site].write_text(yaml.safe_dump({"site": site, "datasets": {"skin": skin}, "policy": FEW}))
    return files


def starting(sites: dict[str, Path], folder: Path) -> dict[str, Path]:
    """The same hospitals, which hold weights of the network under the name "known"."""
    torch.manual_seed(7)
    network = CLASSIFIED.network(CLASSIFIED.load(load_site_file(sites["anna"])))
    store.save(folder / "known.safetensors", dict(network.state_dict()), {"kind": "checkpoint"})
    found = {site: folder / f"{site}.yaml" for site in sites}
    for site, file in found.items():
        known = {"checkpoints": {"known": str(folder / "known.safetensors")}}
        file.write_text(yaml.safe_dump({**yaml.safe_load(sites[site].read_text()), **known}))
    return found


def both_ways(make_job: Make, sites: dict[str, Path], folder: Path, task: Task, **method: Any) -> dict[str, Any]:
    """Run the job, as read from its folder, over FLARE and in process; what both leave."""
    mixers = {"local": Identity(), "model": SoftPull(lam=0.5)}
    agreed = digest_of_declared(load_site_file(sites["anna"]), "skin")
    made = make_job(2, mixers, SoftPulled(batch_size=4, **method), task, seed=3, schema=agreed)
    folder_of_job = write_job(made, folder / "job")

    def job() -> Job:
        found = load_job(folder_of_job)
        assert isinstance(found, Job)
        return found

    harness = Harness(job(), sites, folder / "flare").run()
    assert harness.engine.panic is None
    found = outcome(harness.results)
    assert_same(found, run(job(), sites, folder / "simulated"))
    assert {line["site"] for line in found["test"]} == set(sites)
    return found


def test_augmented_segmentation_with_a_recipe_of_its_own(
    make_job: Make, sites: dict[str, Path], tmp_path: Path
) -> None:
    recipe: dict[str, Any] = {
        "lr": 0.05, "optimizer": Sgd(momentum=0.9, nesterov=True, weight_decay=1e-4), "clip_gradient": 0.5,
        "schedule": WarmUp(rounds=0.5, then="polynomial"), "accumulate": 2, "optimizer_state": "reset",
    }  # fmt: skip
    found = both_ways(make_job, sites, tmp_path, SEGMENTED, **recipe)
    assert all({"dice", "dice_1"} <= line["metrics"].keys() for line in found["test"])


def test_balanced_classification_from_start_weights_with_frozen_layers(
    make_job: Make, sites: dict[str, Path], tmp_path: Path
) -> None:
    recipe: dict[str, Any] = {
        "lr": 0.01, "optimizer": AdamW(), "schedule": Cosine(), "start": Start("known", frozen=("conv1", "bn1")),
    }  # fmt: skip
    found = both_ways(make_job, starting(sites, tmp_path), tmp_path, CLASSIFIED, **recipe)
    assert all({"auprc", "brier", "sensitivity"} <= line["metrics"].keys() for line in found["test"])
    sent = found["slots"]["model"]
    assert sent and not any(key.split(".")[1] in ("conv1", "bn1") for key in sent)


def test_who_declares_something_else_than_the_jobs_schema_takes_no_part(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    agreed = digest_of_declared(load_site_file(table_sites["anna"]), "blood")
    change_yaml(table_sites["dora"], lambda site: site["datasets"]["blood"].update(units={"c": "mg/dl"}))
    harness = Harness(make_job(1, schema=agreed), table_sites, tmp_path / "flare").run()
    told = [event.event for event in read_summary(harness.results).events if event.site == "dora"]
    assert any("does not follow the schema that the job names" in one for one in told), told
