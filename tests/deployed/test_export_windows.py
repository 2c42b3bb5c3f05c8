# SPDX-License-Identifier: Apache-2.0
"""What lies beside an exported model suffices where its network alone does not: photographs that are seen window by
window, and volumes with a class each, to the answer of ``medpfl predict`` without this package and without MONAI."""

import csv
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import yaml
from PIL import Image

from medpfl.core.mixers import Mean
from medpfl.data.intensity import Window
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks.classification import Classification
from medpfl.tasks.contract import Task
from medpfl.tasks.segmentation import Segmentation

pytestmark = pytest.mark.slow

FEW = {"least_hospitals": 1, "least_samples": 1, "least_scored": 1, "least_update": 1}
SPLIT = {"fractions": {"train": 0.5, "validation": 0.25, "test": 0.25}}


def alone(code: str, *arguments: Path) -> None:
    """Run it where nothing of MedPFL, and no MONAI, comes in."""
    check = "import sys; assert not [name for name in sys.modules if name.startswith(('medpfl', 'monai'))]"
    command = [sys.executable, "-c", f"{code}\n{check}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def trained(folder: Path, task: Task, declared: Mapping[str, object]) -> Path:
    """The file of a model of one hospital, whose data lie in ``folder``."""
    (folder / "site.yaml").write_text(yaml.safe_dump({"policy": FEW, "datasets": {"own": declared}}))
    method = FedAvg(steps=8, lr=0.02, batch_size=3)
    settings = Settings(rounds=1, references=(), finetune=0)
    job = Job("t", 1, settings, {"fedavg": Mean()}, method, task)
    simulate(job, {"anna": folder / "site.yaml"}, folder / "results", folder / "home")
    return folder / "home" / "anna" / "t" / "models" / "fedavg-best.safetensors"


WINDOWS = """
import json, sys
from itertools import product
from pathlib import Path
import numpy as np, onnxruntime
folder, photo, out = map(Path, sys.argv[1:])
sys.path.insert(0, str(folder))
from prepare import prepared, shares
told = json.loads((folder / "medpfl.json").read_text())
session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
image, windows, (axis,) = prepared(photo, told), told["inference"]["windows"], told["inference"]["flips"]

def network(part):
    return session.run(None, {"input": np.ascontiguousarray(part)})[0][0]

def flipped(see, part):
    return (see(part) + np.flip(see(np.flip(part, 2 + axis)), 1 + axis)) / 2

def slid(see, whole):
    size, spans = windows["size"], []
    for length, side in zip(whole.shape[2:], size):
        step = int(side * (1 - windows["overlap"]))
        spans.append([min(first, length - side) for first in range(0, length - side + step, step)])
    falls = [np.exp(-0.5 * ((np.arange(n) - (n - 1) / 2) / (n * windows["sigma_scale"])) ** 2) for n in size]
    weights = np.maximum(np.outer(*falls), 1e-3)
    total, count = np.zeros((len(told["classes"]), *whole.shape[2:])), np.zeros(whole.shape[2:])
    for at in product(*spans):
        place = tuple(slice(first, first + side) for first, side in zip(at, size))
        total[(slice(None), *place)] += see(whole[(slice(None), slice(None), *place)]) * weights
        count[place] += weights
    return total / count

of_windows = told["inference"]["flipped"] == "each window"
found = slid(lambda part: flipped(network, part), image) if of_windows else flipped(lambda x: slid(network, x), image)
np.save(out, shares(found, image.shape[2:], told))
"""


def test_each_window_of_a_photograph_is_flipped_by_itself(tmp_path: Path) -> None:
    """Where windows do not fit evenly, flipping the whole image lays others: shares differed by up to 0.5."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (tmp_path / name).mkdir()
    for number in range(8):
        mask = np.zeros((33, 47), np.uint8)
        row, column = rng.integers(2, 25, 2)
        mask[row : row + 6, column : column + 6] = 1
        pixels = rng.integers(0, 90, (33, 47, 3), dtype=np.uint8)
        Image.fromarray(pixels + 120 * mask[..., None]).save(tmp_path / "images" / f"{number}.png")
        Image.fromarray(mask).save(tmp_path / "masks" / f"{number}.png")
    declared = {
        "kind": "images",
        "files": "images/*.png",
        "masks": {"files": "masks/*.png", "labels": {0: "skin", 1: "spot"}},
        "split": SPLIT,
    }
    task = Segmentation("own", size=(16, 32), architecture=UNet((2, 4)), patches=True, flips=(0,))
    model = trained(tmp_path, task, declared)
    export(model, tmp_path / "onnx", "onnx")
    photo = tmp_path / "images" / "0.png"
    alone(WINDOWS, tmp_path / "onnx", photo, tmp_path / "shares.npy")
    predict(load_deployed(model), photo, tmp_path / "ours", probabilities=True)
    expected = np.load(tmp_path / "ours" / "0_probabilities.npy")
    np.testing.assert_allclose(np.load(tmp_path / "shares.npy"), expected, atol=1e-4)


VOLUMES = """
import json, sys
from pathlib import Path
import nibabel as nib, numpy as np, torch
folder, scan, out = map(Path, sys.argv[1:])
told = json.loads((folder / "medpfl.json").read_text())
grid, window = told["grid"], told["task"]["args"]["intensity"]["args"]
assert grid["orientation"] == "RAS"
voxels = torch.from_numpy(nib.as_closest_canonical(nib.load(scan)).get_fdata(dtype=np.float32).copy())[None, None]
small = torch.nn.functional.interpolate(voxels, size=grid["size"], mode=grid["interpolation"])
inputs = ((small - window["low"]) / (window["high"] - window["low"])).clip(0, 1)
np.save(out, torch.jit.load(str(folder / "model.ts"))(inputs).sigmoid().detach().numpy())
"""


def test_volumes_with_a_class_each_are_told_how_they_come_to_one_size(tmp_path: Path) -> None:
    """ "grid" was null, as if nothing were to be known, and no bundle is written of such models."""
    rng = np.random.default_rng(0)
    rows = ["image,ill"]
    for number in range(12):
        image = rng.random((9 + number % 3, 11, 7), dtype=np.float32) * 60 + 40 * (number % 2)
        affine = np.diag([-2.0 if number % 3 == 0 else 2.0, 1.0, 3.0, 1.0])
        nib.save(nib.Nifti1Image(image, affine), tmp_path / f"{number}.nii.gz")
        rows.append(f"{number}.nii.gz,{number % 2}")
    (tmp_path / "list.csv").write_text("\n".join(rows) + "\n")
    (tmp_path / "list.json").write_text(
        '{"training": [' + ", ".join(f'{{"image": "{number}.nii.gz"}}' for number in range(12)) + "]}"
    )
    declared = {
        "kind": "volumes",
        "datalist": "list.json",
        "table": {"file": "list.csv", "image": "image"},
        "label": {"column": "ill", "classes": {"no": [0], "yes": [1]}},
        "split": {"stratify": True, **SPLIT},
    }
    task = Classification("own", (6, 8, 4), ResNet(depth=10, width=4), intensity=Window(low=0, high=100))
    model = trained(tmp_path, task, declared)
    export(model, tmp_path / "torchscript", "torchscript")
    predict(load_deployed(model), tmp_path / "list.json", tmp_path / "ours")
    with (tmp_path / "ours" / "predictions.csv").open(newline="") as file:
        expected = {row["case"]: float(row["p_yes"]) for row in csv.DictReader(file)}
    assert np.ptp(list(expected.values())) > 0.01
    for case in ("0", "1"):
        alone(VOLUMES, tmp_path / "torchscript", tmp_path / f"{case}.nii.gz", tmp_path / "share.npy")
        assert np.load(tmp_path / "share.npy").item() == pytest.approx(expected[case], abs=1e-5)
