# SPDX-License-Identifier: Apache-2.0
"""Where no run of a comparison came to its end, the sentence says why the first did not; where some did not, the
tables of ``results.md`` and of the console say of how many runs a method's numbers are. Where a search chose nothing,
they say whether its candidates could not be trained, have no validation score, or were not tried yet."""

import re
from pathlib import Path

import pytest

from comparing import FILE, SOFT, do, plan_of
from medpfl.compare.collect import collect
from medpfl.compare.comparison_tables import leaderboard, markdown, searches
from medpfl.compare.plan import decide
from medpfl.core.errors import MedPFLError
from small_jobs import write_table_sites


@pytest.mark.slow
def test_the_reason_is_told(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, write_table_sites(tmp_path / "sites", ["anna", "berta"]))
    failures = {run.digest: f"{run.name} went wrong" for run in plan.runs}
    with pytest.raises(MedPFLError, match=r"no run of comparison 'small' is finished.*compare: Local went wrong"):
        collect(plan, tmp_path / "results", failures)


@pytest.mark.slow
def test_a_missing_run_is_told(tmp_path: Path) -> None:
    """The mean of one seed stood beside those of two without a word."""
    files = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    plan, results = plan_of(tmp_path, files, methods={"Soft": SOFT}, seeds=[0, 1]), tmp_path / "results"
    failed = next(run for run in plan.runs if (run.name, run.seed) == ("Soft", 1))
    do([run for run in plan.runs if run is not failed], files, results)
    content = collect(plan, results, {failed.digest: "anna broke"})
    names = [line[0] for line in leaderboard(content)[1]]
    assert {"Soft (1 of 2 runs)", "Soft (personal_before_pull) (1 of 2 runs)", "Local"} < set(names)
    text = markdown(content)
    assert "Not in these tables:\n\n- Soft, seed 1: anna broke\n" in text and "| Soft (1 of 2 runs) |" in text


@pytest.mark.slow
def test_a_candidate_without_a_score_is_not_called_undone(tmp_path: Path) -> None:
    """Local's weights reach no server that would refuse them, and so its run ends where FedAvg's breaks off."""
    files = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    tuning = {"budget": 2, "seeds": [100], "tune": {"lr": [0.01, 1e30]}}
    plan, results = plan_of(tmp_path, files, tuning=tuning, optimizer="sgd", rounds=1), tmp_path / "results"
    local, fedavg = plan.searches
    do([*local.runs[0], *local.runs[1], *fedavg.runs[0]], files, results)
    plan = decide(plan, results)
    do(plan.runs, files, results)
    lines = searches(collect(plan, results, {}))[1]
    assert [line[2] for line in lines if line[1] == "lr 1e+30"] == ["no validation score", "not done"]


@pytest.mark.slow
def test_a_search_without_any_score_says_so(tmp_path: Path) -> None:
    """Where nobody is ill there is no AUC: it read that nothing is finished, and not why."""
    files = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    for file in files.values():
        table = file.with_suffix(".csv")
        table.write_text(re.sub(",1$", ",0", table.read_text(), flags=re.MULTILINE))
    tuning = {"budget": 2, "seeds": [100], "tune": {"lr": [0.01, 0.1]}}
    task = {**FILE["task"], "args": {**FILE["task"]["args"], "score": "auc"}}
    plan, results = plan_of(tmp_path, files, tuning=tuning, task=task, rounds=1), tmp_path / "results"
    do((run for search in plan.searches for runs in search.runs for run in runs), files, results)
    with pytest.raises(MedPFLError, match=r"nothing to compare: no candidate of its search has a validation score$"):
        collect(decide(plan, results), results, {})
