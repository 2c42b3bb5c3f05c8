# SPDX-License-Identifier: Apache-2.0
"""How far each row of a comparison is from the first one, with an interval from patients and seeds."""

import html
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from comparing import SOFT, compared
from medpfl.api.results import ComparisonResult
from medpfl.compare import comparison_tables
from medpfl.compare.chosen import Rows
from medpfl.compare.collect import collect
from medpfl.compare.level import first_row, level_text
from medpfl.compare.patients import Sheets, read_all
from medpfl.compare.plan import Plan
from medpfl.compare.report import write_report
from medpfl.compare.results import Gain, Results, Row
from medpfl.compare.sheets import sheets
from medpfl.tasks.metrics.measure import Measure
from small_jobs import write_table_sites

SEEDS = [0, 1, 2]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan, Results]:
    folder = tmp_path_factory.mktemp("to-first")
    sites = write_table_sites(folder / "sites", ["anna", "berta"], rows=60)
    plan, found = compared(folder, sites, seeds=SEEDS, pooled=True, methods={"SoftPull": SOFT})
    return folder / "results", plan, found


def named(found: Results) -> dict[str, Row]:
    return {row.name: row for row in found.rows}


def test_each_row_says_how_far_it_is_from_the_best_that_hospitals_can_have(done: tuple[Path, Plan, Results]) -> None:
    _, _, found = done
    rivals = [row for row in found.rows if row.name != "Pooled" and row.best.mean is not None]
    best = max(rivals, key=lambda row: row.best.mean or 0.0)
    first = first_row(found.rows, found.measure)
    assert first is not None and first.best.mean == best.best.mean and first.to_first is None
    assert len(found.rows) >= 5
    for row in found.rows:
        if row.name != first.name:
            differences = np.array(row.best.values, dtype=float) - np.array(first.best.values, dtype=float)
            assert row.to_first is not None and row.to_first.pairs == len(SEEDS)
            assert row.to_first.mean == pytest.approx(differences.mean(), abs=1e-6)
            assert row.to_first.interval is not None
            assert row.to_first.interval[0] <= row.to_first.mean <= row.to_first.interval[1]
            assert row.name == "Pooled" or row.to_first.mean <= 0


def test_the_distance_of_local_training_is_the_gain_of_the_first_the_other_way_round(
    done: tuple[Path, Plan, Results],
) -> None:
    _, _, found = done
    first, local = first_row(found.rows, found.measure), named(found)["Local"]
    assert first is not None and first.name != "Local"
    assert first.gain is not None and first.gain.interval is not None
    assert local.to_first is not None and local.to_first.interval is not None
    assert local.to_first.mean == pytest.approx(-first.gain.mean, abs=1e-9)
    low, high = first.gain.interval
    assert local.to_first.interval == pytest.approx((-high, -low), abs=0.1 * (high - low))


def test_two_rows_are_compared_patient_by_patient(done: tuple[Path, Plan, Results]) -> None:
    """Both err at the same patients: whom the draws have moves both alike, and the distance is far surer than either
    score. Were the rows drawn apart, its interval would hold 0."""
    results, plan, found = done
    known = read_all([results / "runs" / run.digest for run in found.runs], plan.task)
    assert known is not None
    base = known[0]["Local"]

    def right_in(share: float) -> Sheets:
        """The hospitals' sheets with this share of right answers; a larger one has the same patients right and more."""
        changed: Sheets = {}
        for site, splits in base.items():
            sheet = splits["test"]
            truth = sheet.truth.targets[:].long()
            right = np.random.default_rng(7).permutation(len(truth)) < share * len(truth)
            answers = sheet.answers.clone().double()
            for place, one in enumerate(right):
                answers[place] = 0.0
                answers[place, truth[place] if one else 1 - truth[place]] = 1.0
            changed[site] = {"test": replace(sheet, answers=answers)}
        return changed

    shares = {"Local": 0.5, "Good": 0.375, "Better": 0.625}
    table = {name: {(None, seed): right_in(share) for seed in SEEDS} for name, share in shares.items()}
    sites = list(base)
    rows = Rows(table, sites, Measure(), "Local", None, lambda pairs: np.ones((len(pairs), len(sites)), bool))
    good, better = ([table[name][None, 0][site]["test"] for site in sites] for name in ("Good", "Better"))
    apart = np.array([two.score - one.score for one, two in zip(good, better, strict=True)])
    patients = np.array([sheet.patients for sheet in good])

    def reach(variances: NDArray[np.float64]) -> float:
        error = np.sqrt((variances / patients).sum()) / len(sites)
        return float(stats.t.ppf(0.975, patients.sum() - len(sites)) * error)

    mean = Gain(mean=float(apart.mean()), deviation=0.0, p=None, wins=3, losses=0, pairs=3)
    gain, _ = rows.certain("Better", "Good", mean, {})
    drawn_apart = sum(np.array([sheet.score * (1 - sheet.score) for sheet in each]) for each in (good, better))
    assert reach(drawn_apart) > apart.mean() > reach(apart * (1 - apart))
    assert gain.interval is not None and gain.interval[0] > 0
    assert (gain.interval[1] - gain.interval[0]) / 2 == pytest.approx(reach(apart * (1 - apart)), rel=0.25)


def test_the_tables_say_who_is_level_with_the_first(done: tuple[Path, Plan, Results]) -> None:
    results, plan, found = done
    first = first_row(found.rows, found.measure)
    assert first is not None
    told = level_text(found)
    assert told.startswith(f"Level with {first.name}, the first row: ")
    for row in found.rows:
        if row.to_first and row.to_first.interval and row.name != "Pooled":
            where = told.partition(" Surely behind it: ")[2 if row.to_first.interval[1] < 0 else 0]
            assert row.name in where
    assert "Pooled" not in told
    head, lines = comparison_tables.leaderboard(found)
    place = head.index("to the first")
    assert {line[0]: line[place] == "" for line in lines if line[0] in named(found)} == {
        name: name == first.name for name in named(found)
    }
    assert all(len(line) == len(head) for line in lines)
    page = " ".join(html.unescape(write_report(found, results).read_text()).split())
    assert told in page and "<th>to the first</th>" in page and told in comparison_tables.markdown(found)
    csv = next(sheet for sheet in sheets(found) if sheet.name == "leaderboard")
    assert all(len(row) == len(csv.head) for row in csv.rows)
    frame = ComparisonResult(results, found).leaderboard
    assert frame.loc["Local", "to_first"] == named(found)["Local"].to_first.mean  # type: ignore[union-attr]
    for file in (results / "runs").glob("*/cases.npz"):
        file.rename(file.with_suffix(".kept"))  # as runs of before
    before = collect(plan, results, {})
    for kept in (results / "runs").glob("*/cases.kept"):
        kept.rename(kept.with_suffix(".npz"))
    assert level_text(before) == "" and named(before)["Local"].to_first is not None
    assert named(before)["Local"].to_first.interval is None  # type: ignore[union-attr]
