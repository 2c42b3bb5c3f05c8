# SPDX-License-Identifier: Apache-2.0
"""What a method shows of its own in a job's report."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
from torch import nn

from medpfl.core.mixers import Mean
from medpfl.data.samples import Samples
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedsm import FedSM
from medpfl.methods.fedsm.super_model import SuperModel
from medpfl.methods.joint_study import Point, SplitStudy, Study
from medpfl.methods.panels import AtServer, Panel, SharesPanel
from medpfl.results.files import read_training
from medpfl.results.report import write_report
from medpfl.rounds.simulate import simulate

Make = Callable[..., Job]


@dataclass(frozen=True, kw_only=True)
class Telling(FedAvg):
    """Measures something, and shows a table; as a method of another package would."""

    diagnoses: ClassVar = ("cases_seen",)

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: object) -> dict[str, float]:
        return {"cases_seen": float(len(samples))}

    def report_panels(self, known: AtServer) -> list[Panel]:
        shares = {"anna": {"own": 0.25, "<others>": 0.75}}
        return [*super().report_panels(known), SharesPanel(title="Who & whom", shares=shares, note="Of all.")]


@pytest.mark.usefixtures("rendered")
@pytest.mark.slow
def test_a_method_says_its_panels(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(rounds=2, mixers={"fedavg": Mean()}, method=Telling(lr=0.05, batch_size=8))
    simulate(job, table_sites, tmp_path / "results", tmp_path / "home")
    panels = read_training(tmp_path / "results").panels
    assert [panel.kind for panel in panels] == ["curves", "shares"]
    page = (tmp_path / "results" / "report.html").read_text()
    assert "What the method measures of its models" in page and ">cases seen</text>" in page
    assert "Who &amp; whom" in page and "<th>&lt;others&gt;</th>" in page and "<td>0.75</td>" in page


@dataclass(frozen=True, kw_only=True)
class Undefined(FedAvg):
    diagnoses: ClassVar = ("never_known", "cases_seen")

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: object) -> dict[str, float]:
        return {"never_known": math.nan, "cases_seen": float(len(samples))}


@pytest.mark.usefixtures("rendered")
@pytest.mark.slow
@pytest.mark.filterwarnings("error::UserWarning")
def test_what_was_never_a_number_has_no_picture(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """Its empty picture came first, was the one with the legend, and matplotlib warned of that on the terminal."""
    job = make_job(rounds=2, mixers={"fedavg": Mean()}, method=Undefined(lr=0.05, batch_size=8))
    simulate(job, table_sites, tmp_path / "results", tmp_path / "home")
    page = (tmp_path / "results" / "report.html").read_text()
    assert ">cases seen</text>" in page and ">never known</text>" not in page


def test_a_super_model_shows_which_model_served_whom() -> None:
    """With its own gamma, not with the others that were tried."""
    points = [Point(gamma=0.5, score=0.7, counts=[0, 3, 1]), Point(gamma=0.9, score=0.8, counts=[2, 1, 1])]
    study = Study(validation=None, test=SplitStudy(cases=4, alone=[0.5, 0.6, 0.7], points=points))
    model = SuperModel(trained=FedSM(), hospitals=("anna", "berta"), gamma=0.9)
    (panel,) = model.report_panels(AtServer(studies={"anna": study}))
    assert isinstance(panel, SharesPanel) and panel.note.endswith("with gamma 0.9.")
    assert panel.shares == {"anna": {"global": 0.5, "anna": 0.25, "berta": 0.25}}
    assert model.with_gamma(0.123).report_panels(AtServer(studies={"anna": study})) == []


@pytest.mark.slow
def test_graphs_of_files_of_before_are_shown(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    simulate(make_job(rounds=1), table_sites, tmp_path / "results", tmp_path / "home")
    path = tmp_path / "results" / "summary.json"
    said = json.loads(path.read_text())
    assert said.pop("panels", []) == []
    path.write_text(json.dumps({**said, "networks": {"model": [["anna", "berta"]]}}))
    assert read_training(tmp_path / "results").networks == {"model": [("anna", "berta")]}
    assert "1 edge of the network" in write_report(tmp_path / "results").read_text()
