# SPDX-License-Identifier: Apache-2.0
"""Means over the hospitals are those of the hospitals at which the metric is defined."""

from pathlib import Path

import numpy as np
import pytest

from comparing import SOFT, compared
from medpfl.compare.aggregate import gain, of_hospitals
from medpfl.compare.comparison_tables import leaderboard, markdown
from medpfl.compare.counted import Counted
from medpfl.compare.fold_table import collect, page, scores
from medpfl.compare.run_results import FoldRun
from medpfl.tasks.metrics.measure import Measure
from small_jobs import write_table_sites


def test_who_counts() -> None:
    """Split 0: berta has one class. Split 1: a model broke at berta, where another one has a score."""
    found = [
        (0, {"anna": {"auc": 0.5}, "berta": {"auc": None}}),
        (0, {"anna": {"auc": 0.7}, "berta": {"auc": None}}),
        (1, {"anna": {"auc": 0.6}, "berta": {"auc": 0.8}}),
        (1, {"anna": {"auc": 0.6}, "berta": {"auc": None}}),
    ]
    counted = Counted(found, ["anna", "berta"])
    counts = counted.of("auc", [(0, 5), (1, 5), (1, 6)])
    assert counts.tolist() == [[True, False], [True, True], [True, True]]
    values = np.array([[0.5, np.nan], [0.6, 0.8], [0.6, np.nan]])
    np.testing.assert_allclose(of_hospitals(values, counts), [0.5, 0.7, np.nan])
    assert not counted.of("brier", [(0, 5)]).any()
    assert np.isnan(of_hospitals(values[:1], counted.of("brier", [(0, 5)]))).all()


def test_a_method_whose_model_broke_has_no_gain() -> None:
    """Its mean was n/a, and its gain that of the seeds with which it had not broken: +0.200, of one seed of two."""
    mine, local = np.array([0.7, np.nan]), np.array([0.5, 0.5])
    assert gain(mine, local, np.array([True, True]), Measure()) is None
    defined = gain(mine, np.array([0.5, np.nan]), np.array([True, False]), Measure())  # for no model in that split
    assert defined is not None and defined.pairs == 1 and defined.mean == pytest.approx(0.2)
    assert gain(mine[1:], local[1:], np.array([False]), Measure()) is None


@pytest.mark.slow
def test_a_hospital_of_one_class_is_left_out_of_the_means(tmp_path: Path) -> None:
    """Every mean, gain and choice was n/a, because of one hospital that has no area under the curve."""
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"])
    table = tmp_path / "sites" / "berta.csv"
    head, *lines = table.read_text().splitlines()
    table.write_text("\n".join([head, *(line[:-1] + "0" for line in lines)]) + "\n")
    task = {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood", "hidden": [4], "score": "auc"}}
    _, content = compared(tmp_path, sites, task=task, methods={"SoftPull": SOFT}, seeds=[0, 1], unseen=True)
    rows = {row.name: row for row in content.rows}
    for row in rows.values():
        assert row.hospitals["berta"].best.values == [None, None]
        others = [row.hospitals[site] for site in ("anna", "clara")]
        assert row.best.mean == pytest.approx(np.mean([each.best.mean for each in others]), abs=1e-6)
        assert row.metrics["auc"].mean == row.best.mean
        every = [row.metrics["accuracy"].hospitals[site].mean for site in sites]
        assert row.metrics["accuracy"].mean == pytest.approx(np.mean(every), abs=1e-6)
        if row.name != "Local":
            assert row.gain is not None and row.hospitals["berta"].gain is None
            assert row.gain.interval is not None
            gains = [each.gain.mean for each in others if each.gain is not None]
            assert row.gain.mean == pytest.approx(np.mean(gains), abs=1e-6)
    assert "n/a" not in {cell for line in leaderboard(content)[1] for cell in line}
    assert [row.name for row in content.chosen] == ["all of them", "SoftPull"]
    for unseen in content.unseen:
        known = [unseen.hospitals[site].mean for site in ("anna", "clara")]
        assert unseen.mean is not None and unseen.mean.mean == pytest.approx(np.mean(known), abs=1e-6)
    assert "No model has auc at berta: means over the hospitals are those of the others." in markdown(content)


def test_a_hospital_of_one_class_that_is_left_out() -> None:
    def run(without: str, score: float | None) -> FoldRun:
        rows = {"local": {"models": {}, "score": score, "best": score}}
        return FoldRun.model_validate({
            "without": without, "seed": 0, "score": "auc", "cases": 4, "rows": rows, "events": []
        })  # fmt: skip

    content = collect([run("anna", 0.5), run("berta", None), run("clara", 0.9)])
    assert scores(content)[1] == [["Local", "0.500", "n/a", "0.900", "0.700"]]
    assert "No model has auc at berta: the mean is that of the others." in page(content, "small")
