# SPDX-License-Identifier: Apache-2.0
"""With how many decimals values are written: what differs by a hundredth does not look the same; shares keep three."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medpfl.tasks.metrics.digits import digits, fewer, rounded, threshold_text

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("values", "decimals"),
    [
        ([], 3), ([None, NAN], 3), ([0.0], 3), ([0.1], 3), ([0.0999], 4), ([0.5, 0.0001], 3), ([-0.004, None], 5),
        ([0.00412, 0.0039], 5), ([1e-5], 7), ([1e-30], 9), ([999.9], 3), ([-1000.0], 2), ([12345.678], 1),
        ([123456.0], 0), ([1e12], 0), ([INF, 0.5], 3), ([250.0, 0.001], 3),
    ],
)  # fmt: skip
def test_the_largest_decides(values: list[float | None], decimals: int) -> None:
    assert digits(values) == decimals
    assert fewer(decimals) == max(0, decimals - 1)


@given(st.floats(min_value=1e-7, max_value=1e9))
def test_what_is_written_is_off_by_less_than_a_hundredth(value: float) -> None:
    assert math.isclose(float(f"{value:.{digits([value])}f}"), value, rel_tol=0.0051)
    assert math.isclose(rounded(value), value, rel_tol=5.1e-6)


def test_what_is_kept_has_six_decimals_of_shares_and_more_of_small_values() -> None:
    assert rounded(0.123456789) == 0.123457 and rounded(12.3456789) == 12.345679
    assert rounded(1.23456789e-5) == 1.23457e-05
    assert rounded(0.0) == 0.0 and math.isnan(rounded(NAN))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0000"), (1.0, "1.0000"), (0.3, "0.3000"), (0.99996, "0.99996"), (0.9999, "0.9999"),
        (0.00004, "0.00004"), (1e-9, "0.000000001"), (1 - 2**-24, "0.9999999"),
    ],
)  # fmt: skip
def test_a_threshold_is_not_written_as_one_that_finds_all_or_none(value: float, text: str) -> None:
    assert threshold_text(value, 4) == text
