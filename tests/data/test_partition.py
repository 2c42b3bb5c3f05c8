# SPDX-License-Identifier: Apache-2.0
"""Splits for studies: every row once, as unlike as asked for, and written so that hospitals can be trained on them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from conftest import write_table_sites
from medpfl.compare.data import read_splits
from medpfl.compare.figures import label_counts
from medpfl.core.errors import DataError
from medpfl.data.arrays.declare import Arrays
from medpfl.data.partition import check_disjoint, cut_by_class, dirichlet, pairwise
from medpfl.data.site_file import load_site_file
from medpfl.demo.blobs import write_blobs
from medpfl.demo.studies import labels_of, names, read_lists, write_cut, write_splits
from medpfl.tasks.tabular import Tabular


def labels(count: int = 4000, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(3).permutation(np.arange(count) % classes)


def total_variation(parts: list[np.ndarray], truth: np.ndarray) -> np.ndarray:
    shares = np.array([np.bincount(truth[part], minlength=10) / len(part) for part in parts])
    return np.abs(shares[:, None] - shares[None]).sum(axis=2) / 2


@pytest.mark.parametrize("cut", [dirichlet, pairwise])
@given(clients=st.integers(1, 12), seed=st.integers(0, 1000), alpha=st.sampled_from([0.1, 1.0, 100.0]))
def test_every_row_is_with_one_client(cut: object, clients: int, seed: int, alpha: float) -> None:
    truth = labels(600)
    parts = cut(truth, clients, alpha, seed)  # type: ignore[operator]
    assert len(parts) == clients
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(truth)))
    again = cut(truth, clients, alpha, seed)  # type: ignore[operator]
    assert all(np.array_equal(one, other) for one, other in zip(parts, again, strict=True))


def test_a_large_alpha_gives_all_clients_the_same_and_a_small_one_does_not() -> None:
    truth = labels()
    off = ~np.eye(8, dtype=bool)
    alike = total_variation(dirichlet(truth, 8, 1e4, 0), truth)[off].mean()
    unlike = total_variation(dirichlet(truth, 8, 0.1, 0), truth)[off].mean()
    assert alike < 0.05 and unlike > 0.5


def test_the_pairwise_cut_has_the_structure_of_the_official_one() -> None:
    """Equal sizes; about 6 to 7 of 11 classes a client at alpha 0.05; partners nearly disjoint, others less so."""
    truth = np.random.default_rng(0).permutation(np.arange(22_000) % 11)
    parts = pairwise(truth, 20, 0.05, 1)
    assert {len(part) for part in parts} == {1100}
    shares = np.array([np.bincount(truth[part], minlength=11) / len(part) for part in parts])
    assert 4.5 < (shares > 0.005).sum(axis=1).mean() < 8
    distance = np.abs(shares[:, None] - shares[None]).sum(axis=2) / 2
    partners = np.mean([distance[k, k + 1] for k in range(0, 20, 2)])
    across = np.mean([distance[i, j] for i in range(20) for j in range(i) if i // 2 != j // 2])
    assert partners > 0.75 and 0.4 < across < 0.65


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


def test_cuts_that_cannot_be_made() -> None:
    with pytest.raises(DataError, match="30 rows cannot be cut into 4 clients of at least 10 rows"):
        dirichlet(labels(30), 4, 1.0, 0)
    with pytest.raises(DataError, match=r"no cut of 200 rows into 20 clients of at least 10 with alpha 0\.001"):
        dirichlet(labels(200), 20, 0.001, 0)
    with pytest.raises(DataError, match="alpha must be above 0, got nan"):
        pairwise(labels(), 4, float("nan"), 0)
    with pytest.raises(DataError, match="1 rows leave the test split empty"):
        cut_by_class([5], labels(), {"train": 0.9, "test": 0.1}, 0)


def test_a_written_split_is_read_back_row_by_row(tmp_path: Path) -> None:
    truth = write_blobs(tmp_path / "data.npz", {"train": 200, "val": 50, "test": 50})
    assert np.array_equal(labels_of(tmp_path / "data.npz"), truth)
    fractions = {"train": 0.4, "validation": 0.2, "test": 0.4}
    sites = write_cut(tmp_path / "data.npz", tmp_path / "sites", "patterns", "pairwise", 4, 0.1, fractions, 7)
    assert sites == ["client-1", "client-2", "client-3", "client-4"]
    lists = json.loads((tmp_path / "sites" / "lists.json").read_text())
    assert len(lists) == 12 and sorted(row for part in lists for row in part) == list(range(300))
    with np.load(tmp_path / "data.npz") as stored:
        images = np.concatenate([stored[f"{part}_images"] for part in ("train", "val", "test")])
    for place, site in enumerate(sites):
        dataset = load_site_file(tmp_path / "sites" / f"{site}.yaml", site).dataset("patterns", Arrays)
        data = dataset.load((28, 28))
        for number, split in enumerate(("train", "validation", "test")):
            rows = lists[3 * place + number]
            samples = data.splits[split]
            assert np.array_equal(samples.targets.numpy(), truth[rows])
            expected = (images[rows].astype(np.float32) - 127.5) / 63.75
            np.testing.assert_allclose(samples.inputs[:].numpy()[:, 0], expected, atol=1e-5)
    picture = (tmp_path / "sites" / "labels.svg").read_text()
    assert "<svg" in picture and picture.count("<use") >= 40  # a bubble for each hospital and class
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


def test_a_comparison_shows_who_has_which_labels(tmp_path: Path) -> None:
    """All splits of a hospital together, by class; drawn as one bubble for each hospital and class."""
    files = write_table_sites(tmp_path)
    found, _ = read_splits(Tabular(dataset="blood"), files, None)
    for site, counts in found[0].labels.items():
        rows = (tmp_path / f"{site}.csv").read_text().splitlines()[1:]
        assert counts == {"no": sum(row.endswith(",0") for row in rows), "yes": sum(row.endswith(",1") for row in rows)}
    picture = label_counts({"splits": [dataclasses.asdict(found[0])]})
    assert picture.startswith("<svg") and picture.count("<use") >= 8
    assert label_counts({"splits": [{**dataclasses.asdict(found[0]), "labels": {}}]}) == ""
