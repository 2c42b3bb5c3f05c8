# SPDX-License-Identifier: Apache-2.0
"""Volumes as a 3-D task wants them: whole, of any size; and what is refused by a sentence."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.intensity import Window
from medpfl.data.preparation import Spec
from medpfl.data.rows import CaseRows
from medpfl.data.target import Target
from medpfl.data.volumes.declare import Volumes

SPEC = Spec(Target.MASK, ("volumes",), (8, 8, 4), (2.0, 2.0, 2.0))
SHAPES = [(12, 9, 7), (5, 20, 1), (8, 8, 4)]


def written(
    folder: Path, images: list[NDArray[Any]], labels: list[NDArray[np.uint8]], channels: tuple[int, ...] = (1, 1, 1)
) -> Volumes:
    """Volumes of 2 mm, of which the last is the test case; ``channels``: files of each."""
    items = []
    for number, (image, label, files) in enumerate(zip(images, labels, channels, strict=True)):
        names = [f"{number}_{channel}.nii.gz" for channel in range(files)]
        for name in names:
            nib.save(nib.Nifti1Image(image, np.diag([2.0, 2.0, 2.0, 1.0])), folder / name)
        nib.save(nib.Nifti1Image(label, np.diag([2.0, 2.0, 2.0, 1.0])), folder / f"{number}_label.nii.gz")
        items.append({"image": names, "label": f"{number}_label.nii.gz"})
    (folder / "list.json").write_text(json.dumps({"training": items[:-1], "test": items[-1:]}))
    dataset = Volumes(kind="volumes", datalist="list.json", labels={0: "background", 1: "organ"})
    dataset._folder = folder
    return dataset


def scans() -> tuple[list[NDArray[np.float32]], list[NDArray[np.uint8]]]:
    rng = np.random.default_rng(0)
    images = [rng.normal(100, 20, shape).astype(np.float32) for shape in SHAPES]
    return images, [(image > 120).astype(np.uint8) for image in images]


def test_whole_volumes_keep_their_own_shape(tmp_path: Path) -> None:
    images, labels = scans()
    data = written(tmp_path, images, labels).load(SPEC)
    train, test = data.splits["train"], data.splits["test"]
    assert isinstance(train.inputs, CaseRows) and isinstance(train.targets, CaseRows)
    assert [train.inputs.spatial(0), train.inputs.spatial(1)] == SHAPES[:2] and data.input_shape == (1, 8, 8, 4)
    assert len(train) == 2 and train.case.tolist() == [0, 1] and len(data.splits["validation"]) == 0
    assert data.splits["validation"].inputs.shape[1:] == (1, 8, 8, 4)
    for number, (image, label) in enumerate(zip(images[:2], labels[:2], strict=True)):
        expected = (image - image.mean(dtype=np.float64)) / image.std(dtype=np.float64)
        np.testing.assert_allclose(train.inputs.whole(number)[0].numpy(), expected, atol=1e-4)
        assert np.array_equal(train.targets.whole(number).numpy(), label)
    assert torch.equal(test.inputs[:][0, 0], test.inputs.whole(0)[0])  # type: ignore[union-attr]


def test_volumes_beyond_the_memory_budget_lie_in_a_file_and_say_the_same(tmp_path: Path) -> None:
    images, labels = scans()
    dataset = written(tmp_path, images, labels)
    plain = dataset.load(SPEC).splits["train"]
    dataset._storage = dataset._storage.model_copy(update={"memory_gb": 1e-9})
    train = dataset.load(SPEC).splits["train"]
    for mine, other in ((train.inputs, plain.inputs), (train.targets, plain.targets)):
        assert isinstance(mine, CaseRows) and isinstance(other, CaseRows) and not isinstance(mine.values, torch.Tensor)
        assert all(torch.equal(mine.whole(number), other.whole(number)) for number in range(2))
        assert torch.equal(mine[:], other[:]) and torch.equal(mine.patch(0, (1, -2, 3)), other.patch(0, (1, -2, 3)))


def test_a_fixed_window_means_the_same_in_every_volume(tmp_path: Path) -> None:
    images, labels = scans()
    spec = Spec(Target.MASK, ("volumes",), (8, 8, 4), (2.0, 2.0, 2.0), intensity=Window(low=50, high=150))
    train: Any = written(tmp_path, images, labels).load(spec).splits["train"].inputs
    np.testing.assert_allclose(train.whole(0)[0], np.clip((images[0] - 50) / 100, 0, 1), atol=1e-5)


def test_a_volume_that_lacks_a_channel_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"training\[1\]: expected 2 channels as in the others, got 1"):
        written(tmp_path, *scans(), channels=(2, 1, 2)).load(SPEC)


def test_a_label_that_is_not_declared_is_named(tmp_path: Path) -> None:
    images, labels = scans()
    labels[1][0, 0, 0] = 7
    with pytest.raises(DataError, match=r"1_label\.nii\.gz: label value 7 is not declared; expected 0 to 1"):
        written(tmp_path, images, labels).load(SPEC)


def test_a_case_without_foreground_is_a_case(tmp_path: Path) -> None:
    images, labels = scans()
    labels[0][:] = 0
    train = written(tmp_path, images, labels).load(SPEC).splits["train"]
    assert isinstance(train.targets, CaseRows) and train.targets.places(0) == {} and train.targets.places(1)


@pytest.mark.slow
def test_memory_stays_bounded_when_the_volumes_are_ten_times_the_budget(tmp_path: Path) -> None:
    """160 volumes, 210 MB decoded, with a budget of 21 MB: loading them, drawing patches of all and looking at whole
    cases takes the budget and room for the cases that are being read. With a budget for all, the same measure sees all:
    of 100 of them, which is more than the other may take.

    Counted is what the kernel could not drop again: anonymous pages, without those of mapped files.
    """
    image = np.random.default_rng(0).normal(100, 20, (64, 64, 64)).astype(np.float32)
    for name, values in (("image", image), ("label", (image > 120).astype(np.uint8))):
        nib.save(nib.Nifti1Image(values, np.diag([2.0, 2.0, 2.0, 1.0])), tmp_path / f"{name}.nii")
    items = []
    for number in range(160):
        item = {kind: f"{number}_{kind}.nii" for kind in ("image", "label")}
        for kind, name in item.items():
            os.link(tmp_path / f"{kind}.nii", tmp_path / name)
        items.append(item)
    for name, listed in (("few", items[:3]), ("many", items[:100]), ("all", items)):
        (tmp_path / f"{name}.json").write_text(json.dumps({"training": listed[:-1], "test": listed[-1:]}))
    code = """
import sys, threading, time
from pathlib import Path
import torch
from medpfl.data.declared import StorageRule
from medpfl.data.preparation import Spec
from medpfl.data.target import Target
from medpfl.data.volumes.declare import Volumes
from medpfl.tasks.patches import draw_patches

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024 / 1e6

def use(listed, megabytes):
    dataset = Volumes(kind="volumes", datalist=f"{listed}.json", labels={0: "background", 1: "organ"})
    dataset._folder, dataset._storage = Path(sys.argv[1]), StorageRule(memory_gb=megabytes * 1e6 / 2**30)
    train = dataset.load(Spec(Target.MASK, ("volumes",), (16, 16, 16), (2.0, 2.0, 2.0))).splits["train"]
    for start in range(0, len(train), 4):
        draw_patches(train, torch.arange(start, min(start + 4, len(train))), torch.Generator().manual_seed(start))
        if start % 16 == 0:
            assert train.inputs.whole(start).isfinite().all()

def watch():
    while not over.wait(0.005):
        peak[0] = max(peak[0], held())

def grown(listed, megabytes):
    before = peak[0] = held()
    use(listed, megabytes)
    return peak[0] - before

use("few", 1000)  # imports
over, peak = threading.Event(), [0.0]
watching = threading.Thread(target=watch)
watching.start()
print(grown("all", 21), grown("many", 1000))
over.set()
watching.join()
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    bounded, everything = map(float, done.stdout.split())
    assert bounded < 21 + 60 and everything > 100, (bounded, everything)
