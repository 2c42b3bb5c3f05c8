# SPDX-License-Identifier: Apache-2.0
"""Net benefit, by hand and against scikit-learn."""

import numpy as np
import pytest

from medpfl.tasks.metrics.decision import decision_curve


def test_four_patients_by_hand() -> None:
    truth = np.array([True, True, False, False])
    (low, half) = decision_curve(truth, np.array([0.9, 0.3, 0.6, 0.1]), [0.2, 0.5])
    # At 0.2 both ill and one healthy patient are acted on: 2/4 - 1/4 * 0.2/0.8. At 0.5: 1/4 - 1/4 * 1.
    assert (low.sensitivity, low.specificity) == (1.0, 0.5) and low.benefit == pytest.approx(0.4375)
    assert low.acting_on_all == pytest.approx(0.5 - 0.5 * 0.25)
    assert (half.sensitivity, half.specificity) == (0.5, 0.5) and half.benefit == pytest.approx(0)


def test_a_kind_of_case_that_is_missing_has_no_rate() -> None:
    (found,) = decision_curve(np.array([True, True]), np.array([0.9, 0.3]), [0.5])
    assert (found.sensitivity, found.specificity) == (0.5, None)


def test_rates_are_those_of_scikit_learn() -> None:
    from sklearn.metrics import confusion_matrix

    rng = np.random.default_rng(0)
    truth, probability = rng.random(50) < 0.4, rng.random(50)
    for found in decision_curve(truth, probability, [0.1, 0.5, 0.8]):
        (tn, fp), (fn, tp) = confusion_matrix(truth, probability >= found.threshold)
        assert found.sensitivity == pytest.approx(tp / (tp + fn)) and found.specificity == pytest.approx(tn / (tn + fp))
