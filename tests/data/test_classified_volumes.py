# SPDX-License-Identifier: Apache-2.0
"""Volumes with a class each: from the datalist or a table, brought to one size, trained on and predicted."""

import json
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml

from evaluating import evaluate_at
from medpfl.core.errors import DataError, SiteFileError
from medpfl.core.mixers import Mean
from medpfl.data.declared import Problems
from medpfl.data.intensity import Window
from medpfl.data.preparation import Spec
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target
from medpfl.data.volumes.declare import Volumes
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.models.resnet import ResNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.classification import Classification

CLASSES = {"healthy": ["no", 0], "ill": ["yes", 1]}
SPEC = Spec(Target.CLASS, ("images", "volumes"), (6, 8, 4), intensity=Window(low=0, high=100))


def site(folder: Path, table: bool = False, **changes: Any) -> Path:
    """Twelve volumes of differing shape and orientation, whose right half is bright in the ill."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    items, lines = [], ["scan,diagnosis"]
    for number in range(12):
        shape = tuple(rng.integers(7, 14, 3).tolist())
        image = np.zeros(shape, np.float32)
        image[: shape[0] // 2] = 90 * (number % 2)
        affine = np.diag([2.0, 1.0, 3.0, 1.0])
        if number % 3 == 0:  # stored from right to left: the same patient
            image, affine = image[::-1], np.diag([-2.0, 1.0, 3.0, 1.0])
        nib.save(nib.Nifti1Image(np.ascontiguousarray(image), affine), folder / f"{number}.nii.gz")
        value: Any = ("no", "yes")[number % 2] if number < 6 else number % 2
        items.append({"image": f"{number}.nii.gz"} | ({} if table else {"label": value}))
        lines.append(f"{number}.nii.gz,{value}")
    (folder / "list.json").write_text(json.dumps({"training": items}))
    (folder / "list.csv").write_text("\n".join(lines) + "\n")
    declared: dict[str, Any] = {
        "kind": "volumes",
        "datalist": "list.json",
        "label": {"column": "diagnosis" if table else "label", "classes": CLASSES},
        "split": {"stratify": True, "fractions": {"train": 0.5, "validation": 0.25, "test": 0.25}},
    }
    if table:
        declared["table"] = {"file": "list.csv", "image": "scan"}
    declared = {key: value for key, value in {**declared, **changes}.items() if value is not None}
    policy = {"least_hospitals": 1, "least_samples": 1, "least_scored": 1, "least_update": 1}
    file = folder / "site.yaml"
    file.write_text(yaml.safe_dump({"policy": policy, "datasets": {"scans": declared}}))
    return file


@pytest.mark.parametrize("table", [False, True])
def test_classes_come_from_the_list_or_a_table(tmp_path: Path, table: bool) -> None:
    data = load_site_file(site(tmp_path, table)).load("scans", SPEC)
    assert data.class_names == ["healthy", "ill"] and data.input_shape == (1, 6, 8, 4)
    for samples in data.splits.values():
        numbers = [int(name) for name in samples.names]
        assert samples.targets.tolist() == [number % 2 for number in numbers] and samples.classes == 2
        assert samples.inputs.dtype == torch.float32 and samples.targets.dtype == torch.int64
        # RAS: however they are stored, the half that was bright lies on the same side.
        bright = samples.inputs[:][:, 0, 0].mean(dim=(1, 2))
        dark = samples.inputs[:][:, 0, -1].mean(dim=(1, 2))
        assert bright.tolist() == [pytest.approx(0.9 * (number % 2), abs=0.06) for number in numbers]
        assert dark.abs().max() < 0.06
    assert sorted(len(part) for part in data.splits.values()) == [3, 3, 6]
    dataset = load_site_file(site(tmp_path, table)).dataset("scans", Volumes)
    case = dataset.cases(Problems())["train"][0]
    assert dataset.read(case).target == case.value and dataset.read(case).affine is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"label": None}, "expected 'labels' \\(of label maps\\), 'label'"),
        ({"label": None, "labels": {0: "a", 1: "b"}, "table": {"file": "list.csv", "image": "scan"}}, "'table'"),
        ({"labels": {0: "a"}}, "at least"),
    ],
)
def test_declarations_that_cannot_be(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(SiteFileError, match=words):
        load_site_file(site(tmp_path, **{"split": None, **changes}))


def test_what_is_wrong_is_named(tmp_path: Path) -> None:
    file = site(tmp_path, table=True)
    (tmp_path / "list.csv").write_text("scan,diagnosis\n0.nii.gz,maybe\n1.nii.gz,yes\n1.nii.gz,no\n")
    problems = Problems(keep=True)
    load_site_file(file).dataset("scans", Volumes).cases(problems)
    told = "\n".join(problems.found)
    assert "'maybe' is not among the declared values (no, 0, yes, 1)" in told
    assert "the image '1.nii.gz' has another row" in told and "the image '2.nii.gz' has no row in list.csv" in told
    with pytest.raises(DataError, match="needs volumes with 'labels', which the dataset does not declare"):
        load_site_file(site(tmp_path)).load("scans", Spec(Target.MASK, ("volumes",), (8, 8, 4)))


@pytest.mark.slow
def test_trained_evaluated_and_predicted(tmp_path: Path) -> None:
    sites = {name: site(tmp_path / name) for name in ("anna", "berta")}
    task = Classification("scans", SPEC.size, ResNet(depth=10, width=4), intensity=SPEC.intensity)
    method = FedAvg(steps=30, lr=0.02, batch_size=4)
    job = Job("t", 2, Settings(rounds=1, references=(), finetune=0), {"fedavg": Mean()}, method, task)
    simulate(job, sites, tmp_path / "results", tmp_path / "home")
    model = load_deployed(tmp_path / "home" / "anna" / "t" / "models" / "fedavg-best.safetensors")
    evaluation = evaluate_at(model, load_site_file(sites["anna"]), "test")
    assert evaluation.metrics["accuracy"] == 1.0
    found = predict(model, tmp_path / "anna" / "list.json", tmp_path / "out")
    assert [row["predicted"] for row in found.rows] == [
        ("healthy", "ill")[int(str(row["case"])) % 2] for row in found.rows
    ]
    assert len(found.rows) == 12
