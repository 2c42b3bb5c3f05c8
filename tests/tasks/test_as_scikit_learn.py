# SPDX-License-Identifier: Apache-2.0
"""What is computed without scikit-learn's checks equals scikit-learn to the last bit."""

import numpy as np
import pytest
import sklearn
from packaging.version import Version
from sklearn.metrics import brier_score_loss, roc_auc_score

from medpfl.tasks.metrics.calibration import calibration
from medpfl.tasks.metrics.roc import area_under_roc


@pytest.mark.parametrize("decimals", [1, 7])  # with many equal probabilities, and with few
def test_the_area_under_the_roc_curve(decimals: int) -> None:
    rng = np.random.default_rng(decimals)
    for _ in range(100):
        count = int(rng.integers(2, 60))
        truth, given = rng.random(count) < rng.random(), rng.random(count, np.float32).round(decimals)
        truth[:2] = True, False
        assert area_under_roc(truth, given) == roc_auc_score(truth, given)


@pytest.mark.skipif(Version(sklearn.__version__) < Version("1.8"), reason="scikit-learn before 1.8 sums otherwise")
@pytest.mark.parametrize("classes", [2, 3])
def test_the_brier_score(classes: int) -> None:
    rng = np.random.default_rng(classes)
    for _ in range(100):
        given = rng.random((int(rng.integers(1, 60)), classes), np.float32)
        given /= given.sum(axis=1, keepdims=True)
        truth = rng.integers(0, classes, len(given))
        found = calibration(truth, given)
        told = given[:, 1] if classes == 2 else given / given.sum(axis=1, keepdims=True)
        assert found is not None and found.brier == brier_score_loss(truth, told, labels=np.arange(classes))
