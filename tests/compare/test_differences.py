# SPDX-License-Identifier: Apache-2.0
"""How hospitals' models differ, and the network between them, on the report."""

import json
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
import yaml

from comparing import compared
from medpfl.compare.aggregate import mean_differences
from medpfl.compare.plan import Plan
from medpfl.compare.report import write_report as write_page
from medpfl.compare.results import Results
from medpfl.compare.run_results import TrainedRun
from medpfl.compare.runner import read_run
from medpfl.core.mixers import Mean, NetworkProx
from medpfl.job import Job
from medpfl.methods.pfednet import PFedNet
from medpfl.results.differences import QUANTILES, sdwd, sdwd_of_slots
from medpfl.results.report import write_report
from small_jobs import write_table_sites
from tools import run

NAMED = [["anna", "dora"], ["berta", "anna"]]


def test_sdwd_of_two_is_half_their_difference() -> None:
    states = [{"w": torch.tensor([1.0, 2.0, 2.0]), "n": torch.tensor(3)}, {"w": torch.tensor([1.0, 4.0, 1.0])}]
    np.testing.assert_allclose(sdwd([states[0], {**states[1], "n": torch.tensor(9)}]), [0, 1, 0.5])


@pytest.mark.usefixtures("rendered")
@pytest.mark.slow
def test_report(make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path) -> None:
    mixers = {
        "fedavg": Mean(),
        "shared": Mean(uniform=True),
        "personal": NetworkProx(tau=0.01, graph="given", edges=NAMED),
    }
    found = run(make_job(mixers=mixers, method=PFedNet(lr=0.05, batch_size=8)), table_sites, tmp_path)
    results = tmp_path / "results"
    summary = json.loads((results / "summary.json").read_text())
    edges = [["anna", "berta"], ["anna", "dora"]]  # each once, in the roster's order
    assert summary["panels"] == [{"kind": "graph", "slot": "personal", "edges": edges}]
    page = write_report(results).read_text()
    assert "2 edges of the network" in page and "deviation of weights" in page
    boxes = sdwd_of_slots(results, summary["slots"])
    assert list(boxes) == ["personal"]  # the others are the same everywhere
    slots = found["slots"]["personal"]
    keys = sorted({name.partition("::")[2] for name in slots})
    whole = np.stack([np.concatenate([slots[f"{site}::{k}"].flatten().numpy() for k in keys]) for site in table_sites])
    np.testing.assert_allclose(boxes["personal"], np.quantile(whole.std(axis=0), QUANTILES), rtol=1e-5)


def test_a_run_whose_models_became_one_counts_as_no_difference() -> None:
    differing = {"personal": [1.0, 2.0, 3.0, 4.0, 5.0]}
    assert (
        mean_differences([differing, {}])
        == mean_differences([{}, differing])
        == {"personal": [0.5, 1.0, 1.5, 2.0, 2.5]}
    )
    assert mean_differences([{}, {}]) == {}


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Plan, Results]:
    """Before anything asks for figures that are rendered: the runs' own are not looked at."""
    slots = {"personal": {"path": "medpfl.core.mixers.NetworkProx", "args": {"graph": "complete"}}}
    method = {"path": "medpfl.methods.pfednet.PFedNet", "slots": slots, "sweep": {"personal.tau": [0.0, 0.05, 1e6]}}
    methods = yaml.safe_load(yaml.safe_dump({"pFedNet": method}))
    folder = tmp_path_factory.mktemp("swept")
    sites = write_table_sites(folder / "sites")
    return folder, *compared(folder, sites, seeds=[0, 1], methods=methods)


@pytest.mark.usefixtures("rendered")
@pytest.mark.slow
def test_a_sweep_of_tau_shows_that_models_come_together(swept: tuple[Path, Plan, Results]) -> None:
    folder, plan, content = swept
    rows = {row.name: row for row in content.rows}
    for name in (f"pFedNet personal.tau {tau}" for tau in ("0.0", "0.05")):
        runs = [run for run in plan.runs if run.entry.name == name]
        found = [read_run(folder / "results", run, TrainedRun).sdwd for run in runs]
        mean = np.mean([each["personal"] for each in found], axis=0)
        np.testing.assert_allclose(rows[name].sdwd["personal"], mean)
        assert found[0] != found[1]
    middle = {row.name: row.sdwd.get("personal", [0.0] * 5)[2] for row in content.rows}
    alone, some, together = (middle[f"pFedNet personal.tau {tau}"] for tau in ("0.0", "0.05", "1000000.0"))
    assert alone > some > together == pytest.approx(0, abs=1e-6)
    (folder / "figures").mkdir()
    (folder / "figures" / "communication.svg").write_text("of an earlier file")
    page = write_page(content, folder, []).read_text()
    assert "How hospitals' models differ" in page
    drawn = {path.name: ElementTree.parse(path).getroot().tag for path in (folder / "figures").iterdir()}
    assert set(drawn) == {"labels.svg", "curves.svg", "differences.svg", "pFedNet-by-personal.tau.svg"}
    assert set(drawn.values()) == {"{http://www.w3.org/2000/svg}svg"}
    boxes = (folder / "figures" / "differences.svg").read_text()
    assert boxes.index(">pFedNet personal.tau 0.05</text>") < boxes.index(">pFedNet personal.tau 0.0</text>")
    line = (folder / "figures" / "pFedNet-by-personal.tau.svg").read_text()
    assert all(f">{value}</text>" in line for value in ("0", "0.05", "1e+06"))  # 0 has a place on the wide scale
