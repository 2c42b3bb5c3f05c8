# SPDX-License-Identifier: Apache-2.0
"""Scores of resampled patients, and intervals from them."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from medpfl.data.samples import Samples
from medpfl.tasks.metrics.certainty import Certainty, certainty_of, draw, interval_of, resamples
from medpfl.tasks.metrics.contract import CaseMetric, Metric
from medpfl.tasks.metrics.labels import AUC, LABEL_METRICS, Accuracy, Brier
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet, sheet_of

HIGHER, LOWER = Measure(), Measure(direction="lower")


class Length(CaseMetric):
    """A metric of cases."""

    name = "length"

    def of_cases(self, decisions: torch.Tensor, samples: Samples) -> list[float]:
        return decisions.tolist()


def split(targets: list[int], classes: int = 2, owners: list[str] | None = None) -> Samples:
    count = len(targets)
    names = [f"case {number}" for number in range(count)]
    return Samples(torch.zeros(count, 1), torch.tensor(targets), np.arange(count), names, classes, owners=owners)


def lengths(values: list[float], owners: list[str] | None = None) -> Sheet:
    return sheet_of(Length(), torch.tensor(values, dtype=torch.float64), split([0] * len(values), owners=owners))


@given(st.integers(0, 10**6), st.sampled_from([2, 3]), st.sampled_from(LABEL_METRICS))
@settings(max_examples=40)
def test_resamples_score_as_the_metric_scores_repeated_samples(seed: int, classes: int, metric: Metric) -> None:
    rng = np.random.default_rng(seed)
    samples = split(rng.integers(classes, size=9).tolist(), classes)
    probabilities = torch.from_numpy(rng.dirichlet(np.ones(classes), size=9).round(1).astype(np.float32))  # with ties
    counts = draw(9, 5, seed)
    found = metric.of_resamples(probabilities, samples, counts)
    one_by_one = Metric.of_resamples(metric, probabilities, samples, counts)
    np.testing.assert_allclose(found, one_by_one, atol=1e-6)
    assert sheet_of(metric, probabilities, samples).score == pytest.approx(
        metric.of_split(probabilities, samples), nan_ok=True
    )


def test_a_metric_without_shortcut_is_resampled_too_and_less_often() -> None:
    samples, probabilities = split([0, 1, 0, 1, 1, 0, 1]), torch.tensor([[0.6, 0.4], [0.3, 0.7]] * 3 + [[0.5, 0.5]])
    sheet = sheet_of(Brier(), probabilities, samples)
    counts = resamples(sheet, 0)
    assert len(counts) == 200 and len(resamples(sheet_of(Accuracy(), probabilities, samples), 0)) == 2000
    expected = [
        np.average((probabilities[:, 1].numpy() - samples.targets[:].numpy()) ** 2, weights=times) for times in counts
    ]
    np.testing.assert_allclose(sheet.scores(counts), expected, atol=1e-6)


def test_cases_of_one_patient_are_drawn_together() -> None:
    sheet = lengths([1.0, 2.0, 3.0, 4.0], ["anton", "beate", "anton", "carl"])
    assert sheet.patients == 3
    assert sheet.scores(np.array([[3, 0, 0], [1, 1, 1]])).tolist() == [2.0, 2.5]
    # the spread between patients is not hidden by how alike the cases of one are
    alike = lengths(np.repeat(np.arange(8.0), 10).tolist(), np.repeat(list("abcdefgh"), 10).tolist())
    apart = lengths(np.repeat(np.arange(8.0), 10).tolist())
    widths = [np.subtract(*reversed(certainty_of(one, None, HIGHER, 2, 0).interval)) for one in (alike, apart)]  # type: ignore[union-attr]
    assert widths[0] > 2.5 * widths[1]


def test_without_expansion_it_is_scipys_percentile_interval() -> None:
    from scipy.stats import bootstrap

    values = np.random.default_rng(0).normal(size=400)
    theirs = bootstrap((values,), np.mean, method="percentile", n_resamples=4000, rng=np.random.default_rng(1))
    ours = interval_of((draw(400, 4000, 1) * values).mean(axis=1), 400)
    assert ours == pytest.approx(tuple(theirs.confidence_interval), abs=0.01)


@pytest.mark.slow
def test_of_few_patients_an_interval_holds_the_truth_as_often_as_it_says() -> None:
    rng, held, plain = np.random.default_rng(0), 0, 0
    for number in range(600):
        values = rng.normal(size=8)
        means = (draw(8, 2000, number) * values).mean(axis=1)
        low, high = interval_of(means, 8) or (0, 0)
        held += low <= 0 <= high
        lower, upper = np.quantile(means, [0.025, 0.975])
        plain += lower <= 0 <= upper
    assert plain / 600 < 0.92 < 0.93 < held / 600 < 0.98


@pytest.mark.parametrize("measure", [HIGHER, LOWER])
def test_the_gain_is_paired_and_above_zero_where_the_model_is_better(measure: Measure) -> None:
    rng = np.random.default_rng(0)
    hard: NDArray[np.float64] = rng.normal(size=12)  # the same patients are hard for both
    sign = 1 if measure.direction == "higher" else -1
    local, mine = lengths(hard.tolist()), lengths((hard + sign * 0.1 + 0.01 * rng.normal(size=12)).tolist())
    found = certainty_of(mine, local, measure, 2, 0, "anna")
    assert found is not None and found.gained is not None and found.gain is not None
    assert 0.08 < found.gained[0] < found.gain < found.gained[1] < 0.12
    assert found.interval[1] - found.interval[0] > 0.5
    assert found == certainty_of(mine, local, measure, 2, 0, "anna")  # seeded
    assert found != certainty_of(mine, local, measure, 2, 0, "berta")


@pytest.mark.parametrize(("patients", "least", "told"), [(5, 2, False), (6, 2, True), (9, 10, False), (10, 10, True)])
def test_few_patients_tell_nothing(patients: int, least: int, told: bool) -> None:
    sheet = lengths([float(number) for number in range(patients)])
    found = certainty_of(sheet, None, HIGHER, least, 0)
    assert (found is not None) == told
    if found is not None:  # its ends are no single patient's values
        assert 0 < found.interval[0] < found.interval[1] < patients - 1


def test_where_a_score_is_not_defined_there_is_no_interval() -> None:
    sheet = sheet_of(AUC(), torch.full((8, 2), 0.5), split([0] * 8))
    assert certainty_of(sheet, sheet, HIGHER, 2, 0) is None


def test_its_sentence() -> None:
    found = Certainty(patients=8, interval=(0.55, 0.68), gain=0.14, gained=(0.06, 0.21))
    assert found.text(0.62, HIGHER) == "0.62 [0.55, 0.68], gain +0.14 [0.06, 0.21] on 8 test patients"
    days = found.model_copy(update={"gain": None, "gained": None})
    assert days.text(0.62, Measure(unit="days")) == "0.62 [0.55, 0.68] days on 8 test patients"
    assert Certainty.model_validate(json.loads(found.model_dump_json())) == found  # as a model's file has it
