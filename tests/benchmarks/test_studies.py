# SPDX-License-Identifier: Apache-2.0
"""Simulated hospitals of studies: every row once, as unlike as asked for, and written so that one can train on them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.blobs import write_blobs
from benchmarks.studies import dirichlet, pairwise, write_cut
from medpfl.core.errors import DataError
from medpfl.data.arrays.declare import Arrays
from medpfl.data.preparation import Spec
from medpfl.data.site_file import load_site_file
from medpfl.demo.index_lists import labels_of
from tools import bubbles


def labels(count: int = 4000, classes: int = 10) -> np.ndarray:
    return np.random.default_rng(3).permutation(np.arange(count) % classes)


def total_variation(parts: list[np.ndarray], truth: np.ndarray) -> np.ndarray:
    shares = np.array([np.bincount(truth[part], minlength=10) / len(part) for part in parts])
    return np.abs(shares[:, None] - shares[None]).sum(axis=2) / 2


@pytest.mark.parametrize("cut", [dirichlet, pairwise])
@given(clients=st.integers(1, 12), seed=st.integers(0, 1000), alpha=st.sampled_from([0.1, 1.0, 100.0]))
@pytest.mark.slow
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


@pytest.mark.slow
def test_cuts_that_cannot_be_made() -> None:
    with pytest.raises(DataError, match="30 rows cannot be cut into 4 clients of at least 10 rows"):
        dirichlet(labels(30), 4, 1.0, 0)
    with pytest.raises(DataError, match=r"no cut of 200 rows into 20 clients of at least 10 with alpha 0\.001"):
        dirichlet(labels(200), 20, 0.001, 0)
    with pytest.raises(DataError, match="alpha must be above 0, got nan"):
        pairwise(labels(), 4, float("nan"), 0)


@pytest.mark.usefixtures("rendered")
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
        data = dataset.load(Spec("class", ("images",), (28, 28)))
        for number, split in enumerate(("train", "validation", "test")):
            rows = lists[3 * place + number]
            samples = data.splits[split]
            assert np.array_equal(samples.targets.numpy(), truth[rows])
            expected = (images[rows].astype(np.float32) - 127.5) / 63.75
            np.testing.assert_allclose(samples.inputs[:].numpy()[:, 0], expected, atol=1e-5)
    picture = (tmp_path / "sites" / "labels.svg").read_text()
    assert bubbles(picture) == 4 * 10  # one for each hospital and class
