# SPDX-License-Identifier: Apache-2.0
"""``benchmarks auto``: with which rows Auto is compared."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.auto import STUDIES, taken_by_other_seeds, together, unseen_distances
from medpfl.compare.results import Gain


def test_a_row_that_leads_by_one_seeds_luck_is_not_taken_in_that_seed() -> None:
    lucky, steady, worse = [0.9, 0.5, 0.5], [0.6, 0.61, 0.62], [0.1, 0.1, 0.1]
    rows: list[Any] = [SimpleNamespace(best=SimpleNamespace(values=values)) for values in (lucky, steady, worse)]
    assert sum(lucky) > sum(steady)
    assert taken_by_other_seeds(rows) == [0.6, 0.5, 0.5]


def far(mean: float) -> Gain:
    interval = (mean - 0.1, mean + 0.2)
    return Gain(mean=mean, deviation=0.01, p=None, wins=0, losses=3, pairs=3, interval=interval)


@pytest.mark.parametrize(
    ("auto", "other", "told"),
    [
        (far(-0.3), None, [-0.3, -0.4, -0.1]),  # the other row is the first
        (None, far(-0.3), [0.3, 0.1, 0.4]),  # Auto is
        (far(-0.3), far(-0.2), None),  # another one is, from which both distances are told
    ],
)
def test_the_distance_of_two_rows_is_known_where_one_of_them_is_the_first(
    auto: Gain | None, other: Gain | None, told: list[float] | None
) -> None:
    rows: dict[str, Any] = {"Auto": SimpleNamespace(to_first=auto), "IFCA": SimpleNamespace(to_first=other)}
    assert together(rows, "IFCA") == (None if told is None else pytest.approx(told))


@pytest.mark.slow
def test_the_unseen_seeds_have_a_best_row_in_each_study() -> None:
    found = unseen_distances()
    assert "Auto" in found and "Pooled" not in found and "SCAFFOLD" not in found
    assert all(least <= mean <= 0 for mean, least in found.values())
    assert len(list(STUDIES)[:5]) == 5 and "heart" not in list(STUDIES)[:5]
