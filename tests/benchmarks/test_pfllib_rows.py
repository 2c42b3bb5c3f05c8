# SPDX-License-Identifier: Apache-2.0
"""``benchmarks pfllib`` with other numbers of hospitals: the same rows, so the same steps."""

import pytest

from benchmarks.pfllib import BATCH_SIZE, TRAIN_ROWS, rows_of
from medpfl.core.errors import MedPFLError


@pytest.mark.parametrize("hospitals", [4, 20, 100])
def test_every_number_of_hospitals_shares_the_same_rows(hospitals: int) -> None:
    rows = rows_of(hospitals)
    assert len(rows) == hospitals and sum(rows) == sum(TRAIN_ROWS)
    assert all(count >= BATCH_SIZE and count % BATCH_SIZE == 0 for count in rows)
    assert rows_of(4) == list(TRAIN_ROWS)


@pytest.mark.parametrize("hospitals", [0, 6, 1000])
def test_others_are_refused(hospitals: int) -> None:
    with pytest.raises(MedPFLError, match=f"multiple of 4 up to 320, got {hospitals}"):
        rows_of(hospitals)
