# SPDX-License-Identifier: Apache-2.0
"""Exported models from a raw file to the answer, without this package: images by ONNX Runtime, TorchScript and MONAI's
bundle tools, a table by TorchScript, with the numbers and the program that lie beside the model."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.data import MetaTensor
from PIL import Image

from medpfl.core.mixers import SoftPull
from medpfl.data.pixels import read_image
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.monai_bundle import _of_images, _run
from medpfl.deployed.monai_images import loading
from medpfl.deployed.predict import predict
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import softpull
from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from monai_command import run_bundle
from pictures import TABLE, declare, write_images
from small_jobs import write_table_sites
from tools import run

SOFT = {"model": SoftPull(lam=0.5)}


@pytest.fixture(scope="module")
def segmenting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of colour images of 40 x 30 pixels, at 16 x 16, with a test-time flip."""
    folder, sites = tmp_path_factory.mktemp("images"), {}
    for site in ("anna", "berta"):
        write_images(folder / site, 16, (40, 30))
        sites[site] = declare(folder / site, TABLE)
    task = Segmentation(dataset="skin", size=(16, 16), architecture=UNet((4, 8), residual_units=1), flips=(1,))
    job = Job("t", 2, Settings(rounds=1, references=()), SOFT, softpull.SoftPull(steps=20, lr=0.05), task)
    run(job, sites, folder)
    return folder / "home" / "anna" / "t" / "models" / "personal-best.safetensors"


def write_raw(folder: Path) -> Path:
    """A photograph of another size than the model's, as a PPM file."""
    pixels = np.random.default_rng(5).integers(0, 120, (53, 37, 3), dtype=np.uint8)
    pixels[10:30, 12:22] += 120
    folder.mkdir()
    Image.fromarray(pixels).save(folder / "photo.ppm")
    return folder / "photo.ppm"


def expected_shares(model: Path, photo: Path) -> np.ndarray[Any, Any]:
    """What ``medpfl predict --probabilities`` writes, which is not the same everywhere."""
    predict(load_deployed(model), photo, photo.parent.parent / "ours", probabilities=True)
    found: np.ndarray[Any, Any] = np.load(photo.parent.parent / "ours" / "photo_probabilities.npy")
    assert found.shape == (2, 53, 37) and np.ptp(found[1]) > 0.01
    return found


def alone(code: str, *arguments: Path) -> None:
    """Run it where nothing of MedPFL, and no MONAI, comes in."""
    check = "import sys; assert not [name for name in sys.modules if name.startswith(('medpfl', 'monai', 'PIL'))]"
    command = [sys.executable, "-c", f"{code}\n{check}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


IMAGES = """
import json, sys
from pathlib import Path
import numpy as np, onnxruntime
folder, photo, out = map(Path, sys.argv[1:])
sys.path.insert(0, str(folder))
from prepare import prepared, shares
told = json.loads((folder / "medpfl.json").read_text())
inputs = prepared(photo, told)
session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
outputs = session.run(None, {"input": inputs})[0]
for axis in told["inference"]["flips"]:
    mirrored = np.ascontiguousarray(np.flip(inputs, 2 + axis))
    outputs = (outputs + np.flip(session.run(None, {"input": mirrored})[0], 2 + axis)) / 2
np.save(out, shares(outputs[0], (53, 37), told))
"""


@pytest.mark.slow
def test_an_image_from_the_raw_file_with_onnxruntime_and_numpy(segmenting: Path, tmp_path: Path) -> None:
    photo = write_raw(tmp_path / "raw")
    export(segmenting, tmp_path / "out", "onnx")
    alone(IMAGES, tmp_path / "out", photo, tmp_path / "shares.npy")
    np.testing.assert_allclose(np.load(tmp_path / "shares.npy"), expected_shares(segmenting, photo), atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("kind", ["RGB", "RGBA", "LA", "P", "1", "transparent palette", "L"])
def test_a_bundle_sees_an_image_as_this_package_does(tmp_path: Path, kind: str, channels: int) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (9, 7, 4), dtype=np.uint8)
    image = Image.fromarray(pixels if kind == "RGBA" else pixels[..., :3])
    image = Image.fromarray(pixels[..., 2:], "LA") if kind == "LA" else image
    exif = Image.Exif()
    exif[0x0112] = 6
    path = tmp_path / ("i.tif" if kind == "L" else "i.png")
    if "palette" in kind:
        image.quantize(16).save(path, exif=exif, transparency=3)
    else:
        image.convert(kind).save(path, exif=exif)
    steps = {"_target_": "Compose", "transforms": loading(channels)}
    parser = ConfigParser({"imports": ["$from PIL import Image", "$from PIL import ImageOps"], "steps": steps})
    found = parser.get_parsed_content("steps")({"image": path})["image"]
    np.testing.assert_allclose(np.asarray(found), read_image(path, channels) / 255, atol=1e-6)


@pytest.mark.parametrize("kind", ["16 bits", "32 bits", "fractions", "two pictures"])
def test_a_bundle_refuses_an_image_of_which_it_would_see_something_else(tmp_path: Path, kind: str) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (9, 7), dtype=np.uint8)
    deep: dict[str, np.ndarray[Any, Any]] = {
        "16 bits": pixels.astype(np.uint16) * 257,
        "32 bits": pixels.astype(np.int32) * 257,
        "fractions": pixels.astype(np.float32) / 255,
    }
    more = {"save_all": True, "append_images": [Image.fromarray(pixels)]} if kind == "two pictures" else {}
    Image.fromarray(deep.get(kind, pixels)).save(tmp_path / "i.tif", **more)
    steps = {"_target_": "Compose", "transforms": loading(1)}
    parser = ConfigParser({"imports": ["$from PIL import Image", "$from PIL import ImageOps"], "steps": steps})
    with pytest.raises(RuntimeError) as error:
        parser.get_parsed_content("steps")({"image": tmp_path / "i.tif"})
    assert "expected one picture of 8 bits: " in str(error.getrepr(style="short"))


def test_a_bundle_writes_no_mask_of_outputs_that_are_no_numbers(tmp_path: Path) -> None:
    content = _run(_of_images(3))
    parser = ConfigParser({**content, "output_dir": str(tmp_path)})
    steps = parser.get_parsed_content("postprocessing")
    outputs = torch.zeros(2, 5, 4)
    outputs[1, 2, 2] = 1
    steps({"pred": MetaTensor(outputs)})
    assert len(list(tmp_path.iterdir())) == 1
    outputs[0, 0, 0] = torch.nan
    with pytest.raises(RuntimeError) as error:
        steps({"pred": MetaTensor(outputs)})
    assert "the outputs are not numbers (NaN or infinite)" in str(error.getrepr(style="short"))


@pytest.mark.slow
def test_monai_runs_a_bundle_on_images(segmenting: Path, tmp_path: Path) -> None:
    photo = write_raw(tmp_path / "raw")
    bundle = export(segmenting, tmp_path / "skin", "monai")
    folders = ["--dataset_dir", str(photo.parent), "--output_dir", str(tmp_path / "out")]
    command = ["run", "--config_file", "configs/inference.json", *folders]
    run_bundle(command, bundle)
    expected = expected_shares(segmenting, photo)
    found = np.asarray(Image.open(tmp_path / "out" / "photo_seg.png"))
    assert found.shape == (53, 37) and (found == expected.argmax(axis=0)).mean() > 0.999
    network = torch.jit.load(str(bundle / "models" / "model.ts"))
    pixels = np.asarray(Image.open(photo)).transpose(2, 0, 1).astype(np.float32) / 255
    np.testing.assert_allclose(network(torch.from_numpy(pixels)[None])[0].detach().numpy(), expected, atol=1e-5)
    described = json.loads((bundle / "configs" / "metadata.json").read_text())
    assert described["network_data_format"]["inputs"]["image"]["num_channels"] == 3


ROWS = """
import sys, subprocess
import numpy as np, torch
folder, table, out = sys.argv[1:]
subprocess.run([sys.executable, folder + "/prepare.py", table, out], check=True)
np.save(out, torch.jit.load(folder + "/model.ts")(torch.from_numpy(np.load(out))).detach().numpy())
"""


@pytest.mark.slow
def test_a_table_from_the_raw_file_with_torch_and_numpy(tmp_path: Path) -> None:
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    run(
        Job("t", 2, Settings(rounds=1, references=()), SOFT, softpull.SoftPull(), Tabular("blood", (4,))),
        sites,
        tmp_path,
    )
    file = tmp_path / "home" / "berta" / "t" / "models" / "personal-best.safetensors"
    export(file, tmp_path / "out", "torchscript")
    alone(ROWS, tmp_path / "out", tmp_path / "sites" / "berta.csv", tmp_path / "o.npy")
    model = load_deployed(file)
    from medpfl.data.kinds import read_preparation

    cases = read_preparation(model.preparation, model.task.spec).new_cases(
        tmp_path / "sites" / "berta.csv", model.task.spec
    )
    expected = np.concatenate([model(case.inputs).numpy() for case in cases])
    np.testing.assert_allclose(np.load(tmp_path / "o.npy"), expected, atol=1e-5)
