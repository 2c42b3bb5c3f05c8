# SPDX-License-Identifier: Apache-2.0
"""Tasks: arguments refused, losses and metrics against numbers worked out by hand."""

import json
import math
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

from medpfl.core.errors import ConfigError, DataError, SiteFileError
from medpfl.data.site_file import SiteFile, load_site_file
from medpfl.models.auto import Auto
from medpfl.models.by_hospital import ByHospital
from medpfl.models.dynunet import DynUNet
from medpfl.models.resnet import ResNet
from medpfl.models.unet import FCN, UNet, UNetPlusPlus
from medpfl.tasks import Samples, Segmentation, SiteData, Tabular

THICK = DynUNet((4, 4, 8), strides=((2, 2, 1), (2, 2, 2)))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"architecture": ResNet()}, ["a network that segments", "got ResNet"]),
        ({"architecture": ByHospital(berlin=UNet(), bonn=ResNet())}, ["a network that segments", "bonn=ResNet"]),
        ({"size": [60, 64]}, ["size", "2 multiples of 8 for UNet", "[60, 64]"]),
        ({"size": [64]}, ["size", "2 multiples of 8", "or 3 for patches", "[64]"]),
        ({"size": [0, 0]}, ["size", "[0, 0]"]),
        ({"size": [4, 8], "architecture": UNet((2, 4, 8, 16))}, ["size", "multiples of 8", "[4, 8]"]),
        ({"size": [24, 24], "architecture": UNetPlusPlus()}, ["multiples of 16", "[24, 24]"]),
        ({"size": [16, 24], "architecture": ByHospital(berlin=UNet((2, 4)), bonn=FCN())}, ["multiples of 16"]),
        ({"size": [8, 12, 3], "architecture": ByHospital(berlin=THICK, bonn=UNet((2, 4)))}, ["of 4, 4, 2"]),
        ({"spacing": [1, 1]}, ["spacing", "a list of 3 numbers", "[1, 1]"]),
        ({"spacing": [1, 0, 1]}, ["spacing", "[1.0, 0.0, 1.0]"]),
        ({"spacing": [1, 1, -2]}, ["spacing", "[1.0, 1.0, -2.0]"]),
        ({"spacing": [math.nan, 1, 1]}, ["spacing", "nan"]),
        ({"spacing": [1, math.inf, 1]}, ["spacing", "inf"]),
    ],
)
def test_segmentation_refuses(arguments: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        Segmentation("organ", **arguments)
    for word in ["Segmentation", *words]:
        assert word in str(caught.value)


def test_patches_of_thick_slices_suit_hospitals_with_different_networks() -> None:
    """Along each axis by itself, as they suit each of the networks alone."""
    both = ByHospital(berlin=THICK, bonn=UNet((2, 4)))
    for network in (THICK, UNet((2, 4)), both):
        assert Segmentation("organ", size=(8, 12, 2), architecture=network).size == (8, 12, 2)
    with pytest.raises(ConfigError, match="DynUNet's strides are for 3 axes, the inputs have 2"):
        Segmentation("organ", size=(8, 12), architecture=both)


def test_a_network_that_is_planned_for_all_hospitals_is_not_one_hospitals() -> None:
    with pytest.raises(ConfigError, match="ByHospital: 'bonn' cannot be Auto, which is planned for all hospitals"):
        ByHospital(berlin=UNet(), bonn=Auto())


@pytest.mark.parametrize("hidden", [[0], [8, -1]])
def test_tabular_refuses(hidden: list[int]) -> None:
    with pytest.raises(ConfigError, match=r"Tabular's hidden widths must be at least 1, got \["):
        Tabular("heart", hidden=tuple(hidden))


def slices(*volumes: list[list[int]]) -> Tensor:
    """Volumes as lists of slices, each slice a row of voxels: N x 1 x W."""
    return torch.tensor([row for volume in volumes for row in volume], dtype=torch.uint8).unsqueeze(1)


def samples(targets: Tensor, case: list[int], classes: int = 2) -> Samples:
    names = [f"case{number}" for number in range(max(case) + 1)]
    return Samples(targets.float().unsqueeze(1), targets, np.array(case), names, classes)


NOTHING = [[0, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize(
    ("truth", "found", "dice"),
    [
        ([[0, 1, 1, 0], [0, 0, 1, 0]], [[0, 1, 1, 0], [0, 0, 1, 0]], 1.0),
        # Taken together: 2 * 2 / (3 + 2). The mean over slices would be (1 + 0) / 2 or so.
        ([[0, 1, 1, 0], [0, 0, 1, 0]], [[0, 1, 1, 0], [0, 0, 0, 0]], 0.8),
        ([[1, 1, 0, 0], [0, 0, 0, 0]], [[0, 0, 1, 1], [0, 0, 0, 0]], 0.0),
        (NOTHING, NOTHING, 1.0),  # nothing was there, nothing was found
        (NOTHING, [[0, 0, 0, 0], [0, 0, 0, 1]], 0.0),
        ([[0, 0, 0, 0], [0, 0, 0, 1]], NOTHING, 0.0),
    ],
)
@pytest.mark.slow
def test_dice_of_a_volume(truth: list[list[int]], found: list[list[int]], dice: float) -> None:
    result = Segmentation("organ").evaluate(slices(found), samples(slices(truth), [0, 0]))
    assert result.metrics == {"dice": pytest.approx(dice)}
    assert result.cases == [{"case": "case0", "dice": pytest.approx(dice)}]


@pytest.mark.slow
def test_dice_is_the_mean_over_volumes_whatever_their_depth() -> None:
    truth = slices([[1, 1, 0, 0]], [[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    found = slices([[0, 0, 1, 1]], [[1, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    result = Segmentation("organ").evaluate(found, samples(truth, [0, 1, 1, 1]))
    assert [case["dice"] for case in result.cases] == pytest.approx([0.0, 0.8])
    assert result.metrics["dice"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    ("truth", "found", "dice"),
    [
        ([[0, 1, 2, 2]], [[0, 1, 2, 0]], (1 + 2 / 3) / 2),
        ([[0, 1, 1, 0]], [[0, 1, 0, 0]], (2 / 3 + 1) / 2),  # class 2 is declared, nowhere, and rightly not found
        ([[0, 0, 0, 0]], [[0, 0, 0, 0]], 1.0),
        ([[0, 1, 1, 0]], [[0, 2, 2, 0]], 0.0),
    ],
)
def test_dice_of_three_classes(truth: list[list[int]], found: list[list[int]], dice: float) -> None:
    result = Segmentation("organ").evaluate(slices(found), samples(slices(truth), [0], classes=3))
    assert result.metrics["dice"] == pytest.approx(dice)


def test_a_volumes_dice_does_not_depend_on_the_other_volumes() -> None:
    alone = slices([[0, 1, 1, 0]]), slices([[0, 1, 0, 0]])
    both = slices([[0, 1, 1, 0]], [[2, 2, 2, 2]]), slices([[0, 1, 0, 0]], [[2, 2, 2, 2]])
    task = Segmentation("organ")
    one = task.evaluate(alone[1], samples(alone[0], [0], classes=3)).cases[0]
    assert one == task.evaluate(both[1], samples(both[0], [0, 1], classes=3)).cases[0]


def test_segmentation_loss_is_dice_plus_cross_entropy() -> None:
    outputs = torch.tensor([[[[0.0, 2.0]], [[1.0, -1.0]]]])  # 1 x 2 classes x 1 x 2
    targets = torch.tensor([[[1, 0]]], dtype=torch.uint8)
    first, second = 1 / (1 + math.exp(-1)), 1 / (1 + math.exp(3))  # probability of class 1 in each voxel
    dice = 1 - 2 * first / (first + second + 1)
    entropy = -(math.log(first) + math.log(1 - second)) / 2
    assert float(Segmentation("organ").loss(outputs, targets)) == pytest.approx(dice + entropy, abs=1e-4)


def test_segmentation_decides_by_the_largest_output() -> None:
    outputs = torch.tensor([[0.1, 3.0], [0.2, 1.0], [0.0, 9.0]]).view(1, 3, 1, 2)
    decided = Segmentation("organ").decide(outputs)
    assert decided.tolist() == [[[1, 2]]] and decided.dtype == torch.uint8


@pytest.mark.parametrize("classes", [2, 4])
def test_segmentation_network(classes: int) -> None:
    task = Segmentation("organ", size=(16, 24), architecture=UNet((4, 8, 16)))
    split = Samples(torch.zeros(2, 3, 16, 24), torch.zeros(2, 16, 24), np.array([0, 0]), ["a"], classes)
    network = task.network(SiteData({"train": split}, [str(number) for number in range(classes)]))
    assert network(split.inputs).shape == (2, classes, 16, 24)
    assert any(isinstance(layer, torch.nn.BatchNorm2d) for layer in network.modules())


def site_file(folder: Path, datasets: dict[str, Any]) -> SiteFile:
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": datasets}, sort_keys=False))
    return load_site_file(folder / "site.yaml")


SLICES = Segmentation("organ", size=(8, 8), spacing=(1, 1, 1), architecture=UNet((2, 4)))


def organ(folder: Path, channels: int = 1) -> SiteFile:
    lists: dict[str, list[dict[str, str]]] = {"training": [], "test": []}
    rng = np.random.default_rng(0)
    for name, depth, split in (("a", 3, "training"), ("b", 5, "training"), ("c", 2, "test")):
        label = np.zeros((8, 8, depth), dtype=np.uint8)
        label[2:4, 2:6] = 1
        for kind, values in (("i", rng.normal(size=label.shape).astype(np.float32)), ("l", label)):
            extra = channels if kind == "i" and name == "c" else 1
            stacked = values if extra == 1 else np.stack([values] * extra, axis=-1)
            nib.save(nib.Nifti1Image(stacked, np.eye(4)), folder / f"{name}_{kind}.nii.gz")
        lists[split].append({"image": f"{name}_i.nii.gz", "label": f"{name}_l.nii.gz"})
    (folder / "list.json").write_text(json.dumps(lists))
    labels = {0: "background", 1: "organ", 2: "vessel"}
    return site_file(folder, {"organ": {"kind": "volumes", "datalist": "list.json", "labels": labels}})


def test_segmentation_loads_slices_of_volumes(tmp_path: Path) -> None:
    data = SLICES.load(organ(tmp_path))
    train = data.splits["train"]
    assert train.inputs.shape == (8, 1, 8, 8) and train.targets.shape == (8, 8, 8)
    assert train.case.tolist() == [0, 0, 0, 1, 1, 1, 1, 1] and len(train.names) == 2
    assert len(data.splits["validation"]) == 0 and len(data.splits["test"]) == 2
    assert data.class_names == ["background", "organ", "vessel"] and train.classes == 3
    assert train.targets.flatten(1).sum(dim=1).tolist() == [8] * 8


def test_segmentation_refuses_differing_channels(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"list\.json: test\[0\]: expected 1 channels as in the others, got 2"):
        SLICES.load(organ(tmp_path, channels=2))


def rows(*classes: int) -> Samples:
    targets = torch.tensor(classes)
    return Samples(torch.zeros(len(classes), 1), targets, np.arange(len(classes)), [f"t.csv:{c}" for c in classes])


def binary(*positive: float) -> Tensor:
    second = torch.tensor(positive, dtype=torch.float32)
    return torch.stack([1 - second, second], dim=1)


def test_tabular_metrics() -> None:
    result = Tabular("heart").evaluate(binary(0.1, 0.6, 0.8, 0.4, 0.9), rows(0, 0, 1, 1, 1))
    # Right: 0.1, 0.8, 0.9. Recalls: 1/2 and 2/3. Pairs in order: 0.1 below all three, 0.6 below two of three.
    expected = {"accuracy": 3 / 5, "balanced_accuracy": (1 / 2 + 2 / 3) / 2, "auc": 5 / 6}
    assert result.metrics == pytest.approx(expected)
    assert list(result.metrics) == [metric.name for metric in Tabular("heart").metrics]
    assert result.cases[1] == {"case": "t.csv:0", "class": 0, "predicted": 1, "probability": pytest.approx(0.6)}


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of other tests, whose locks are freed at any time
def test_tabular_metrics_with_one_class() -> None:
    metrics = Tabular("heart").evaluate(binary(0.6, 0.2), rows(1, 1)).metrics
    assert metrics["accuracy"] == metrics["balanced_accuracy"] == 0.5
    assert math.isnan(metrics["auc"])


def test_tabular_metrics_of_a_model_that_diverged() -> None:
    metrics = Tabular("heart").evaluate(binary(math.nan, math.nan), rows(0, 1)).metrics
    assert metrics and all(math.isnan(value) for value in metrics.values())


def test_tabular_metrics_of_three_classes() -> None:
    probability = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.2, 0.4, 0.4], [0.3, 0.3, 0.4]])
    metrics = Tabular("heart").evaluate(probability, rows(0, 1, 1, 2)).metrics
    assert metrics["accuracy"] == metrics["balanced_accuracy"] == 1.0
    # One against the rest: class 0: 1; class 1: 0.5 and 0.4 above 0.1 and 0.3: 1; class 2: 0.4 ties once: 2.5 / 3.
    assert metrics["auc"] == pytest.approx((1 + 1 + 2.5 / 3) / 3)


def test_auc_leaves_out_a_class_that_no_sample_has() -> None:
    probability = torch.tensor([[0.8, 0.1, 0.1], [0.2, 0.5, 0.3], [0.9, 0.05, 0.05], [0.5, 0.3, 0.2]])
    # Class 0: 0.8 and 0.5 against 0.2 and 0.9: two of four pairs; class 1: 0.5, 0.05 against 0.1, 0.3: two of four.
    assert Tabular("heart").evaluate(probability, rows(0, 1, 1, 0)).metrics["auc"] == 0.5
    better = probability[[0, 1, 1, 3]]
    assert Tabular("heart").evaluate(better, rows(0, 1, 1, 0)).metrics["auc"] == 1.0


def test_tabular_loss() -> None:
    task = Tabular("heart")
    expected = -(math.log(1 / (1 + math.exp(-2))) + math.log(1 - 1 / (1 + math.exp(1)))) / 2
    assert float(task.loss(torch.tensor([[2.0], [-1.0]]), torch.tensor([1, 0]))) == pytest.approx(expected)
    expected = -math.log(math.e / (math.e + 1 + math.exp(2)))
    assert float(task.loss(torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([0]))) == pytest.approx(expected)


@pytest.mark.parametrize(("classes", "hidden"), [(2, ()), (2, (8, 4)), (3, ()), (5, (8,))])
def test_tabular_network(classes: int, hidden: tuple[int, ...]) -> None:
    task = Tabular("heart", hidden=hidden)
    split = Samples(torch.randn(7, 6), torch.zeros(7), np.arange(7), ["r"] * 7, classes)
    network = task.network(SiteData({"train": split}, [str(number) for number in range(classes)]))
    outputs = network(split.inputs)
    assert outputs.shape == (7, 1 if classes == 2 else classes)
    widths = [layer.out_features for layer in network.modules() if isinstance(layer, torch.nn.Linear)]
    assert widths == [*hidden, outputs.shape[1]]
    probability = task.decide(outputs)
    assert probability.shape == (7, classes)
    torch.testing.assert_close(probability.sum(dim=1), torch.ones(7))
    if classes == 2:
        torch.testing.assert_close(probability[:, 1], outputs[:, 0].sigmoid())


def test_a_task_needs_its_kind_of_dataset(tmp_path: Path) -> None:
    declared = organ(tmp_path)
    with pytest.raises(SiteFileError, match="'organ' is of kind 'volumes', the job's task needs 'table'"):
        Tabular("organ").load(declared)
    with pytest.raises(SiteFileError, match="asks for dataset 'lung', which this hospital does not declare"):
        Segmentation("lung").load(declared)


def test_tabular_loads_rows(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n" + "".join(f"{number},{number % 2}\n" for number in range(10)))
    table = {
        "kind": "table",
        "files": ["t.csv"],
        "features": {"x": "number"},
        "label": {"column": "y", "classes": {"even": [0], "odd": [1]}},
    }
    data = Tabular("t").load(site_file(tmp_path, {"t": table}))
    assert {split: len(part) for split, part in data.splits.items()} == {"train": 6, "validation": 2, "test": 2}
    train = data.splits["train"]
    assert train.inputs.dtype == torch.float32 and train.targets.dtype == torch.int64
    assert data.class_names == ["even", "odd"] and len(train.names) == 6
    assert [int(name.removeprefix("t.csv:")) % 2 for name in train.names] == train.targets.tolist()
