# SPDX-License-Identifier: Apache-2.0
"""Splits by class and by lists of rows: every row once, and who has which labels."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from medpfl.compare.data import read_splits
from medpfl.compare.figures import label_counts
from medpfl.compare.results import Results, SplitRow
from medpfl.core.errors import DataError
from medpfl.data.partition import check_disjoint, cut_by_class
from medpfl.demo.index_lists import names, read_lists, write_splits
from medpfl.tasks.tabular import Tabular
from small_jobs import write_table_sites
from tools import bubbles


def labels(count: int = 4000, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(3).permutation(np.arange(count) % classes)


@given(
    counts=st.lists(st.integers(1, 30), min_size=2, max_size=8).filter(lambda counts: sum(counts) >= 20),
    fractions=st.sampled_from([{"train": 0.5, "test": 0.5}, {"train": 0.4, "validation": 0.2, "test": 0.4}]),
    seed=st.integers(0, 100),
)
def test_classes_are_cut_by_the_same_fractions(counts: list[int], fractions: dict[str, float], seed: int) -> None:
    truth = np.repeat(np.arange(len(counts)), counts)
    found = cut_by_class(range(len(truth)), truth, fractions, seed)
    assert sorted(row for part in found.values() for row in part) == list(range(len(truth)))
    for split, fraction in fractions.items():
        assert abs(len(found[split]) - fraction * len(truth)) <= 2  # rounding does not add up over the classes
        for value, count in enumerate(counts):
            assert abs((truth[found[split]] == value).sum() - fraction * count) <= 2


def test_splits_that_cannot_be() -> None:
    with pytest.raises(DataError, match="1 rows leave the test split empty"):
        cut_by_class([5], labels(), {"train": 0.9, "test": 0.1}, 0)
    with pytest.raises(DataError, match=r"row 5 is in anna's train split and in berta's test split"):
        check_disjoint({"anna": {"train": [1, 5], "test": [2]}, "berta": {"train": [3], "test": [5]}})


def test_index_lists_in_both_public_layouts(tmp_path: Path) -> None:
    (tmp_path / "lists.json").write_text(json.dumps([[0, 1], [2], [3, 4], [5]]))
    found = read_lists(tmp_path / "lists.json", ["train", "test"])
    assert found == {"client-1": {"train": [0, 1], "test": [2]}, "client-2": {"train": [3, 4], "test": [5]}}
    with pytest.raises(DataError, match=r"expected lists of row numbers, 3 a hospital \(train, test, validation\)"):
        read_lists(tmp_path / "lists.json", ["train", "test", "validation"])
    (tmp_path / "lists.json").write_text(json.dumps([[0, 1], ["2"]]))
    with pytest.raises(DataError, match="expected lists of row numbers"):
        read_lists(tmp_path / "lists.json", ["train", "test"])
    with pytest.raises(DataError, match=r"client-1's test split has row 9; .* has 3 rows"):
        write_splits(tmp_path, tmp_path / "x.npz", "x", {"client-1": {"train": [0], "test": [9]}}, labels(3))
    assert not list(tmp_path.glob("*.yaml"))


@pytest.mark.parametrize("given_", [1, 9, 20, 100])
def test_names_sort_as_their_numbers(given_: int) -> None:
    assert sorted(names(given_)) == names(given_) and len(set(names(given_))) == given_


@pytest.mark.usefixtures("rendered")
def test_a_comparison_shows_who_has_which_labels(tmp_path: Path) -> None:
    """All splits of a hospital together, by class; drawn as one bubble for each hospital and class."""
    files = write_table_sites(tmp_path)
    found, _ = read_splits(Tabular(dataset="blood"), files, None)
    for site, counts in found[0].labels.items():
        rows = (tmp_path / f"{site}.csv").read_text().splitlines()[1:]
        assert counts == {"no": sum(row.endswith(",0") for row in rows), "yes": sum(row.endswith(",1") for row in rows)}
    split = SplitRow(seed=found[0].seed, digests=found[0].digests, sizes=found[0].sizes, labels=found[0].labels)
    picture = label_counts(Results.model_construct(splits=[split]))
    assert bubbles(picture) == 2 * len(files)
    assert label_counts(Results.model_construct(splits=[split.model_copy(update={"labels": {}})])) == ""
