# SPDX-License-Identifier: Apache-2.0
"""Models of 3-D jobs in use: the evaluated Dice comes out of the written files, alone, as super model, as bundle."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch

from evaluating import evaluate_at
from forked import Forked, without
from medpfl.core.mixers import Mean, ServerAdam, SoftPull
from medpfl.data.site_file import load_site_file
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedsm import FedSM
from medpfl.rounds.server.joint import read_result
from medpfl.rounds.simulate import simulate
from monai_command import run_bundle
from small_volumes import VOLUMES, write_volume_sites

pytestmark = pytest.mark.slow

MONAI_ALONE = """
import itertools, json, sys, torch
from monai.inferers import SlidingWindowInferer
extra = {"medpfl.json": ""}
network = torch.jit.load(sys.argv[1], _extra_files=extra)
told = json.loads(extra["medpfl.json"])["inference"]
windows, axes = told["windows"], told["flips"]
slide = SlidingWindowInferer(windows["size"], overlap=windows["overlap"], mode=windows["weights"],
                             sigma_scale=windows["sigma_scale"], cval=windows["padding"])
def mirrored(x):
    sets = [s for n in range(len(axes) + 1) for s in itertools.combinations(axes, n)]
    return sum(network(x.flip([a + 2 for a in s])).flip([a + 2 for a in s]) for s in sets) / len(sets)
with torch.inference_mode():
    torch.save(slide(torch.load(sys.argv[2], weights_only=True), mirrored), sys.argv[3])
assert "medpfl" not in sys.modules
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two hospitals with volumes of 2 mm, FedSM trained at both: sites/, results/, home/."""
    folder = tmp_path_factory.mktemp("volumes")
    mixers = {"global": Mean(), "personal": SoftPull(lam=0.7), "selector": ServerAdam(lr=0.03)}
    method = FedSM(steps=30, lr=0.02, batch_size=2, selector_steps=3)
    task = replace(VOLUMES, flips=(0, 2))
    job = Job("t", 2, Settings(rounds=2, references=(), finetune=0), mixers, method, task)
    simulate(job, write_volume_sites(folder / "sites"), folder / "results", folder / "home")
    return folder


def of_anna(trained: Path) -> Path:
    return trained / "home" / "anna" / "t" / "models" / "personal-best.safetensors"


def test_the_evaluated_dice_comes_out_of_the_written_files(trained: Path, tmp_path: Path) -> None:
    model = load_deployed(of_anna(trained))
    evaluation = evaluate_at(model, load_site_file(trained / "sites" / "anna.yaml"), "test")
    assert model.meta.history is not None
    assert evaluation.metrics["dice"] == pytest.approx(model.meta.history.test["dice"], abs=1e-6)
    assert evaluation.metrics["dice"] > 0.6  # it has learnt something
    content = json.loads((trained / "sites" / "anna" / "list.json").read_text())
    tests = trained / "sites" / "anna" / "tests.json"
    tests.write_text(json.dumps({"test": content["test"]}))
    found = predict(model, tests, tmp_path / "out")
    # The task's grid has the files' own 2 mm, so there is nothing that resampling could change.
    assert [row["dice"] for row in found.rows] == [pytest.approx(case["dice"], abs=1e-5) for case in evaluation.cases]


def test_the_super_model_serves_volumes_smaller_and_larger_than_the_patch(trained: Path, tmp_path: Path) -> None:
    read_result(trained / "results").with_gamma(0.0).write(trained / "super.safetensors", None)
    model = load_deployed(trained / "super.safetensors")
    scores, found = [], []
    for site in ("anna", "berta"):
        evaluation = evaluate_at(model, load_site_file(trained / "sites" / f"{site}.yaml"), "test")
        scores += [case["dice"] for case in evaluation.cases]
        content = json.loads((trained / "sites" / site / "list.json").read_text())
        tests = trained / "sites" / site / "tests.json"
        tests.write_text(json.dumps({"test": content["test"]}))
        found += predict(model, tests, tmp_path / site).rows
    assert [row["dice"] for row in found] == [pytest.approx(score, abs=1e-5) for score in scores]
    assert {row["served_by"] for row in found} <= {"global", "anna", "berta"}
    small = np.random.default_rng(0).random((5, 6, 3)).astype(np.float32)
    nib.save(nib.Nifti1Image(small, np.diag([2.0, 2.0, 2.0, 1.0])), tmp_path / "s.nii")
    assert predict(model, tmp_path / "s.nii", tmp_path / "small").rows[0]["file"] == "s.nii.gz"


def test_monai_runs_the_bundle_and_finds_the_same(trained: Path, tmp_path: Path) -> None:
    folder = export(of_anna(trained), tmp_path / "organ", "monai")
    (tmp_path / "in").mkdir()
    source: Any = nib.load(trained / "sites" / "anna" / "test0_image.nii.gz")
    # Permuted and flipped axes; its voxels are those of the task, so nothing is interpolated on either way.
    turn = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(source.affine), nib.orientations.axcodes2ornt("PIR")
    )
    nib.save(source.as_reoriented(turn), tmp_path / "in" / "scan.nii.gz")
    command = ["run", "--config_file", "configs/inference.json"]
    command += ["--dataset_dir", str(tmp_path / "in"), "--output_dir", str(tmp_path / "out")]
    run_bundle(command, folder)
    written: Any = nib.load(tmp_path / "out" / "scan_seg.nii.gz")
    predict(load_deployed(of_anna(trained)), tmp_path / "in", tmp_path / "ours")
    ours: Any = nib.load(tmp_path / "ours" / "scan.nii.gz")
    expected = np.asarray(ours.dataobj)
    assert 0.01 < expected.mean() < 0.99 and np.array_equal(np.asarray(written.dataobj), expected)
    told = json.loads((folder / "configs" / "metadata.json").read_text())["inference"]
    assert told["flips"] == [0, 2] and told["flips_in_network"]
    assert told["windows"]["size"] == [8, 8, 4] and told["windows"]["overlap"] == 0.5


def test_a_script_of_monai_alone_reproduces_the_prediction_from_torchscript(trained: Path, tmp_path: Path) -> None:
    """By the numbers in the archive, with windows and flips written out as somebody else would."""
    model = load_deployed(of_anna(trained))
    folder = export(of_anna(trained), tmp_path / "organ", "torchscript")
    image = torch.randn(1, 1, 11, 9, 13, generator=torch.Generator().manual_seed(0))
    torch.save(image, tmp_path / "in.pt")
    arguments = [str(path) for path in (folder / "model.ts", tmp_path / "in.pt", tmp_path / "out.pt")]

    def alone() -> None:
        without("medpfl")
        sys.argv[1:] = arguments
        exec(MONAI_ALONE, {})

    Forked(alone, tmp_path / "log").ended()
    with torch.inference_mode():
        expected = model.task.infer(model, image)
    torch.testing.assert_close(torch.load(tmp_path / "out.pt", weights_only=True), expected, rtol=1e-5, atol=1e-5)
