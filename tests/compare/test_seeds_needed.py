# SPDX-License-Identifier: Apache-2.0
"""How many seeds would show a gain."""

import numpy as np
import pytest

from medpfl.compare.intervals import needed
from medpfl.compare.statistics import paired_gain


def test_so_many_seeds_show_a_difference_four_times_in_five() -> None:
    from scipy.stats import t, ttest_1samp

    reach = t.ppf(0.975, 24) * 0.25
    found = needed(0.5, 0.6, (0.5 - reach, 0.5 + reach), 25)
    assert found.seeds == 14 and found.times == pytest.approx((2.80 / 2) ** 2, abs=0.01)
    values = np.random.default_rng(0).normal(0.5, 0.6, size=(4000, 14))
    assert np.mean(ttest_1samp(values, 0, axis=1).pvalue < 0.05) == pytest.approx(0.8, abs=0.03)
    assert needed(0.0, 0.6, None, 9).seeds is None and needed(1e-6, 0.6, None, 9).seeds is None


@pytest.mark.parametrize(("ratio", "seeds"), [(5.9, 3), (8.0, 3), (12.0, 2), (11.9, 2), (25.0, 2), (0.03, 8723)])
def test_as_many_seeds_where_scipy_has_no_number_for_the_other_side(ratio: float, seeds: int) -> None:
    """By the chi distribution of the deviation, integrated; scipy's noncentral t is NaN on the far side of 8."""
    from scipy.integrate import quad
    from scipy.special import ndtr
    from scipy.stats import chi, t

    def power(count: int) -> float:
        reach, shift = t.ppf(0.975, count - 1) / np.sqrt(count - 1), ratio * np.sqrt(count)

        def at(x: float) -> float:
            return float(chi.pdf(x, count - 1) * (ndtr(shift - reach * x) + ndtr(-shift - reach * x)))

        middle = float(np.sqrt(count - 1))
        return float(quad(at, max(0, middle - 9), middle + 9, limit=500)[0])

    assert needed(ratio, 1.0, None, 9).seeds == seeds
    assert power(seeds) >= 0.8 and (seeds == 2 or power(seeds - 1) < 0.8)


@pytest.mark.parametrize("gain", [0.5, 0.1])  # the deviation of three of these is 0, and 2e-17
def test_equal_gains_need_no_more_seeds_than_a_test_takes(gain: float) -> None:
    found = paired_gain([gain] * 3, [0.0] * 3)
    assert needed(found.mean, found.deviation, None, 9).seeds == 2
    assert needed(gain, None, None, 9).seeds is None  # of one seed
