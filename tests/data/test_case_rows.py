# SPDX-License-Identifier: Apache-2.0
"""Whole cases of differing shape: what sees them as rows of one shape, and what sees them whole."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from medpfl.data.declared import StorageRule
from medpfl.data.rows import CaseRows, held
from medpfl.data.samples import Budget, CaseStore, Samples, joined_rows, joined_targets

SHAPES = [(3, 5, 4), (6, 2, 1), (4, 4, 4)]


def cases(channels: tuple[int, ...] = (2,)) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(1, 100, (*channels, *shape), generator=draw).float() for shape in SHAPES]


def stored(each: list[Tensor], budget: float = 1e6, size: tuple[int, ...] = (4, 3, 2)) -> CaseRows:
    store = CaseStore(Budget(StorageRule(memory_gb=budget / 2**30), Path()), size)
    for case in each:
        store.append(case)
    return store.finish()


@pytest.mark.parametrize("budget", [1e6, 0.5])
@pytest.mark.parametrize("channels", [(2,), ()])
def test_in_memory_and_in_a_file_cases_are_as_they_were_and_their_views_of_one_shape(
    budget: float, channels: tuple[int, ...]
) -> None:
    each = cases(channels)
    rows = stored(each, budget)
    assert all(torch.equal(rows.whole(number), case) for number, case in enumerate(each))
    assert rows.shape == (3, *channels, 4, 3, 2) and rows.dtype == torch.float32 and len(rows) == 3
    assert held(rows)[0 if budget > 1 else 1] == sum(case.numel() for case in each) * 4 and 0 in held(rows)
    views = rows[:]
    # The first case is one voxel too short for the view, the second one in two axes; of the third the middle is seen.
    assert torch.equal(views[0, ..., 1:, :, :], each[0][..., :, 1:4, 1:3]) and not views[0, ..., 0, :, :].any()
    assert torch.equal(views[1, ..., :, 1:, 1], each[1][..., 1:5, :, 0]) and not views[1, ..., 0].any()
    assert torch.equal(views[2], each[2][..., :, :3, 1:3])
    assert torch.equal(rows[torch.tensor([2, 0])], views[[2, 0]]) and torch.equal(rows[:2], views[:2])
    assert torch.equal(rows[torch.tensor([False, True, False])], views[1:2]) and rows[:0].shape == rows[3:].shape
    rows.whole(0).zero_()
    views.zero_()
    assert rows.whole(0).all() and rows[:].any()  # copies


@given(start=st.tuples(*[st.integers(-6, 6)] * 3))
def test_a_patch_is_the_padded_case_cut(start: tuple[int, int, int]) -> None:
    rows = stored(cases())
    for number, case in enumerate(cases()):
        padded = torch.nn.functional.pad(case, [12] * 6)
        cut = padded[:, *(slice(12 + first, 12 + first + side) for first, side in zip(start, rows.size, strict=True))]
        assert torch.equal(rows.patch(number, start), cut)


def test_places_are_voxels_of_every_label_that_is_there_and_few() -> None:
    mask = torch.zeros(20, 20, 20, dtype=torch.uint8)
    mask[2:18, 2:18, 2:18] = 1
    mask[3, 4, 5] = 3
    rows = stored([mask, torch.zeros(1, 2, 3, dtype=torch.uint8)])
    places = rows.places(0)
    assert sorted(places) == [1, 3] and places[3].tolist() == [[3, 4, 5]] and len(places[1]) == 1000
    assert all(mask[tuple(place)] == 1 for place in places[1].tolist())
    assert np.ptp(places[1], axis=0).tolist() == [15, 15, 15] and rows.places(1) == {}


def test_decisions_about_whole_cases_lie_one_after_another() -> None:
    truth = [(case > 50).to(torch.uint8) for case in cases(())]
    samples = Samples(stored(cases()), stored(truth), np.arange(3), ["a", "b", "c"])
    found = [1 - mask for mask in truth]
    decisions = torch.cat([mask.flatten() for mask in found])
    assert samples.entries.tolist() == [60, 12, 64]
    for (mine, true), mask, other in zip(samples.masks(decisions), truth, found, strict=True):
        assert torch.equal(mine, other) and torch.equal(true, mask)
    both = joined_targets([samples, samples])
    assert both.names == ["a", "b", "c"] * 2 and both.case.tolist() == [0, 1, 2, 3, 4, 5]
    pairs = list(both.masks(decisions.repeat(2)))
    assert len(pairs) == 6 and torch.equal(pairs[4][1], truth[1])


@pytest.mark.slow
def test_large_views_are_taken_a_few_at_a_time() -> None:
    samples = Samples(stored(cases(), size=(256, 256, 100)), stored(cases()), np.arange(3), [])
    assert samples.together(64) == 1
    assert Samples(stored(cases()), stored(cases()), np.arange(3), []).together(64) == 64
    assert Samples(torch.zeros(1, 1, 9000, 9000), torch.zeros(1), np.arange(1), []).together(64) == 64


def test_cases_of_several_hospitals_are_joined_within_the_budget() -> None:
    parts = [stored(cases()), stored(cases()[1:])]
    joined = joined_rows(parts, Budget(StorageRule(memory_gb=1e-9), Path()))
    assert isinstance(joined, CaseRows) and held(joined)[0] == 0
    assert all(torch.equal(joined.whole(n), parts[n // 3].whole(n % 3)) for n in range(5))
    rows = joined_rows([torch.arange(600), torch.arange(0), torch.arange(3)], Budget(StorageRule(), Path()))
    assert rows[:].tolist() == [*range(600), 0, 1, 2]
