# SPDX-License-Identifier: Apache-2.0
"""Sensitivity at a fixed specificity: the threshold is chosen on validation cases and tried on test cases."""

import numpy as np
import pytest
import torch
from torch import Tensor

from medpfl.data.samples import Samples
from medpfl.data.target import Target
from medpfl.tasks.metrics.labels import LABEL_METRICS
from medpfl.tasks.metrics.operating import operating_points
from medpfl.tasks.metrics.sheet import Sheet, sheet_of


def sheet(given: Tensor, truth: Tensor, owners: list[str] | None = None) -> Sheet:
    names = [str(number) for number in range(len(truth))]
    samples = Samples(torch.empty(len(truth), 0), truth, np.arange(len(truth)), names, given.shape[1], owners=owners)
    return sheet_of(LABEL_METRICS[0], given, samples)


def two(second: list[float], truth: list[int], owners: list[str] | None = None) -> Sheet:
    given = torch.tensor(second)
    return sheet(torch.stack([1 - given, given], dim=1), torch.tensor(truth), owners)


NEGATIVES = [number / 20 for number in range(20)]
VALIDATION = two([*NEGATIVES, 0.99], [0] * 20 + [1])
"""Two of twenty may lie above the threshold: those of 0.90 and 0.95."""


def test_the_threshold_is_the_validation_cases_and_the_shares_are_the_test_cases() -> None:
    test = two([0.86, 0.84, 0.9, 0.95, 0.1, 0.9, 0.3, 0.85], [1, 1, 1, 1, 0, 0, 0, 0])
    (found,) = operating_points(Target.CLASS, VALIDATION, test)
    assert found.label == 1 and found.negatives == 20
    assert found.threshold == pytest.approx(0.85)
    assert found.sensitivity and (found.sensitivity.value, found.sensitivity.patients) == (0.75, 4)
    assert found.specificity and found.specificity.value == 0.75
    # of 3 of 4: R's binom.test(3, 4)
    assert (found.sensitivity.low, found.sensitivity.high) == pytest.approx((0.1941204, 0.9936905), abs=1e-6)


def test_all_found_among_few_is_not_sure_and_images_of_one_patient_count_once() -> None:
    test = two([0.9, 0.91, 0.92, 0.93, 0.1], [1, 1, 1, 1, 0], ["p", "p", "q", "q", "r"])
    (found,) = operating_points(Target.CLASS, VALIDATION, test)
    assert found.sensitivity and (found.sensitivity.patients, found.sensitivity.high) == (2, 1.0)
    assert found.sensitivity.low == pytest.approx(0.025**0.5)


def test_a_patient_with_most_images_makes_the_share_less_sure() -> None:
    """Nineteen patients with one image and one with thirty are as 49^2 / (19 + 30^2) = 2.6 patients; counted as twenty,
    the "95 %" held the true share in 22 to 90 of 100 simulated hospitals."""
    images = [1] * 19 + [30]
    owners = [str(patient) for patient, count in enumerate(images) for _ in range(count)]
    rng = np.random.default_rng(0)
    held = []
    for _ in range(200):
        found = np.repeat(rng.random(20) < 0.6, images)
        test = two(np.where(found, 0.9, 0.1).tolist(), [1] * 49, owners)
        (point,) = operating_points(Target.CLASS, VALIDATION, test)
        assert point.sensitivity and point.sensitivity.patients == 20
        held.append(point.sensitivity.low <= 0.6 <= point.sensitivity.high)
    assert np.mean(held) >= 0.93


def test_with_few_validation_patients_there_is_no_number() -> None:
    few = two([0.1] * 12, [0] * 12, ["one"] * 4 + list("abcdefgh"))
    (found,) = operating_points(Target.CLASS, few, VALIDATION)
    assert (found.negatives, found.threshold, found.sensitivity) == (9, None, None)
    (found,) = operating_points(Target.CLASS, VALIDATION, two([0.1, 0.2], [0, 0]))
    assert found.sensitivity is None and found.specificity is not None


def test_of_more_classes_each_is_told_from_the_others_and_unknown_labels_do_not_count() -> None:
    given = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    classes = sheet(given, torch.arange(40) % 3)
    assert [one.label for one in operating_points(Target.CLASS, classes, classes)] == [0, 1, 2]
    truth = torch.zeros(40, 3)
    truth[::2] = 1
    truth[:30, 2] = torch.nan
    labels = sheet(given, truth)
    found = operating_points(Target.LABELS, labels, labels)
    assert [one.negatives for one in found] == [20, 20, 5]
    assert found[0].sensitivity and found[0].sensitivity.patients == 20


@pytest.mark.parametrize("target", [Target.VALUE, Target.MASK, Target.SURVIVAL])
def test_other_answers_have_none(target: Target) -> None:
    assert operating_points(target, VALIDATION, VALIDATION) == ()


def test_a_probability_that_is_not_finite_makes_no_claim() -> None:
    assert operating_points(Target.CLASS, VALIDATION, two([float("nan"), 0.2], [1, 0])) == ()
