# SPDX-License-Identifier: Apache-2.0
"""``benchmarks auto``: with which rows Auto is compared."""

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.auto import STUDIES, taken_by_other_seeds, unseen_distances


def test_a_row_that_leads_by_one_seeds_luck_is_not_taken_in_that_seed() -> None:
    lucky, steady, worse = [0.9, 0.5, 0.5], [0.6, 0.61, 0.62], [0.1, 0.1, 0.1]
    rows: list[Any] = [SimpleNamespace(best=SimpleNamespace(values=values)) for values in (lucky, steady, worse)]
    assert sum(lucky) > sum(steady)
    assert taken_by_other_seeds(rows) == [0.6, 0.5, 0.5]


@pytest.mark.slow
def test_the_unseen_seeds_have_a_best_row_in_each_study() -> None:
    found = unseen_distances()
    assert "Auto" in found and "Pooled" not in found and "SCAFFOLD" not in found
    assert all(least <= mean <= 0 for mean, least in found.values())
    assert len(list(STUDIES)[:5]) == 5 and "heart" not in list(STUDIES)[:5]
