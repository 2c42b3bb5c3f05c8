# SPDX-License-Identifier: Apache-2.0
"""Plans against those that nnU-Net printed, as far as they are public with what they were made from."""

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.component import build
from medpfl.core.errors import ConfigError
from medpfl.data.fingerprint import Fingerprint
from medpfl.tasks.planning import plan
from medpfl.tasks.segmentation import Segmentation


def of(
    shape: tuple[float, ...],
    spacing: tuple[float, ...] = (1, 1, 1),
    cases: int = 100,
    channels: int = 1,
    classes: int = 3,
) -> Fingerprint:
    return Fingerprint.model_validate(
        {"cases": cases, "channels": channels, "classes": classes, "spacing": spacing, "fine": spacing, "shape": shape}
    )


LEVELS = [*[(2, 2, 2)] * 4, (1, 2, 2)]


@pytest.mark.parametrize(
    ("given", "size", "batch", "strides"),
    [
        # https://github.com/MIC-DKFZ/nnUNet/issues/148, the plan as its author prints it
        (of((36, 50, 35), cases=260), (40, 56, 40), 9, [(2, 2, 2)] * 3),
        # https://github.com/MIC-DKFZ/nnUNet/issues/1081, stage 0
        (of((120, 285, 285), (1.7987096, 1.54576606, 1.54576606), cases=80, classes=2), (80, 192, 160), 2, LEVELS),
        # https://github.com/MIC-DKFZ/nnUNet/issues/856, stages 0 and 1 (batch 1 there, of two GPUs)
        (of((195, 207, 207), (2.473119, 1.89831205, 1.89831205), cases=131), (128, 128, 128), 2, [(2, 2, 2)] * 5),
        (of((482, 512, 512), (1.0, 0.76757812, 0.76757812), cases=131), (128, 128, 128), 2, [(2, 2, 2)] * 5),
        # https://github.com/MIC-DKFZ/nnUNet/issues/2094 and 1768, patches of version 2 at 1.03 times the full spacing
        (of((244.66, 497.09, 497.09), (1.28233, 0.80871, 0.80871), cases=63, classes=2), (80, 192, 160), 2, LEVELS),
    ],
    ids=["hippocampus", "pancreas", "liver, coarse", "liver", "lung"],
)
def test_published_plans(given: Fingerprint, size: tuple[int, ...], batch: int, strides: list[tuple[int, ...]]) -> None:
    found = plan([given])
    assert (found.size, found.batch_size, list(found.strides)) == (size, batch, strides)
    assert found.spacing == given.spacing
    with torch.device("meta"):
        network = found.architecture().build((given.channels, *found.size), given.classes).eval()
        assert network(torch.empty(1, given.channels, *found.size)).shape == (1, given.classes, *found.size)


@pytest.mark.parametrize(
    ("given", "size", "strides"),
    [
        (of((138, 170, 138), cases=484, channels=4, classes=4), (128, 128, 128), [(2, 2, 2)] * 5),
        (of((115, 320, 232), (1.37, 1.25, 1.25), cases=20, classes=2), (80, 192, 160), LEVELS),
        (
            of((20, 320, 319), (3.6, 0.62, 0.62), cases=32, channels=2), (20, 320, 256),
            [(1, 2, 2), (1, 2, 2), (2, 2, 2), (2, 2, 2), (1, 2, 2), (1, 2, 2)],
        ),
    ],
    ids=["brain", "heart", "prostate"],
)  # fmt: skip
def test_other_shapes_of_the_decathlon(
    given: Fingerprint, size: tuple[int, ...], strides: list[tuple[int, ...]]
) -> None:
    """What the rules give here for its brain, heart and prostate; no public plan was found to compare with."""
    found = plan([given])
    assert (found.size, found.batch_size, list(found.strides)) == (size, 2, strides)


def test_kernels_of_thick_slices() -> None:
    """Between slices that lie far apart nothing is convolved before the other axes are as coarse."""
    found = plan([of((20, 320, 319), (3.6, 0.62, 0.62), cases=32, channels=2)])
    assert found.kernels == ((1, 3, 3), (1, 3, 3), *[(3, 3, 3)] * 5)


def test_hospitals_weigh_by_their_cases() -> None:
    large, small = of((36, 50, 35), cases=200), of((60, 80, 60), (0.5, 0.5, 0.5), cases=60)
    together = plan([small, large])
    assert together.spacing == (1, 1, 1) and together.size == plan([of((36, 50, 35), cases=260)]).size
    assert plan([large, small]) == together
    assert plan([of((36, 50, 35), cases=10), of((60, 80, 60), (0.5, 0.5, 0.5), cases=60)]).spacing == (0.5, 0.5, 0.5)


def test_one_axis_of_thick_slices_takes_the_finer_ones() -> None:
    thick = of((512, 512, 40), (0.7, 0.7, 5.0))
    fine = thick.model_copy(update={"fine": (0.6, 0.6, 2.5)})
    assert plan([fine]).spacing == (0.7, 0.7, 2.5) and plan([thick]).spacing == (0.7, 0.7, 5.0)
    assert plan([thick.model_copy(update={"fine": (0.6, 0.6, 0.1)})]).spacing == (0.7, 0.7, 0.7)


def test_a_patch_may_be_bounded() -> None:
    given = of((138, 170, 138), cases=484, channels=4, classes=4)
    for most in [(64, 96, 64), (70, 70, 41), (33, 200, 200), (16, 16, 16)]:
        found = plan([given], most)
        assert all(length <= bound for length, bound in zip(found.size, most, strict=True)), (most, found.size)
        found.architecture(2).build((4, *found.size), 4)
    assert plan([given], (999, 999, 999)) == plan([given])
    with pytest.raises(ConfigError, match="too small for a network of three levels"):
        plan([given], (7, 7, 7))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "one number of channels, got no fingerprint"),
        ([of((36, 50, 35)), of((36, 50, 35), channels=2)], r"one number of channels, got \[1, 2\]"),
        ([of((36, 50, 35)), of((36, 50, 35), classes=2)], r"one number of classes, got \[2, 3\]"),
        ([of((5, 5, 5))], r"volumes of \[5, 5, 5\] voxels are too small for a network of three levels"),
    ],
)
def test_what_cannot_be_planned(given: list[Fingerprint], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(given)


def write_site(folder: Path, cases: int) -> Path:
    """Volumes stored with their axes in another order: axial first, from left to right."""
    folder.mkdir()
    affine = np.array([[0, 0, -1.0, 0], [0, 1.5, 0, 0], [3.0, 0, 0, 0], [0, 0, 0, 1]])
    items = []
    for number in range(cases + 2):
        values = np.zeros((16, 20 + 2 * number, 24), dtype=np.uint8)
        for kind in ("image", "label"):
            nib.save(nib.Nifti1Image(values, affine), folder / f"{kind}{number}.nii.gz")
        items.append({"image": f"image{number}.nii.gz", "label": f"label{number}.nii.gz"})
    (folder / "list.json").write_text(
        json.dumps({"training": items[:-2], "validation": items[-2:-1], "test": items[-1:]})
    )
    dataset = {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}
    file = folder / "site.yaml"
    file.write_text(yaml.safe_dump({"datasets": {"organ": dataset}}))
    return file


def test_from_files_to_the_jobs_settings(tmp_path: Path) -> None:
    run = CliRunner()
    told = []
    for site, cases in (("anna", 5), ("berta", 7)):
        told.append(tmp_path / f"{site}.json")
        file = write_site(tmp_path / site, cases)
        done = run.invoke(app, ["fingerprint", str(file), "-o", str(told[-1])])
        assert done.exit_code == 0, done.output
    content = json.loads(told[0].read_text())
    assert content["shape"] == [24, 24, 16] and content["spacing"] == [1.0, 1.5, 3.0] and content["cases"] == 5
    assert content.keys() == {"cases", "channels", "classes", "spacing", "fine", "shape"}
    done = run.invoke(app, ["plan", "organ", *map(str, told), "--features", "4"])
    assert done.exit_code == 0, done.output
    settings = json.loads(done.output)
    task = build(settings["task"], Segmentation, "task")
    assert task.dataset == "organ" and task.spacing == (1.0, 1.5, 3.0) and task.size == (24, 28, 16)
    assert settings["batch_size"] >= 2
    broken = tmp_path / "broken.json"
    broken.write_text(json.dumps({**content, "spacing": [0, 1, 1]}))
    done = run.invoke(app, ["plan", "organ", str(broken)])
    assert done.exit_code == 1 and "broken.json" in str(done.exception) and "spacing" in str(done.exception)


def test_too_few_cases_tell_nothing(tmp_path: Path) -> None:
    file = write_site(tmp_path / "anna", 3)
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "policy": {"least_statistic": 5}}))
    done = CliRunner().invoke(app, ["fingerprint", str(file)])
    assert done.exit_code == 1 and "'least_statistic'" in str(done.exception)
