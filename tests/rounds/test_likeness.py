# SPDX-License-Identifier: Apache-2.0
"""Hospitals that are suspiciously alike, or whose inputs differ much, are named before anything is trained."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.core.mixers import Mean
from medpfl.data.fingerprint import Fingerprint
from medpfl.data.samples import Samples
from medpfl.methods.fedavg import FedAvg
from medpfl.models.lenet import LeNet5
from medpfl.rounds.likeness import look_at, of_fingerprints, of_inputs
from medpfl.tasks.classification import Classification
from pictures import TABLE, declare, write_images
from small_jobs import for_few, small_job
from tools import write_job


def samples(values: torch.Tensor) -> Samples:
    count = len(values)
    return Samples(values, torch.zeros(count, dtype=torch.int64), np.arange(count), [str(n) for n in range(count)])


def test_a_hospitals_look_is_the_mean_and_the_deviation_of_every_channel() -> None:
    values = torch.randn(150, 3, 6, 5, generator=torch.Generator().manual_seed(0))
    found = look_at(samples(values))
    np.testing.assert_allclose(found.mean, values.double().numpy().mean(axis=(0, 2, 3)), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.deviation, values.double().numpy().std(axis=(0, 2, 3)), rtol=1e-10)
    assert len(found.digests) == 150
    assert not look_at(samples(torch.randn(5, 4))).digests  # rows of a table may be equal by chance
    assert not look_at(samples(torch.ones(5, 1, 8, 8))).digests  # as may be empty slices


def noise(seed: int, shift: float = 0.0, spread: float = 1.0) -> torch.Tensor:
    return shift + spread * torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def test_what_is_named() -> None:
    looks = {name: look_at(samples(noise(seed))) for seed, name in enumerate(("anna", "berta", "clara"))}
    assert of_inputs(looks) == [] and of_inputs({"anna": looks["anna"]}) == []
    [told] = of_inputs({**looks, "clara": look_at(samples(noise(7, shift=1.5)))})
    assert told.startswith("clara's prepared inputs differ much from those of the other hospitals: their mean lies 1.5")
    [told] = of_inputs({"anna": looks["anna"], "berta": look_at(samples(noise(7, spread=3)))})
    assert "berta's prepared inputs differ much from those of anna: they spread 3 times as widely" in told
    again = torch.cat([noise(0)[:5], noise(9)])
    [told] = of_inputs({**looks, "dora": look_at(samples(again))})
    assert told.startswith("anna and dora have 5 equal training samples (of 40 and 45 different ones)")


def volumes(**said: Any) -> Fingerprint:
    usual = {"cases": 12, "channels": 1, "classes": 2, "spacing": [1, 1, 2], "fine": [1, 1, 2], "shape": [64, 64, 30]}
    return Fingerprint.model_validate_json(json.dumps({**usual, **said}))


def test_what_is_named_of_fingerprints() -> None:
    told = {"anna": volumes(), "berta": volumes(cases=14), "clara": volumes(cases=9, spacing=[1, 1, 2.5])}
    assert of_fingerprints(told) == [] and of_fingerprints({"anna": volumes()}) == []
    [found] = of_fingerprints({**told, "dora": volumes()})
    assert found.startswith("anna and dora say exactly the same of their volumes (12 for training")
    [found] = of_fingerprints({**told, "dora": volumes(spacing=[1, 1, 8])})
    assert "dora's voxels are 4 times as far apart as the other hospitals' from head to foot" in found
    [found] = of_fingerprints({"anna": volumes(), "berta": volumes(spacing=[0.2, 1, 2])})
    assert "berta's voxels are 5 times as close together as the other hospitals' from right to left" in found


@pytest.mark.slow
def test_simulate_and_check_job_say_it(tmp_path: Path) -> None:
    """Berta has one of Anna's pictures; Clara's scanner leaves all of them dark."""
    for site in ("anna", "berta", "clara"):
        write_images(tmp_path / site)
        for number, file in enumerate(sorted((tmp_path / site / "images").iterdir())):
            if site == "anna" or number == 0:
                continue
            values = np.asarray(Image.open(file)).astype(int)
            rolled = np.roll(values, number + len(site), axis=0)
            Image.fromarray((rolled if site == "berta" else rolled // 12).astype(np.uint8)).save(file)
        declared = {**TABLE, "split": {"fractions": {"train": 0.5, "validation": 0.25, "test": 0.25}}}
        written = yaml.safe_load(for_few(declare(tmp_path / site, declared)).read_text())
        shutil.move(tmp_path / site / "site.yaml", tmp_path / f"{site}.yaml")
        dataset = next(iter(written["datasets"].values()))
        dataset["files"] = f"{site}/{dataset['files']}"
        dataset["table"]["file"] = f"{site}/{dataset['table']['file']}"
        dataset["masks"]["files"] = f"{site}/{dataset['masks']['files']}"
        (tmp_path / f"{site}.yaml").write_text(yaml.safe_dump({**written, "site": site}))
    name = next(iter(written["datasets"]))
    task = Classification(name, size=(32, 32), architecture=LeNet5())
    job = write_job(small_job(1, {"fedavg": Mean()}, FedAvg(batch_size=4, steps=1), task), tmp_path / "jobs")
    sites = ["--sites", str(tmp_path)]
    for command in (["check-job", str(job), *sites], ["simulate", str(job), *sites, "--results", str(tmp_path / "r")]):
        result = CliRunner().invoke(app, command, catch_exceptions=False)
        assert result.exit_code == 0, result.output
        printed = " ".join(result.output.split())
        assert "warning: anna and berta have 1 equal training sample (" in printed
        assert "warning: clara's prepared inputs differ much from those of the other hospitals" in printed
        assert "warning: berta" not in printed
