# SPDX-License-Identifier: Apache-2.0
"""Splits: every item once, groups together, the same every time, and FLamby's split for its settings."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import train_test_split

from medpfl.core.errors import DataError
from medpfl.data.declared import SplitRule
from medpfl.data.splits import split_indices

TWO = {"train": 0.66, "test": 0.34}
THREE = {"train": 0.5, "validation": 0.16, "test": 0.34}


def rule(fractions: Any, **others: Any) -> SplitRule:
    return SplitRule(fractions=fractions, **others)


@settings(max_examples=150, deadline=None)
@given(
    count=st.integers(3, 80),
    weights=st.tuples(*[st.integers(1, 50)] * 3),
    validation=st.booleans(),
    stratify=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
@pytest.mark.slow
def test_every_item_is_in_one_split(
    count: int, weights: tuple[int, int, int], validation: bool, stratify: bool, seed: int, data: st.DataObject
) -> None:
    parts = {"train": weights[0], "validation": weights[1], "test": weights[2]}
    if not validation:
        del parts["validation"]
    total = sum(parts.values())
    fractions = {name: weight / total for name, weight in parts.items()}
    classes = data.draw(st.lists(st.integers(0, 2), min_size=count, max_size=count))
    chosen = split_indices(rule(fractions, stratify=stratify, seed=seed), count, classes=classes)
    assert sorted(itertools.chain(*chosen.values())) == list(range(count))
    for name, indices in chosen.items():
        assert indices == sorted(indices)
        assert bool(indices) == (name in fractions)
    assert chosen == split_indices(rule(fractions, stratify=stratify, seed=seed), count, classes=classes)


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(groups=st.lists(st.sampled_from("abcdefgh"), min_size=3, max_size=40), fractions=st.sampled_from([TWO, THREE]))
def test_groups_stay_together(groups: list[str], fractions: dict[str, float]) -> None:
    if len(set(groups)) < len(fractions):
        with pytest.raises(DataError, match=f"{len(set(groups))} groups cannot be cut into {len(fractions)} splits"):
            split_indices(rule(fractions), len(groups), groups=groups)
        return
    chosen = split_indices(rule(fractions), len(groups), groups=groups)
    assert sorted(itertools.chain(*chosen.values())) == list(range(len(groups)))
    members = [{groups[index] for index in indices} for indices in chosen.values()]
    assert sum(len(names) for names in members) == len(set(groups))


def test_a_groups_place_does_not_depend_on_the_order_of_the_rows() -> None:
    groups = list("aabbccddeeff")
    forwards = split_indices(rule(TWO), 12, groups=groups)
    backwards = split_indices(rule(TWO), 12, groups=groups[::-1])
    for split in ("train", "test"):
        assert {groups[i] for i in forwards[split]} == {groups[::-1][i] for i in backwards[split]}


def test_the_seed_decides() -> None:
    assert split_indices(rule(TWO, seed=1), 50) != split_indices(rule(TWO, seed=2), 50)


@pytest.mark.parametrize(("count", "fractions"), [(0, TWO), (1, TWO), (2, THREE)])
def test_too_few_rows(count: int, fractions: dict[str, float]) -> None:
    with pytest.raises(DataError, match=rf"{count} rows cannot be cut into {len(fractions)} splits \(train, "):
        split_indices(rule(fractions), count)


@pytest.mark.parametrize("fractions", [THREE, {"train": 0.01, "validation": 0.01, "test": 0.98}])
def test_the_least_number_of_rows_gives_each_split_one(fractions: dict[str, float]) -> None:
    assert [len(indices) for indices in split_indices(rule(fractions), 3).values()] == [1, 1, 1]


@pytest.mark.parametrize("count", [6, 46, 303])
@pytest.mark.parametrize("stratify", [False, True])
def test_the_test_part_does_not_depend_on_a_validation_part(count: int, stratify: bool) -> None:
    classes = [index % 2 for index in range(count)]
    two, three = (split_indices(rule(f, stratify=stratify, seed=43), count, classes=classes) for f in (TWO, THREE))
    assert two["test"] == three["test"]
    assert two["train"] == sorted(three["train"] + three["validation"])


@pytest.mark.parametrize(
    ("count", "train", "test"), [(303, 199, 104), (261, 172, 89), (46, 30, 16), (130, 85, 45)], ids=str
)
def test_flambys_split(count: int, train: int, test: int) -> None:
    classes = np.random.default_rng(count).integers(0, 2, count)
    fit, held = train_test_split(
        np.arange(count), test_size=1 - 0.66, train_size=0.66, random_state=43, shuffle=True, stratify=classes
    )
    chosen = split_indices(rule(TWO, stratify=True, seed=43), count, classes=classes.tolist())
    assert chosen["train"] == sorted(fit.tolist()) and chosen["test"] == sorted(held.tolist())
    assert (len(chosen["train"]), len(chosen["test"])) == (train, test)


def test_stratified_parts_keep_the_proportions() -> None:
    classes = [0] * 60 + [1] * 30
    for indices in split_indices(rule(THREE, stratify=True), 90, classes=classes).values():
        assert abs(sum(classes[index] for index in indices) / len(indices) - 1 / 3) < 0.06
