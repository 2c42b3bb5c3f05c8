# SPDX-License-Identifier: Apache-2.0
"""Models of slices, which come larger than in training. Their MONAI bundles predict the same, or are refused."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from medpfl.core.errors import MedPFLError
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.moe import MoE
from medpfl.models.contract import Architecture
from medpfl.models.dynunet import DynUNet
from medpfl.models.transformers import UNETR, SwinUNETR
from medpfl.models.unet import UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.segmentation import Segmentation
from monai_command import run_bundle
from small_volumes import write_volume_sites

pytestmark = pytest.mark.slow


def trained(method: Method, network: Architecture, folder: Path, side: int = 16) -> Path:
    """A model of slices of so many voxels, at hospitals whose volumes are longer."""
    task = Segmentation("organ", size=(side, side), spacing=(2.0, 2.0, 2.0), architecture=network)
    sites = write_volume_sites(folder / "sites", sides=(36, 44))
    job = Job("small", 2, Settings(rounds=1, references=(), finetune=0), {}, method, task)
    simulate(job, sites, folder / "results", folder / "home")
    name = "personal" if isinstance(method, MoE) else "fedavg"
    return next((folder / "home" / "anna").glob(f"*/models/{name}-best.safetensors"))


@pytest.mark.parametrize("network", [UNETR(4, 12, 12, 2), UNet((4, 8))])
def test_it_predicts_longer_slices_as_we_do(network: Architecture, tmp_path: Path) -> None:
    model = trained(FedAvg(steps=1, lr=1e-6), network, tmp_path)
    folder = export(model, tmp_path / "organ", "monai")
    scans = tmp_path / "CT [1]"  # a name that is a pattern, too
    scans.mkdir()
    source = scans / "scan.nii.gz"
    source.write_bytes((tmp_path / "sites" / "anna" / "test0_image.nii.gz").read_bytes())
    command = ["run", "--config_file", "configs/inference.json"]
    command += ["--dataset_dir", str(scans), "--output_dir", str(tmp_path / "out")]
    run_bundle(command, folder)
    predict(load_deployed(model), source, tmp_path / "ours")
    theirs: Any = nib.load(tmp_path / "out" / "scan_seg.nii.gz")
    ours: Any = nib.load(tmp_path / "ours" / "scan.nii.gz")
    assert np.array_equal(np.asarray(theirs.dataobj), np.asarray(ours.dataobj))
    assert 0 < np.asarray(ours.dataobj).mean() < 1


@pytest.mark.parametrize(
    ("method", "network", "side"),
    [(MoE(steps=1), UNet((4, 8)), 16), (FedAvg(steps=1), SwinUNETR(12, norm="group"), 32)],
)
def test_a_network_that_takes_one_size_alone_is_refused(
    method: Method, network: Architecture, side: int, tmp_path: Path
) -> None:
    model = trained(method, network, tmp_path, side)
    with pytest.raises(MedPFLError, match=f"takes slices of {side} x {side} alone, and new ones have other sizes"):
        export(model, tmp_path / "organ", "monai")
    export(model, tmp_path / "model.pt", "torchscript")


def test_a_long_slice_is_predicted_by_a_network_whose_lengths_are_multiples_of_nine(tmp_path: Path) -> None:
    model = trained(FedAvg(steps=1), DynUNet((2, 2, 2), ((3, 3), (3, 3))), tmp_path, 18)
    values = np.random.default_rng(0).normal(size=(520, 20, 1)).astype(np.float32)
    nib.save(nib.Nifti1Image(values, np.diag([2.0, 2.0, 2.0, 1.0])), tmp_path / "long.nii.gz")
    [row] = predict(load_deployed(model), tmp_path / "long.nii.gz", tmp_path / "out").rows
    written: Any = nib.load(tmp_path / "out" / str(row["file"]))
    assert written.shape == values.shape
