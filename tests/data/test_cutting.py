# SPDX-License-Identifier: Apache-2.0
"""Cutting a list in two: the places are scikit-learn's."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from medpfl.data.cutting import cut_in_two


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.integers(2, 200), st.integers(0, 2**32 - 1), st.data())
def test_it_is_cut_as_scikit_learn_cuts_it(count: int, seed: int, data: st.DataObject):
    from sklearn.model_selection import train_test_split

    kept = data.draw(st.integers(1, count - 1))
    ours = cut_in_two(count, kept, seed)
    theirs = train_test_split(np.arange(count), train_size=kept, test_size=count - kept, random_state=seed)
    assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(2, 40), min_size=2, max_size=6), st.integers(0, 2**32 - 1), st.data())
def test_with_classes_too(sizes: list[int], seed: int, data: st.DataObject):
    from sklearn.model_selection import train_test_split

    classes = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)) * 3 - 1, sizes))
    count = len(classes)
    kept = data.draw(st.integers(len(sizes), count - len(sizes)))
    ours = cut_in_two(count, kept, seed, classes)
    theirs = train_test_split(
        np.arange(count), train_size=kept, test_size=count - kept, random_state=seed, stratify=classes
    )
    assert [part.tolist() for part in ours] == [part.tolist() for part in theirs]
