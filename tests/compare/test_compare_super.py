# SPDX-License-Identifier: Apache-2.0
"""A super model in a comparison: a row of its own, as the server can put it together from the job's results."""

from pathlib import Path

import numpy as np
import pytest

from comparing import compared
from medpfl.compare.comparison_tables import markdown
from medpfl.compare.plan import Plan
from medpfl.compare.report import write_report
from medpfl.compare.results import Results
from medpfl.data.site_file import load_site_file
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import evaluate_on
from medpfl.tasks.tabular import Tabular
from small_jobs import write_table_sites

TASK = Tabular(dataset="blood", hidden=(4,))
FEDSM = {"path": "medpfl.methods.fedsm.FedSM", "args": {"selector_steps": 3}}


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path], Plan, Results]:
    folder = tmp_path_factory.mktemp("super")
    sites = write_table_sites(folder / "sites", ["anna", "berta", "clara"])
    plan, content = compared(folder, sites, methods={"SM": FEDSM})
    return folder / "results", sites, plan, content


@pytest.mark.slow
def test_its_scores_are_those_of_the_file_that_the_results_give(
    done: tuple[Path, dict[str, Path], Plan, Results],
) -> None:
    results, sites, plan, content = done
    rows = {row.name: row for row in content.rows}
    assert {"SM", "SM (global)", "SM (super)"} <= rows.keys()
    run = next(run for run in plan.runs if run.name == "SM")
    model = load_deployed(results / "runs" / run.digest / "results" / "super.safetensors")
    assert model.meta.history is not None and model.meta.history.round == plan.file.rounds
    row = rows["SM (super)"]
    assert row.best_rounds == [plan.file.rounds] and row.curve == []
    found = {}
    for site, path in sites.items():
        data = TASK.load(load_site_file(path, site))
        found[site] = evaluate_on(model, data, "test").metrics["accuracy"]
        assert row.hospitals[site].best.values == [pytest.approx(found[site], abs=1e-6)]
        assert row.hospitals[site].last == row.hospitals[site].best
    assert row.best.mean == pytest.approx(np.mean(list(found.values())), abs=1e-6)
    assert np.array(row.cross) == pytest.approx(np.array([list(found.values())] * 3), abs=1e-6)


@pytest.mark.slow
def test_who_served_whom_is_told(done: tuple[Path, dict[str, Path], Plan, Results], tmp_path: Path) -> None:
    _, sites, _, content = done
    rows = {row.name: row for row in content.rows}
    assert rows["SM"].selection is None and rows["Local"].selection is None
    found = rows["SM (super)"].selection
    assert len(found.gammas) == 1 and 0 <= found.gammas[0] <= 1
    assert list(found.served) == sorted(sites)
    for shares in found.served.values():
        assert list(shares) == ["global", *sorted(sites)] and sum(shares.values()) == pytest.approx(1, abs=1e-5)
    assert "## Which model served whose test cases" in markdown(content)
    page = write_report(content, tmp_path).read_text(encoding="utf-8")
    assert "Which model served whose test cases" in page
    assert page.count("slot “personal”, seed") == 1  # three rows, one matrix
