# SPDX-License-Identifier: Apache-2.0
"""pFedNet's hospitals: what they lack and how they lean, and that its jobs learn there."""

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from PIL import Image
from torch.nn import ModuleDict

from medpfl.bundle import find_job, prepare_demo
from medpfl.compare.file import load_comparison
from medpfl.compare.plan import make_plan
from medpfl.core.codecs import STC
from medpfl.core.errors import DataError
from medpfl.core.mixers import NetworkProx
from medpfl.data.samples import SiteData
from medpfl.data.site_file import load_site_file
from medpfl.demo import phantom, skin_imbalance
from medpfl.demo.skin import ENVIRONMENT_VARIABLE
from medpfl.demo.skin_imbalance import DELTAS, IMAGES, write_imbalance
from medpfl.job import Job, load_job
from medpfl.job.codecs import Codecs
from medpfl.methods.fedrep import FedRep
from tools import assert_same, run

ROOT = Path(__file__).resolve().parents[2]


def lesions(folder: Path, count: int) -> Path:
    """A folder like HAM10000: every other lesion is malignant, each has two images."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    lines = ["lesion_id,image_id,dx,dataset"]
    for number in range(count):
        source = ("rosendahl", "vidir_modern", "vidir_molemax", "vienna_dias")[number % 4]
        for copy in "ab":
            name = f"i{number:03}{copy}"
            Image.fromarray(rng.integers(0, 255, (36, 48, 3), dtype=np.uint8)).save(folder / f"{name}.jpg")
            lines.append(f"l{number},{name},{'mel' if number % 2 else 'nv'},{source}")
    (folder / "metadata.csv").write_text("\n".join(lines) + "\n")
    return folder


def loaded(name: str) -> Job:
    job = load_job(find_job(str(ROOT / "jobs" / name)))
    assert isinstance(job, Job)
    return job


def short(job: Job) -> Job:
    """One round of two batches."""
    settings = replace(job.settings, rounds=1, finetune=0)
    return replace(job, settings=settings, method=replace(job.method, epochs=1, steps=2))


@pytest.fixture(scope="module")
def channels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    patch = pytest.MonkeyPatch()
    few = {"train": 1, "val": 2, "test": 2}
    hospitals = {
        site: (replace(scanner, patients=few), lacks) for site, (scanner, lacks) in phantom.TWO_CHANNELS.items()
    }
    patch.setattr(phantom, "TWO_CHANNELS", hospitals)
    folder = tmp_path_factory.mktemp("channels")
    names = phantom.write_two_channels(folder)
    patch.undo()
    return {name: folder / f"{name}.yaml" for name in names}


@pytest.mark.slow
def test_a_channel_that_is_lacking_is_zero_and_the_others_stand_by_themselves(channels: dict[str, Path]) -> None:
    task = loaded("pfednet_phantom").task
    for site, file in channels.items():
        inputs = task.load(load_site_file(file, site)).splits["train"].inputs[:]
        assert inputs.shape[1] == 2
        for channel in range(2):
            if site == f"lacks-{channel}":
                assert not inputs[:, channel].any()
            else:
                assert inputs[:, channel].std() == pytest.approx(1, abs=0.3)  # over the volume, before the crop: 1


@pytest.mark.slow
def test_the_job_on_missing_channels(channels: dict[str, Path], tmp_path: Path) -> None:
    """At one hospital of each kind."""
    job = short(loaded("pfednet_phantom"))
    three = dict(list(channels.items())[-3:])
    found = run(replace(job, min_clients=3, codecs=Codecs(STC(0.05), STC(0.01))), three, tmp_path)
    assert 0 <= found["best"]["personal"]["score"] <= 1
    keys = [key.partition("::")[2] for key in found["slots"]["personal"]]
    assert any(key.startswith("model.upcat_4") for key in keys) and all("down" not in key for key in keys)
    mixer = job.mixers["personal"]
    assert isinstance(mixer, NetworkProx) and len(mixer.network(tuple(channels))) >= len(channels) - 1


@pytest.mark.slow
def test_the_comparison_on_missing_channels(channels: dict[str, Path], tmp_path: Path) -> None:
    plan = make_plan(load_comparison(ROOT / "docs" / "results" / "compare-pfednet-phantom.yaml"), channels)
    entries = {entry.name: entry for entry in plan.entries}
    assert len(plan.runs) == 5 * len(entries) and list(entries["pFedNet"].mixers) == ["shared", "personal"]
    # One head, by its name or as a list of one, is trained alike; at two hospitals as at all.
    two = dict(list(channels.items())[:2])
    found = []
    for head in ("final_conv", ("final_conv",)):
        job = short(loaded("pfednet_phantom"))
        job = replace(job, method=FedRep(head=head, head_steps=1, steps=1, lr=0.01), components={})
        job = replace(job, settings=replace(job.settings, references=()), min_clients=2)
        found.append(run(job, two, tmp_path / str(len(found))))
    assert_same(*found)
    network = entries["FedRep"].method.models(plan.made)["model"]
    assert all("upcat" not in key for key in entries["FedRep"].method.slots(ModuleDict({"model": network}))["model"])


def test_hospitals_lean_as_delta_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skin_imbalance, "IMAGES", 10)
    archive = lesions(tmp_path / "ham", 80)
    write_imbalance(tmp_path / "made", archive, delta=4)
    task, seen = loaded("pfednet_skin").task, []
    for site, benign_more in skin_imbalance.HOSPITALS.items():
        data: SiteData = task.load(load_site_file(tmp_path / "made" / f"{site}.yaml", site))
        labels = np.concatenate([samples.targets[:].numpy() for samples in data.splits.values()])
        assert len(labels) == 10 and labels.sum() == (2 if benign_more else 8)
        assert data.splits["train"].inputs.shape[1:] == (3, 32, 32)
        seen += [samples.inputs[i].numpy().tobytes() for samples in data.splits.values() for i in range(len(samples))]
    assert len(set(seen)) == len(seen)  # no image is at two hospitals or in two splits
    with pytest.raises(DataError, match="too few lesions for 5 hospitals"):
        monkeypatch.setattr(skin_imbalance, "IMAGES", IMAGES)
        write_imbalance(tmp_path / "more", archive, delta=4)
    with pytest.raises(DataError, match=r"delta must be from 1 to 299, got 0\.5"):
        write_imbalance(tmp_path / "other", archive, delta=0.5)


@pytest.mark.skipif(not Path(os.environ.get(ENVIRONMENT_VARIABLE, "?")).exists(), reason="HAM10000 is not here")
@pytest.mark.slow
def test_the_job_on_skin_lesions(tmp_path: Path) -> None:
    names = prepare_demo(f"skin_delta_{DELTAS[2]}", tmp_path / "skin")
    sites = {name: tmp_path / "skin" / f"{name}.yaml" for name in names}
    assert "skin_malignant" in yaml.safe_load(sites["mild-1"].read_text())["datasets"]
    job = short(loaded("pfednet_skin"))
    found = run(job, sites, tmp_path)
    assert 0.2 < found["best"]["local"]["score"] < 1
    mixer = job.mixers["personal"]
    assert isinstance(mixer, NetworkProx)
    edges = {frozenset(edge) for edge in mixer.network(tuple(sorted(sites))).tolist()}
    assert frozenset((3, 4)) in edges  # the two that lean the other way are each other's nearest
