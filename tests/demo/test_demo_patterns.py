# SPDX-License-Identifier: Apache-2.0
"""Generated hospitals differ in what was asked for, and in nothing else."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.core.errors import ConfigError
from medpfl.data.site_file import load_site_file
from medpfl.demo.known import DEMOS
from medpfl.demo.patterns import HOSPITALS, KINDS, write_patterns
from medpfl.models.lenet import LeNet5
from medpfl.tasks import Classification

pytestmark = pytest.mark.slow  # its images take seconds to make

Written = dict[str, dict[str, NDArray[np.uint8]]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Written]:
    base = tmp_path_factory.mktemp("patterns")
    found: dict[str, Written] = {}
    for kind in KINDS:
        assert DEMOS[f"patterns_{kind}"](base / kind) == list(HOSPITALS)
        found[kind] = {}
        for site in HOSPITALS:
            with np.load(base / kind / f"{site}.npz", allow_pickle=False) as content:
                found[kind][site] = dict(content)
    return found


def same(one: dict[str, NDArray[np.uint8]], other: dict[str, NDArray[np.uint8]], what: str) -> bool:
    keys = [f"{split}_{what}" for split in ("train", "val", "test")]
    return all(np.array_equal(one[key], other[key]) for key in keys)


def test_the_task_reads_every_hospital(tmp_path: Path) -> None:
    write_patterns(tmp_path, "quantity_skew")
    task = Classification("pattern", size=(16, 16), architecture=LeNet5(), score="accuracy")
    for index, site in enumerate(HOSPITALS):
        splits = task.load(load_site_file(tmp_path / f"{site}.yaml", site)).splits
        counts = {split: len(samples) for split, samples in splits.items()}
        assert counts == {"train": 160 if index else 12, "validation": 40, "test": 300}


def test_only_the_scanner_differs(written: dict[str, Written]) -> None:
    plain, shifted = written["none"], written["feature_shift"]
    assert all(same(plain[site], shifted[site], "labels") for site in HOSPITALS)
    assert same(plain["hospital-a"], shifted["hospital-a"], "images")  # the plain scanner
    spread = [shifted[site]["train_images"].std() for site in HOSPITALS]
    level = [shifted[site]["train_images"].mean() for site in HOSPITALS]
    assert max(spread) > 2 * min(spread) and max(level) - min(level) > 30
    assert np.std([plain[site]["train_images"].mean() for site in HOSPITALS]) < 3


def test_only_the_labels_rule_differs(written: dict[str, Written]) -> None:
    for index, site in enumerate(HOSPITALS):
        plain, renamed = written["none"][site], written["concept_shift"][site]
        assert same(plain, renamed, "images")
        expected = (plain["test_labels"] + 2) % 4 if index % 2 else plain["test_labels"]
        assert np.array_equal(renamed["test_labels"], expected)


def test_only_the_shares_of_the_classes_differ(written: dict[str, Written]) -> None:
    pairs = set()
    for site in HOSPITALS:
        shares = np.bincount(written["label_skew"][site]["test_labels"][:, 0], minlength=4) / 300
        pairs.add(tuple(np.argsort(shares)[2:].tolist()))
        assert np.sort(shares)[2:].sum() == pytest.approx(0.9, abs=0.06)
        alike = np.bincount(written["none"][site]["test_labels"][:, 0], minlength=4) / 300
        assert alike == pytest.approx(np.full(4, 0.25), abs=0.09)
    assert len({tuple(sorted(pair)) for pair in pairs}) == len(HOSPITALS)


def test_the_seed_decides_every_pixel(written: dict[str, Written], tmp_path: Path) -> None:
    write_patterns(tmp_path / "same", "label_skew")
    done = CliRunner().invoke(app, ["demo", "patterns", str(tmp_path / "other"), "--kind", "label_skew", "--seed", "1"])
    assert done.exit_code == 0
    for name, equal in (("same", True), ("other", False)):
        with np.load(tmp_path / name / "hospital-c.npz", allow_pickle=False) as content:
            assert same(dict(content), written["label_skew"]["hospital-c"], "images") == equal
    with pytest.raises(ConfigError, match=r"must be one of none, feature_shift.*got 'sideways'"):
        write_patterns(tmp_path / "wrong", "sideways")
    assert not (tmp_path / "wrong").exists()
