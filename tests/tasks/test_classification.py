# SPDX-License-Identifier: Apache-2.0
"""Classification and segmentation of images: networks, training from memory and file, prediction, job folders."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from nvflare.fuel.utils.component_builder import ComponentBuilder
from PIL import Image

from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError, DataError, MedPFLError
from medpfl.core.mixers import Identity
from medpfl.data.rows import FileRows
from medpfl.data.site_file import load_site_file
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.flare.allow import component_classes
from medpfl.job import Job, load_job
from medpfl.job.settings import Settings
from medpfl.methods.local import Local
from medpfl.models.contract import Architecture
from medpfl.models.lenet import LeNet5
from medpfl.models.resnet import ResNet
from medpfl.models.unet import UNet
from medpfl.rounds.simulate import simulate
from medpfl.tasks import Classification, Segmentation
from medpfl.tasks.contract import Task
from pictures import TABLE, declare, write_images
from tools import assert_same, outcome, write_job

TINY = ResNet(width=4, depth=10, pool=False)


def weights(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_lenet_is_fedaps() -> None:
    network = LeNet5().build((1, 28, 28), 11)
    assert weights(network) == 44_555
    assert network(torch.zeros(2, 1, 28, 28)).shape == (2, 11)
    assert LeNet5().build((3, 64, 48), 1)(torch.zeros(2, 3, 64, 48)).shape == (2, 1)


@pytest.mark.parametrize("shape", [(3, 64, 48), (1, 28, 28), (2, 16, 24, 20), (3, 1, 1)])
@pytest.mark.parametrize("pool", [True, False])
def test_resnet_takes(shape: tuple[int, ...], pool: bool) -> None:
    network = replace(TINY, pool=pool).build(shape, 4)
    assert network(torch.zeros(2, *shape)).shape == (2, 4)


def test_resnet_is_resnet() -> None:
    """ResNet18 of width 64 has the original's 11.7 million weights but for the stem (3 x 3, not 7 x 7) and the
    biases of MONAI's three downsampling convolutions."""
    network = ResNet(width=64).build((3, 64, 64), 1000)
    assert weights(network) == 11_689_512 - 64 * 3 * (49 - 9) + 128 + 256 + 512
    assert weights(ResNet(width=16).build((3, 64, 48), 2)) < weights(network) / 15


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ResNet(width=0), "ResNet's width must be at least 1, got 0"),
        (lambda: ResNet(depth=19), "argument 'depth' of ResNet must be 10, 18 or 34, got 19"),  # type: ignore[arg-type]
        (lambda: ResNet().build((7,), 2), r"ResNet needs inputs C x H x W .*got the shape \(7,\)"),
        (lambda: LeNet5().build((1, 15, 20), 2), r"LeNet5 needs .*16 x 16, got the shape \(1, 15, 20\)"),
        (lambda: Classification("a", size=(4,)), r"Classification's size must be 2 or 3 lengths .*got \[4\]"),
        (lambda: Classification("a", size=(0, 4)), r"got \[0, 4\]"),
    ],
)
def test_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def job(task: Task, rounds: int = 2) -> Job:
    settings = Settings(rounds=rounds, references=(), finetune=0)
    return Job("small", 1, settings, {"local": Identity()}, Local(lr=0.01, batch_size=6, epochs=4), task)


TASKS = [
    Classification("skin", size=(16, 16), architecture=TINY),
    Classification("skin", size=(20, 16), architecture=LeNet5(), score="accuracy"),
    Segmentation("skin", size=(16, 16), architecture=UNet((4, 8))),
]


@pytest.mark.parametrize("task", TASKS, ids=["resnet", "lenet", "unet"])
@pytest.mark.slow
@pytest.mark.convolutions
def test_streamed_training_equals_training_from_memory(tmp_path: Path, task: Task) -> None:
    write_images(tmp_path, count=24)
    found = []
    for memory in (1.0, 1e-9):
        path = declare(tmp_path, TABLE, memory_gb=memory)
        assert isinstance(task.load(load_site_file(path)).splits["train"].inputs, FileRows) == (memory < 1)
        simulate(job(task), {"a": path}, tmp_path / f"r{memory}", tmp_path / f"h{memory}")
        found.append(outcome(tmp_path / f"r{memory}"))
    assert_same(*found)


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose malignant ones and whose lesions are easy to tell."""
    folder = tmp_path_factory.mktemp("skin")
    write_images(folder, count=36, size=(24, 20))
    declare(folder, TABLE)
    return folder


def deployed(hospital: Path, task: Task, folder: Path) -> Any:
    simulate(job(task, rounds=8), {"a": hospital / "site.yaml"}, folder / "results", folder / "home")
    return load_deployed(folder / "home" / "a" / "small" / "models" / "local-last.safetensors")


@pytest.mark.slow
@pytest.mark.convolutions
def test_new_images_are_classified(hospital: Path, tmp_path: Path) -> None:
    model = deployed(hospital, TASKS[0], tmp_path)
    done = predict(model, hospital / "images", tmp_path / "out")
    assert [row["case"] for row in done.rows] == [f"i{number:02}.png" for number in range(36)]
    right = [row["predicted"] == ("malignant" if n % 3 == 2 else "benign") for n, row in enumerate(done.rows)]
    assert sum(right) >= 33
    data = model.task.load(load_site_file(hospital / "site.yaml"))
    for name, inputs in zip(data.splits["test"].names, data.splits["test"].inputs, strict=True):
        expected = model.task.decide(model(inputs[None]))[0, 1]
        number = int(name[-6:-4])
        assert done.rows[number]["p_malignant"] == pytest.approx(float(expected), abs=1e-4)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "x.jpg").write_text("no")
    for path, words in (
        (tmp_path / "broken", "x.jpg: expected an image"),
        (tmp_path / "none.png", "no such file"),
    ):
        with pytest.raises(DataError, match=words):
            predict(model, path, tmp_path / "other")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty: the folder holds no \.png"):
        predict(model, tmp_path / "empty", tmp_path / "other")


@pytest.mark.slow
@pytest.mark.convolutions
def test_new_images_are_segmented_in_their_own_size(hospital: Path, tmp_path: Path) -> None:
    model = deployed(hospital, TASKS[2], tmp_path)
    (tmp_path / "new" / "deep").mkdir(parents=True)
    with Image.open(hospital / "images" / "i07.png") as image:
        image.resize((50, 70)).save(tmp_path / "new" / "deep" / "i07.png")
    done = predict(model, tmp_path / "new", tmp_path / "out", probabilities=True)
    with Image.open(tmp_path / "out" / "deep" / "i07.png") as written:
        assert written.mode == "L" and written.size == (50, 70)
        mask = np.asarray(written)
    shares = np.load(tmp_path / "out" / "deep" / "i07_probabilities.npy")
    assert shares.shape == (2, 70, 50) and np.array_equal(shares.argmax(axis=0), mask)
    np.testing.assert_allclose(shares.sum(axis=0), 1, atol=1e-5)
    share = pytest.approx(mask.mean(), abs=1e-6)
    assert 0 < mask.mean() < 1
    assert done.rows == [{"case": "deep/i07", "file": "deep/i07.png", "lesion_share": share}]
    assert next(csv.DictReader(done.file.open()))["file"] == "deep/i07.png"
    with Image.open(hospital / "images" / "i07.png") as image:
        image.convert("RGB").save(tmp_path / "new" / "deep" / "i07.jpg")
    with pytest.raises(DataError, match=r"another image would be written to 'deep/i07' too"):
        predict(model, tmp_path / "new", tmp_path / "other")


@pytest.mark.slow
def test_arrays_are_classified(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    labels = np.arange(40) % 2
    content = {}
    for part, rows in (("train", slice(0, 24)), ("val", slice(24, 32)), ("test", slice(32, 40))):
        content[f"{part}_images"] = (rng.integers(0, 100, (40, 20, 20)) + 120 * labels[:, None, None])[rows].astype(
            "u1"
        )
        content[f"{part}_labels"] = labels[rows, None]
    np.savez(tmp_path / "a.npz", **content)
    arrays = {"kind": "arrays", "file": "a.npz", "classes": {"dark": [0], "bright": [1]}}
    declare(tmp_path, arrays)
    model = deployed(tmp_path, Classification("skin", size=(20, 20), architecture=LeNet5()), tmp_path)
    np.savez(tmp_path / "new.npz", test_images=content["test_images"])
    done = predict(model, tmp_path / "new.npz", tmp_path / "out")
    assert [row["predicted"] for row in done.rows] == ["dark", "bright"] * 4
    assert done.rows[0]["case"] == "new.npz: test_images[0]"
    with pytest.raises(DataError, match="the model's file has no hospital's preparation of its inputs"):
        next(model.task.new_cases(tmp_path / "new.npz", {}))
    with pytest.raises(MedPFLError, match=r"size \[20, 20, 20\] does not fit arrays of 20 x 20"):
        Classification("skin", size=(20, 20, 20)).load(load_site_file(tmp_path / "site.yaml"))


def test_segmentation_needs_masks(tmp_path: Path) -> None:
    write_images(tmp_path)
    path = declare(tmp_path, {key: value for key, value in TABLE.items() if key != "masks"})
    with pytest.raises(DataError, match="needs images with 'masks', which the dataset does not declare"):
        TASKS[2].load(load_site_file(path))


@pytest.mark.parametrize("task", TASKS, ids=["resnet", "lenet", "unet"])
def test_configuration_and_back(tmp_path: Path, task: Task) -> None:
    spec = json.loads(json.dumps(spec_of(task)))
    assert build(spec, Task, "copy") == task
    assert (
        load_job(write_job(job(task), tmp_path / "job")).task == task
    )  # and write_job asserts that the jobs are equal


def test_nested_components_are_checked() -> None:
    def task(architecture: Any) -> dict[str, Any]:
        return {"path": "medpfl.tasks.Classification", "args": {"dataset": "skin", "architecture": architecture}}

    good = build(task({"path": "medpfl.models.resnet.ResNet", "args": {"width": 8}}), Task, "task")
    assert good.architecture == ResNet(width=8)
    for wrong, words in (
        ({"path": "medpfl.models.resnet.ResNet", "args": {"wide": 8}}, "task.architecture: unknown argument 'wide'"),
        ({"path": "medpfl.models.resnet.ResNet", "args": {"depth": 20}}, "task.architecture: argument 'depth'"),
        ({"path": "medpfl.tasks.Tabular", "args": {"dataset": "x"}}, "is no Architecture"),
        ({"path": "medpfl.models.contract.Architecture"}, "is abstract"),
        ({"width": 8}, "argument 'architecture'"),
        ("ResNet", "argument 'architecture'"),
        (8, "argument 'architecture'"),
    ):
        with pytest.raises(ConfigError, match=words):
            build(task(wrong), Task, "task")
    assert isinstance(ResNet(), Architecture)


class FlaresBuilder(ComponentBuilder):
    """FLARE's own builder, as its job configurators use it."""

    def get_module_scanner(self) -> Any:
        return None


@pytest.mark.parametrize("task", TASKS[:2])
def test_flare_builds_nested_components(task: Task) -> None:
    spec = json.loads(json.dumps(spec_of(task)))
    assert FlaresBuilder().build_component(spec) == task
    assert spec_of(task)["args"]["architecture"]["path"] in component_classes()


@pytest.mark.parametrize("task", [TASKS[0], TASKS[2]], ids=["classification", "segmentation"])
@pytest.mark.slow
def test_export(hospital: Path, tmp_path: Path, task: Task) -> None:
    """TorchScript is read back and compared by ``export``; a MONAI bundle segments."""
    deployed(hospital, task, tmp_path)
    model = tmp_path / "home" / "a" / "small" / "models" / "local-last.safetensors"
    assert (export(model, tmp_path / "out", "torchscript") / "model.ts").is_file()
    if isinstance(task, Classification):
        with pytest.raises(MedPFLError, match=r"segment volumes, or whole images; .* is Classification of images: "):
            export(model, tmp_path / "monai", "monai")
    else:
        assert (export(model, tmp_path / "monai", "monai") / "models" / "model.ts").is_file()
