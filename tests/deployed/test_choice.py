# SPDX-License-Identifier: Apache-2.0
"""Which model a hospital's validation cases support."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.special import ndtr, ndtri, stdtrit
from scipy.stats import binom

from medpfl.data.samples import Samples
from medpfl.deployed.card import why
from medpfl.deployed.choice import ONE_ERROR, choose, critical
from medpfl.deployed.model_file import Chosen
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


def test_with_one_other_model_it_is_the_rule_of_one_standard_error() -> None:
    base, noise = np.zeros(20), np.tile([1.0, -1.0], 10)
    error = 1 / math.sqrt(19)
    for gain, taken in ((0.8 * error, "local"), (1.3 * error, "personal")):
        found = choose({"local": sheet(base), "personal": sheet(base + noise + gain)}, "local", HIGHER, 0)
        assert found.model == taken and found.error == pytest.approx(error, rel=0.1)
        assert found.best == "personal" and found.gain == pytest.approx(gain)
        assert found.needed == pytest.approx(stdtrit(19, ndtr(1)), rel=0.1)


def test_the_more_models_differ_the_more_it_takes() -> None:
    """Of independent gains the critical value is the known one of a maximum; of copies of one gain that of one."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(20_000, 6))
    copies = np.repeat(draws[:, :1], 6, axis=1)
    for found, count in ((critical(draws, ONE_ERROR, 10_000), 6), (critical(copies, ONE_ERROR, 10_000), 1)):
        assert found == pytest.approx(ndtri(ndtr(1) ** (1 / count)), abs=0.04)
    assert critical(draws, ONE_ERROR, 8) == pytest.approx(
        stdtrit(7, ndtr(critical(draws, ONE_ERROR, 10_000))), abs=0.01
    )


def test_a_model_that_is_the_local_one_is_not_taken_and_costs_nothing() -> None:
    base = np.random.default_rng(0).normal(size=12)
    sheets = {"local": sheet(base), "same": sheet(base)}
    assert choose(sheets, "local", HIGHER, 0).model == "local"
    always = choose({**sheets, "personal": sheet(base + 0.1)}, "local", HIGHER, 0)
    assert always.model == "personal" and always.error == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("patients", [8, 30])
def test_where_nothing_is_a_gain_one_hospital_in_six_leaves_its_model_whatever_the_candidates(patients: int) -> None:
    """The rule's theory: with probability 1 - ONE_ERROR. The bound is what 200 such hospitals exceed once in 1000."""
    rng, hospitals = np.random.default_rng(0), 200
    taken = 0
    for number in range(hospitals):
        found = {name: sheet(rng.normal(size=patients)) for name in ("local", *"abcdef")}
        taken += choose(found, "local", HIGHER, number).model != "local"
    assert taken <= binom.isf(0.001, hospitals, 1 - ONE_ERROR)


@pytest.mark.parametrize("patients", [2, 5, 6])
def test_a_few_patients_who_gain_exactly_alike_leave_no_interval(patients: int) -> None:
    """ "+1.0000 [1.00, 1.00]" stood on the card of two patients whom Local told wrongly and another model rightly."""
    base = np.zeros(patients)
    found = choose({"local": sheet(base), "personal": sheet(base + 1)}, "local", HIGHER, 0)
    assert (found.model, found.gain) == ("personal", 1)
    assert found.interval == (None if patients < 6 else (1, 1))
    assert choose({"local": sheet(base), "personal": sheet(base)}, "local", HIGHER, 0).interval == (0, 0)
    told = Chosen(
        model=found.model, patients=patients, best=found.best, gain=found.gain, error=found.error, needed=found.needed,
        interval=found.interval, candidates={"local": 0.0, "personal": 1.0},
    )  # fmt: skip
    assert f"gains +1.0000{' [1.00, 1.00]' if patients == 6 else ''} over the local model" in why(told)


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


@pytest.mark.parametrize(
    ("patients", "candidates", "said"),
    [
        (1, {"local": 0.5, "personal": 0.7}, "Its validation patients are too few to say"),
        (0, {}, "Its validation patients are too few to say"),
        (500, {"local": None, "personal": None}, "The score is not defined on them, so they cannot say"),
        (500, {"local": None, "personal": 0.7}, "The local model has no score on them, so they cannot say"),
        (500, {"local": 0.5, "personal": None}, "No other model has a score on them, so they cannot say"),
    ],
)
def test_it_is_told_why_nothing_can_be_said(patients: int, candidates: dict[str, float | None], said: str) -> None:
    """Where no validation patient had the event, or all were of one class, the card and the hospital's page called them
    too few, however many they were."""
    chosen = Chosen(model="local", patients=patients, gain=None, error=None, interval=None, candidates=candidates)
    assert why(chosen) == f"{said} that another model is better than the local one."
