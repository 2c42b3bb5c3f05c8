# SPDX-License-Identifier: Apache-2.0
"""Which model a hospital's validation cases support."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from medpfl.data.samples import Samples
from medpfl.deployed.choice import choose
from medpfl.tasks.metrics.labels import AUC
from medpfl.tasks.metrics.masks import Dice
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet, sheet_of, sheet_of_cases

HIGHER, LOWER = Measure(), Measure(direction="lower")


def samples(count: int, targets: list[int] | None = None) -> Samples:
    names = [f"case {number}" for number in range(count)]
    return Samples(torch.zeros(count, 1), torch.tensor(targets or [0] * count), np.arange(count), names)


def sheet(values: NDArray[np.float64]) -> Sheet:
    return sheet_of_cases(Dice(), values.tolist(), samples(len(values)))


def test_a_clear_gain_is_taken_whatever_the_direction() -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=20)
    better, worse = base + 0.5 + 0.1 * rng.normal(size=20), base - 0.5
    sheets = {"worse": sheet(worse), "personal": sheet(better), "local": sheet(base)}
    found = choose(sheets, "local", HIGHER, 0)
    assert found.model == "personal" and found.patients == 20
    assert found.gain == pytest.approx(0.5, abs=0.1) and found.error < 0.1
    assert found.interval is not None and 0.4 < found.interval[0] < found.interval[1] < 0.6
    assert choose(sheets, "local", LOWER, 0).model == "worse"


def test_within_one_standard_error_the_hospital_stays_with_its_own() -> None:
    base, noise = np.zeros(20), np.tile([1.0, -1.0], 10)
    error = 1 / math.sqrt(19)
    for gain, taken in ((0.8 * error, "local"), (1.3 * error, "personal")):
        found = choose({"local": sheet(base), "personal": sheet(base + noise + gain)}, "local", HIGHER, 0)
        assert found.model == taken and found.error == pytest.approx(error, rel=0.1)


@pytest.mark.slow
def test_the_best_of_many_that_are_all_alike_is_seldom_taken() -> None:
    """What cross-fitting is for: the best of six scores on eight patients looks better than the local one."""
    rng, taken, fooled, hospitals = np.random.default_rng(0), 0, 0, 200
    for number in range(hospitals):
        found = {f"model {place}": sheet(rng.normal(size=8)) for place in range(6)}
        found["local"] = sheet(rng.normal(size=8))
        taken += choose(found, "local", HIGHER, number).model != "local"
        best = max(found.values(), key=lambda one: one.score)
        difference = (best.answers - found["local"].answers).numpy()
        fooled += difference.mean() > difference.std(ddof=1) / math.sqrt(8)
    assert taken < 0.35 * hospitals < 0.5 * hospitals < fooled


def test_by_a_metric_of_all_cases_together() -> None:
    truth = [0, 1] * 8
    right = torch.tensor([[0.8, 0.2], [0.2, 0.8]] * 8)
    chance = torch.full((16, 2), 0.5)
    sheets = {name: sheet_of(AUC(), d, samples(16, truth)) for name, d in (("local", chance), ("average", right))}
    found = choose(sheets, "local", HIGHER, 0)
    assert (found.model, found.scores) == ("average", {"local": 0.5, "average": 1.0})
    assert choose({**sheets, "local": sheets["average"]}, "local", HIGHER, 0).model == "local"  # nothing to gain


@pytest.mark.parametrize("values", [[1.0], [math.nan, 1.0]])
def test_where_nothing_can_be_said_it_is_the_local_model(values: list[float]) -> None:
    local = np.array(values)
    found = choose({"local": sheet(local), "personal": sheet(local + 9)}, "local", HIGHER, 0)
    assert found.model == "local" and math.isnan(found.gain) and found.interval is None


def test_a_model_without_a_score_is_never_taken() -> None:
    base = np.arange(8.0)
    found = choose({"local": sheet(base), "diverged": sheet(np.full(8, math.nan))}, "local", HIGHER, 0)
    assert found.model == "local" and math.isnan(found.scores["diverged"])
