# SPDX-License-Identifier: Apache-2.0
"""Metrics: how a task finds them, which value is better, and one from another package."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, recall_score

from brier import Sure
from medpfl.core.errors import ConfigError
from medpfl.data.samples import Samples
from medpfl.job import Job
from medpfl.results.schema import ValidationLine
from medpfl.rounds.simulate import simulate
from medpfl.tasks import Segmentation, Tabular
from medpfl.tasks.metrics import labels
from medpfl.tasks.metrics.measure import Direction, Measure


@pytest.mark.parametrize(("direction", "good", "bad"), [("higher", 2.0, 1.0), ("lower", 1.0, 2.0)])
def test_which_value_is_better(direction: Direction, good: float, bad: float) -> None:
    measure = Measure(direction=direction)
    assert measure.better(good, bad) and not measure.better(bad, good) and not measure.better(good, good)
    assert not measure.better(math.nan, good) and not measure.better(good, math.nan)
    assert measure.gain(good, bad) == 1 and measure.reaches(good, bad) and not measure.reaches(bad, good)
    assert measure.best([bad, math.nan, good, bad]) == good and math.isnan(measure.best([math.nan]))
    ranked: list[float | None] = sorted([None, bad, good], key=measure.rank)
    assert ranked == [good, bad, None]


def test_a_metric_says_its_unit_and_which_values_are_better() -> None:
    days = Measure(direction="lower", unit="days")
    assert days.label("mean_error") == "mean error (days, lower is better)" and days.text(4.2) == "4.200 days"
    assert Measure().label("balanced_accuracy") == "balanced accuracy" and Measure().text(0.5) == "0.500"
    assert Sure("blood").measures["brier"] == Sure("blood").measure == Measure(direction="lower")


def test_a_misspelt_score_gets_the_right_one() -> None:
    with pytest.raises(ConfigError, match=r"Tabular has no metric 'acuracy'; did you mean 'accuracy'\?; its metrics"):
        Tabular("heart", score="acuracy")
    with pytest.raises(
        ConfigError, match=r"Segmentation has no metric 'auc'; its metrics are: dice, hd95, surface_dice, volume_error$"
    ):
        Segmentation("organ", score="auc")


def test_accuracies_are_those_of_scikit_learn() -> None:
    rng = np.random.default_rng(0)
    for classes in (2, 3, 5):
        for count in (1, 7, 30):
            truth, decisions = rng.integers(0, classes, count), torch.from_numpy(rng.random((count, classes)))
            samples = Samples(torch.zeros(count, 1), torch.from_numpy(truth), np.arange(count), [""] * count, classes)
            found = decisions.numpy().argmax(axis=1)
            recall = recall_score(truth, found, labels=np.unique(truth), average="macro")
            assert labels.Accuracy().of_split(decisions, samples) == accuracy_score(truth, found)
            assert labels.BalancedAccuracy().of_split(decisions, samples) == recall


@pytest.mark.slow
def test_a_metric_of_another_package_chooses_the_round_with_its_lowest_value(
    tmp_path: Path, table_sites: dict[str, Path], make_job: Callable[..., Job]
) -> None:
    job = replace(make_job(rounds=4), task=Sure("blood", hidden=(4,)))
    done = simulate(job, table_sites, tmp_path / "results", tmp_path / "home")
    means = {
        (line.model, line.round): line.metrics["brier"]
        for line in done.record.lines
        if isinstance(line, ValidationLine) and line.site == "mean"
    }
    assert min(means.values()) < max(means.values())
    assert done.best
    for model, found in done.best.items():
        lowest = min(value for (name, _), value in means.items() if name == model)
        assert found.score == lowest == means[model, found.round]
