# SPDX-License-Identifier: Apache-2.0
"""The metrics that a job may add: worked out by hand, equal to scikit-learn's and MONAI's, empty sets, one class, and
when they are computed."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import ndimage
from sklearn.metrics import average_precision_score, brier_score_loss, recall_score
from torch import Tensor

from evaluating import evaluate_at
from medpfl.core.errors import ConfigError
from medpfl.data.images.new import ImagesPreparation
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.results.files import read_lines, read_training
from medpfl.results.schema import FinalLine, ValidationLine
from medpfl.tasks import Segmentation, Tabular
from medpfl.tasks.metrics import labels, masks
from medpfl.tasks.metrics.contract import Metric, at_threshold, threshold_for
from medpfl.tasks.region_segmentation import RegionSegmentation
from tools import run

NAN = math.nan


def rows(truth: list[int], classes: int = 2) -> Samples:
    size = len(truth)
    return Samples(torch.zeros(size, 1), torch.tensor(truth), np.arange(size), [f"r{i}" for i in range(size)], classes)


def second(*probability: float) -> Tensor:
    found = torch.tensor(probability, dtype=torch.float32)
    return torch.stack([1 - found, found], dim=1)


# -- of classes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [2, 4])
def test_auprc_and_brier_are_those_of_scikit_learn(classes: int) -> None:
    rng = np.random.default_rng(classes)
    truth = rng.integers(0, classes, 30)
    probability = rng.dirichlet(np.ones(classes), 30)
    decisions, samples = torch.from_numpy(probability), rows(truth.tolist(), classes)
    one_hot = np.eye(classes)[truth]
    area = average_precision_score(
        one_hot[:, 1:] if classes == 2 else one_hot, probability[:, 1:] if classes == 2 else probability
    )
    assert labels.AUPRC().of_split(decisions, samples) == pytest.approx(area)
    brier = brier_score_loss(truth, probability[:, 1]) if classes == 2 else ((probability - one_hot) ** 2).sum(1).mean()
    assert labels.Brier().of_split(decisions, samples) == pytest.approx(brier)


def test_sensitivity_and_specificity_by_hand() -> None:
    validation, seen = rows([0, 0, 0, 1, 1]), second(0.1, 0.2, 0.6, 0.3, 0.7)
    metrics: list[Metric] = [labels.Accuracy(), labels.Sensitivity(), labels.Specificity()]
    threshold = threshold_for(metrics, seen, validation)
    # At 0.3 both of the second class and two of three of the first; at 0.7 one of two and all.
    assert threshold == pytest.approx(0.3)
    assert [metric.of_split(seen, validation) for metric in at_threshold(metrics, threshold)] == [
        pytest.approx(3 / 5), 1, pytest.approx(2 / 3),
    ]  # fmt: skip
    test, found = rows([0, 1, 1, 1]), second(0.29, 0.31, 0.1, 0.9)
    _, sensitivity, specificity = at_threshold(metrics, threshold)
    assert sensitivity.of_split(found, test) == pytest.approx(2 / 3) and specificity.of_split(found, test) == 1
    assert sensitivity.of_split(found, test) == pytest.approx(
        recall_score([0, 1, 1, 1], found[:, 1].numpy() >= threshold)
    )
    assert metrics[1].of_split(found, test) == pytest.approx(1 / 3)  # before anybody chose: 1/2


@pytest.mark.parametrize(
    ("truth", "seen"),
    [([1, 1], second(0.2, 0.9)), ([0, 1], second(NAN, 0.9)), ([0, 1], second(0.9, 0.1))],
    ids=["one class", "NaN", "worse than chance"],
)
def test_a_threshold_that_validation_cannot_choose_is_a_half(truth: list[int], seen: Tensor) -> None:
    assert labels.Sensitivity().choose(seen, rows(truth)) == 0.5
    assert threshold_for([labels.Accuracy()], seen, rows(truth)) is None


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of other tests, whose locks are freed at any time
def test_what_is_not_defined_is_nan() -> None:
    one, diverged = (second(0.6, 0.2), rows([1, 1])), (second(NAN, NAN), rows([0, 1]))
    assert math.isnan(labels.AUPRC().of_split(*one)) and math.isnan(labels.Specificity().of_split(*one))
    assert labels.Sensitivity().of_split(*one) == 0.5
    assert labels.Brier().of_split(*one) == pytest.approx((0.4**2 + 0.8**2) / 2)
    # Chosen: the second class with 0.6, which is right, and the first with 0.8, which is wrong.
    assert labels.ECE().of_split(*one) == pytest.approx((0.4 + 0.8) / 2)
    counts = np.array([[1, 1], [2, 0]])
    for metric in (*labels.LABEL_METRICS, *labels.MORE_LABEL_METRICS):
        assert math.isnan(metric.of_split(*diverged)), metric.name
        if metric in labels.LABEL_METRICS:
            assert np.isnan(metric.of_resamples(*diverged, counts)).all(), metric.name


# -- of masks ---------------------------------------------------------------------------------------------------------

SPACING = (1.0, 2.0, 3.0)
HD95, SURFACE, VOLUME = masks.mask_metrics(SPACING, tolerance=2.0)


def case(*slices: list[list[int]]) -> Tensor:
    """One case: N x H x W."""
    return torch.tensor(slices, dtype=torch.uint8)


def of(metric: Metric, found: Tensor, truth: Tensor, classes: int = 2) -> float:
    samples = Samples(torch.zeros(len(truth), 1), truth, np.zeros(len(truth), dtype=np.int64), ["a"], classes)
    return metric.of_split(found, samples)


EMPTY = [[0, 0, 0], [0, 0, 0]]
CORNER = [[1, 0, 0], [0, 0, 0]]
ACROSS = [[0, 0, 1], [0, 0, 0]]
DIAGONAL = math.hypot(2 * 1, 3 * 2, 2 * 3)


@pytest.mark.filterwarnings("error", "ignore::ResourceWarning")  # of other tests, whose locks are freed at any time
@pytest.mark.parametrize(
    ("truth", "found", "hd95", "surface", "volume"),
    [
        ((CORNER, EMPTY), (CORNER, EMPTY), 0.0, 1.0, 0.0),
        ((CORNER, EMPTY), (EMPTY, CORNER), 3.0, 0.0, 0.0),  # one slice further
        ((CORNER, EMPTY), (ACROSS, EMPTY), 4.0, 0.0, 0.0),  # two columns further
        ((CORNER, EMPTY), ([[0, 0, 0], [1, 0, 0]], EMPTY), 1.0, 1.0, 0.0),  # one row further, within the tolerance
        ((CORNER, EMPTY), (CORNER, CORNER), 3.0, 2 / 3, 0.006),  # percentiles of (0, 3) and of (0): 95 % of the way
        ((EMPTY, EMPTY), (EMPTY, EMPTY), 0.0, 1.0, 0.0),
        ((CORNER, EMPTY), (EMPTY, EMPTY), DIAGONAL, 0.0, 0.006),
        ((EMPTY, EMPTY), (CORNER, CORNER), DIAGONAL, 0.0, 0.012),
    ],
)
def test_masks_by_hand(truth: Any, found: Any, hd95: float, surface: float, volume: float) -> None:
    tolerance = 0.16 if hd95 == 3.0 and surface > 0 else 1e-6
    assert of(HD95, case(*found), case(*truth)) == pytest.approx(hd95, abs=tolerance)
    assert of(SURFACE, case(*found), case(*truth)) == pytest.approx(surface)
    assert of(VOLUME, case(*found), case(*truth)) == pytest.approx(volume)


@pytest.mark.parametrize("region", [False, True])
def test_outputs_that_are_no_numbers_are_no_empty_mask(region: bool) -> None:
    """A broken model had a Dice of 1 of every case without a lesion, so that it could be the best one."""
    given: Any = {"regions": {"lesion": [1]}, "written": [1]} if region else {}
    task = (RegionSegmentation if region else Segmentation)(dataset="d", more_metrics=("hd95", "volume_error"), **given)
    outputs = torch.zeros(1, 1 if region else 2, 2, 3)
    outputs[0, 0] = -1.0 if region else 1.0
    sound, truth = task.decide(outputs), case(EMPTY)
    outputs[0, -1, 1, 2] = NAN
    broken = task.decide(outputs)
    assert broken.dtype == sound.dtype == torch.uint8 and sound.tolist() == truth.tolist()
    for metric in task.tested:
        assert math.isfinite(of(metric, sound, truth)) and math.isnan(of(metric, broken, truth))


def blobs(seed: int) -> Tensor:
    """5 x 12 x 10 with three classes."""
    found = torch.zeros(5, 12, 10, dtype=torch.uint8)
    rng = np.random.default_rng(seed)
    for number in (1, 2):
        z, y, x = rng.integers(0, 3), rng.integers(0, 6), rng.integers(0, 5)
        found[z : z + 2, y : y + 5, x : x + 4] = number
    return found


@pytest.mark.slow
def test_masks_are_those_of_monai() -> None:
    from monai.metrics import compute_hausdorff_distance, compute_surface_dice
    from monai.networks import one_hot

    for seed in range(4):
        found, truth = blobs(seed), blobs(seed + 10)
        one, other = (one_hot(labels.permute(1, 2, 0)[None, None].long(), 3) for labels in (found, truth))
        distance = compute_hausdorff_distance(one, other, percentile=95, spacing=SPACING)
        assert of(HD95, found, truth, 3) == pytest.approx(float(distance.mean()), rel=1e-5)
        surface = compute_surface_dice(one, other, [2.0, 2.0], spacing=SPACING)
        assert of(SURFACE, found, truth, 3) == pytest.approx(float(surface.mean()), rel=1e-5)
        for number in (1, 2):
            assert of(HD95.of_class(number), found, truth, 3) == pytest.approx(float(distance[0, number - 1]), rel=1e-5)
            assert of(SURFACE.of_class(number), found, truth, 3) == pytest.approx(
                float(surface[0, number - 1]), rel=1e-5
            )
        dice = [of(masks.Dice(number), found, truth, 3) for number in (1, 2)]
        assert of(masks.Dice(), found, truth, 3) == pytest.approx(sum(dice) / 2)


def test_one_slice_is_measured_in_its_plane() -> None:
    """In 3-D every pixel of it would lie on the surface."""
    truth, found = torch.zeros(2, 1, 9, 9, dtype=torch.uint8)
    truth[0, 1:8, 1:8] = 1
    found[0, 1:8, 1:8] = 1
    found[0, 4, 4] = 0  # a hole: 3 rows from the nearest edge
    from monai.metrics import compute_hausdorff_distance

    def distance(*axes: int) -> float:
        one, other = (labels[0].float().view(1, 1, *axes) for labels in (found, truth))
        spacing = SPACING[: len(axes)]
        return float(compute_hausdorff_distance(one, other, include_background=True, percentile=95, spacing=spacing))

    assert of(HD95, found, truth) == pytest.approx(distance(9, 9)) and distance(9, 9) > 1 > distance(9, 9, 1)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_a_sagittal_or_coronal_slice_is_measured_in_its_plane_too(axis: int) -> None:
    """Masks H x W x D of one slice along any axis, against surfaces and distances by SciPy."""
    rng = np.random.default_rng(axis)
    spacing = [mm for place, mm in enumerate(SPACING) if place != axis]
    found, truth = (ndimage.binary_opening(ndimage.gaussian_filter(rng.random((11, 9)), 1) > 0.5) for _ in range(2))
    edges = [mask & ~ndimage.binary_erosion(mask) for mask in (found, truth)]
    apart = [ndimage.distance_transform_edt(~other, sampling=spacing)[edge] for edge, other in (edges, edges[::-1])]
    near = sum(int((each <= 2.0).sum()) for each in apart) / sum(map(len, apart))
    flat = [torch.from_numpy(mask).unsqueeze(axis) for mask in (found, truth)]
    expected = max(float(np.percentile(each, 95)) for each in apart)
    assert HD95.of_masks(*flat) == pytest.approx(expected, rel=1e-5) and expected > 0
    assert SURFACE.of_masks(*flat) == pytest.approx(near, abs=1e-5) and 0 < near < 1


# -- tasks ------------------------------------------------------------------------------------------------------------


def test_a_task_offers_them() -> None:
    task = Segmentation("organ", more_metrics=("hd95", "dice_2", "hd95_1"), score="surface_dice", tolerance=1.0)
    assert [metric.name for metric in task.metrics] == ["dice"]
    assert [metric.name for metric in task.watched] == ["dice", "surface_dice"]
    assert list(task.measures) == ["dice", "surface_dice", "hd95", "dice_2", "hd95_1"]
    assert task.measures["hd95_1"].label("hd95_1") == "hd95 1 (mm, lower is better)"
    assert task.measure.direction == "higher" and not task.measures["hd95"].better(2, 1)
    plain = Tabular("blood", score="brier")
    assert list(plain.measures) == ["accuracy", "balanced_accuracy", "auc", "brier"] and plain.measure.better(0.1, 0.2)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Tabular("blood", more_metrics=("auprcs",)), "Tabular has no metric 'auprcs'; did you mean 'auprc'"),
        (lambda: Segmentation("organ", more_metrics=("hd95_x",)), "Segmentation has no metric 'hd95_x'"),
        (lambda: Segmentation("organ", score="dice_01"), "has no metric 'dice_01'; did you mean 'dice'"),
        (lambda: Segmentation("organ", tolerance=-1.0), r"tolerance \(mm\) must be at least 0, got -1"),
        (lambda: told(Tabular("blood", more_metrics=("sensitivity",)), 3), "sensitivity is a metric of two classes"),
        (lambda: told(Tabular("blood", score="specificity"), 3), "there are 3: class 0, class 1, class 2"),
        (lambda: told(Segmentation("organ", more_metrics=("dice_3",)), 3), "'dice_3' is of the class with the number"),
        (lambda: told(Segmentation("organ", more_metrics=("dice_0",)), 3), "the numbers here are 1 to 2, after the"),
        (lambda: told(Segmentation("organ", score="hd95"), 2), "'hd95' is measured in mm, and the pixels of .* images"),
    ],
)  # fmt: skip
def test_what_is_refused(make: Callable[[], Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()


def told(task: Any, classes: int) -> Any:
    """The task, told of photographs with so many classes."""
    names = [f"class {number}" for number in range(classes)]
    preparation = ImagesPreparation(channels=3)
    return task.informed(SiteData({"train": rows([0, 1], classes)}, names, preparation))


@pytest.mark.slow
def test_when_they_are_computed_and_where_they_are_told(
    tmp_path: Path, make_job: Callable[..., Job], table_sites: dict[str, Path]
) -> None:
    """At every validation what every job has and the score; at the test all. The lowest score is the best."""
    every = ("sensitivity", "specificity", "auprc", "ece")
    job = replace(make_job(rounds=2), task=Tabular("blood", hidden=(4,), score="brier", more_metrics=every))
    run(job, table_sites, tmp_path)
    lines = read_lines(tmp_path / "results")
    usual = ["accuracy", "balanced_accuracy", "auc", "brier"]
    seen = [line for line in lines if isinstance(line, ValidationLine)]
    tested = [line for line in lines if isinstance(line, FinalLine)]
    assert {tuple(line.metrics) for line in seen if line.site != "mean"} == {tuple(usual)}
    assert {tuple(line.metrics) for line in tested} == {(*usual, *every)}
    summary = read_training(tmp_path / "results")
    assert summary.measure("brier").direction == summary.measure("ece").direction == "lower"
    means = [line.metrics["brier"] or 1.0 for line in seen if (line.site, line.model) == ("mean", "personal")]
    assert summary.best["personal"].score == min(means)

    model = next((tmp_path / "home").glob("anna/*/models/personal-best.safetensors"))
    deployed = load_deployed(model)
    assert deployed.meta.history is not None and deployed.meta.history.threshold is not None
    card = model.with_suffix(".md").read_text()
    assert "| auprc | " in card and f'"at least {deployed.meta.history.threshold:.4f}"' in card
    again = evaluate_at(deployed, load_site_file(table_sites["anna"]), "test").metrics
    assert again == pytest.approx(deployed.meta.history.test, abs=1e-6)
