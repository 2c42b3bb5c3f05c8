# SPDX-License-Identifier: Apache-2.0
"""A task without classes from another package (one number a case, less is better), from the site file to predictions.
Nothing of MedPFL knows it: what does not apply to numbers is left out, or refused in one sentence."""

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from typer.testing import CliRunner

from comparing import SOFT, compared
from evaluating import evaluate_at
from medpfl.check.check import check_data
from medpfl.cli import app
from medpfl.compare import comparison_tables
from medpfl.compare.report import write_report
from medpfl.core.errors import ConfigError, DataError, MedPFLError, SiteFileError
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.job import EvaluationJob, load_job, write_evaluation_job
from medpfl.methods.contract import Build
from medpfl.methods.fedmd import FedMD
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.moe import MoE
from medpfl.results.files import read_lines, read_summary, read_training
from medpfl.results.schema import ValidationLine
from medpfl.results.tables import result_table
from medpfl.rounds.simulate import simulate_evaluation
from medpfl.tasks import Tabular
from medpfl.tasks.metrics.measure import Measure
from stay import Stay

ROOT = Path(__file__).resolve().parents[2]
DAYS = Measure(direction="lower", unit="days")
SITES = ["anna", "berta", "clara"]


def declare(folder: Path, site: str, **changes: Any) -> Path:
    """Hospitals where older patients stay longer, each with days of its own on top."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(SITES.index(site))
    age, pain = rng.normal(60, 10, 40), rng.normal(size=40)
    days = 0.1 * age + pain + SITES.index(site) + 0.2 * rng.normal(size=40)
    rows = [f"{a:.4f},{p:.4f},{d:.4f}" for a, p, d in zip(age, pain, days, strict=True)]
    (folder / f"{site}.csv").write_text("\n".join(["age,pain,days", *rows]) + "\n")
    features = {"age": "number", "pain": "number"}
    dataset = {"kind": "table", "files": [f"{site}.csv"], "features": features, "value": "days", **changes}
    (folder / f"{site}.yaml").write_text(yaml.safe_dump({"site": site, "datasets": {"stays": dataset}}))
    return folder / f"{site}.yaml"


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("sites")
    return {site: declare(folder, site) for site in SITES}


@pytest.fixture(scope="module")
def results(sites: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``medpfl simulate`` leaves of a job that names the task by its class path."""
    folder = tmp_path_factory.mktemp("job")
    shutil.copytree(ROOT / "jobs" / "softpull_heart", folder / "job")
    client, server = (folder / "job" / "app" / "config" / f"config_fed_{side}.json" for side in ("client", "server"))
    content = json.loads(client.read_text())
    content["executors"][0]["executor"]["args"] = {
        "method": {"path": "medpfl.methods.softpull.SoftPull", "args": {"lr": 0.5}},
        "task": {"path": "stay.Stay", "args": {"dataset": "stays"}},
    }
    client.write_text(json.dumps(content))
    content = json.loads(server.read_text())
    content["workflows"][0]["args"] = {"rounds": 4, "finetune": 1}
    server.write_text(json.dumps(content))
    there = next(iter(sites.values())).parent
    arguments = ["simulate", str(folder / "job"), "--sites", str(there), "--results", str(folder / "results")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "mae (days, lower is better)" in " ".join(done.output.split())
    return folder


def model_of(results: Path) -> Path:
    return next((results / "results" / "home").glob("anna/*/models/personal-best.safetensors"))


@pytest.mark.slow
def test_the_round_with_the_lowest_error_is_the_best(results: Path) -> None:
    summary = read_training(results / "results")
    assert summary.classes == [] and summary.metrics == {"mae": DAYS}
    means = {
        (line.model, line.round): line.metrics["mae"]
        for line in read_lines(results / "results")
        if isinstance(line, ValidationLine) and line.site == "mean"
    }
    for model, found in summary.best.items():
        mine = {number: value for (name, number), value in means.items() if name == model and value is not None}
        assert found.score == mine[found.round] == min(mine.values()) < max(mine.values())
    assert "Test mae (days, lower is better)" in (results / "results" / "report.html").read_text()


@pytest.mark.slow
def test_the_hospital_keeps_a_card_and_its_cases(results: Path) -> None:
    card = model_of(results).with_suffix(".md").read_text()
    assert "- Classes: none" in card and "days, lower is better |" in card and "Calibration" not in card
    rows = list(csv.DictReader(model_of(results).with_suffix(".csv").open()))
    error = np.mean([abs(float(row["value"]) - float(row["predicted"])) for row in rows])
    assert f"| mae | {error:.4f} days" in card


@pytest.mark.slow
def test_new_cases_get_a_number(results: Path, tmp_path: Path) -> None:
    (tmp_path / "new.csv").write_text("age,pain\n40,0\n80,0\n")
    arguments = ["predict", str(model_of(results)), str(tmp_path / "new.csv"), "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0 and " days." in done.output
    young, old = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    assert set(young) == {"case", "predicted"} and float(young["predicted"]) < float(old["predicted"])


@pytest.mark.slow
def test_it_is_tested_at_another_hospital_and_exported(results: Path, sites: dict[str, Path], tmp_path: Path) -> None:
    model = load_deployed(model_of(results))
    assert evaluate_at(model, load_site_file(sites["berta"]), "test").metrics["mae"] > 0
    export(model_of(results), tmp_path / "ts", "torchscript")
    more = {"medpfl.json": ""}
    torch.jit.load(str(tmp_path / "ts" / "model.ts"), _extra_files=more)
    told = json.loads(more["medpfl.json"])
    assert told["classes"] == [] and told["output"]["answer"].startswith("one number a case")
    with pytest.raises(MedPFLError, match="for models that segment volumes, or whole images; this one's task is Stay"):
        export(model_of(results), tmp_path / "bundle", "monai")


@pytest.mark.slow
def test_a_given_model_is_evaluated_at_hospitals(results: Path, sites: dict[str, Path], tmp_path: Path) -> None:
    job = load_job(write_evaluation_job(model_of(results), tmp_path / "jobs"))
    assert isinstance(job, EvaluationJob)
    simulate_evaluation(job, sites, tmp_path / "results", tmp_path / "home")
    table = result_table(read_summary(tmp_path / "results"))
    assert table.labels == ["Mae (days, lower is better)"] and table.sites == SITES and (table.values > 0).all()
    assert "days, lower is better |" in next((tmp_path / "home").glob("anna/*/evaluation/*.md")).read_text()


def test_the_data_check_counts_cases_without_classes(sites: dict[str, Path]) -> None:
    report = check_data(sites["anna"], None, ("stay", Stay("stays")), lambda what, done, count: None)
    assert report.passed and report.trial and report.trial.parameters == 3
    (found,) = report.inspections
    assert found.splits["train"].cases == 24 and not any(found.splits["train"].classes)
    assert {column.name: column.role for column in found.columns} == dict.fromkeys(("age", "pain", "days"), "number")


@pytest.mark.slow
def test_methods_are_compared_by_it(sites: dict[str, Path], tmp_path: Path) -> None:
    task = {"path": "stay.Stay", "args": {"dataset": "stays"}}
    two = {site: sites[site] for site in ("anna", "berta")}
    _, content = compared(tmp_path, two, task=task, methods={"Soft": SOFT}, lr=0.5, pooled=True)
    assert content.measure == DAYS and content.splits[0].labels == {}
    rows = comparison_tables.ranked(content)
    means = [row.best.mean for row in rows if row.best.mean is not None]
    assert len(means) == len(rows) == 7 and means == sorted(means)
    by_name = {row.name: row for row in rows}
    soft, local = by_name["Soft"], by_name["Local"]
    assert soft.gain and soft.best.mean is not None and local.best.mean is not None
    assert soft.gain.mean == pytest.approx(local.best.mean - soft.best.mean, abs=2e-6)
    assert not any(row.calibration for row in rows)
    assert content.target == pytest.approx(min(local.curve), abs=2e-6)
    assert "mae (days, lower is better)" in comparison_tables.markdown(content)
    page = write_report(content, tmp_path / "page").read_text()
    assert "Who has which labels" not in page and "Calibration" not in page


@pytest.mark.parametrize("method", [FedRoD(), MoE(), FedMD(public="open")])
def test_methods_on_class_probabilities_refuse_it(method: Any, sites: dict[str, Path]) -> None:
    task = Stay("stays")
    build = Build(task, task.load(load_site_file(sites["anna"])), ("anna",), seed=0)
    with pytest.raises(
        ConfigError, match=rf"^{type(method).__name__} learns one class a case.*; the answer of Stay is "
    ):
        method.models(build)


def test_a_table_has_one_answer(sites: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="learns one class a case: it needs a table with 'label', which is not"):
        Tabular("stays").load(load_site_file(sites["anna"]))
    label = {"column": "days", "classes": {"short": [1], "long": [2]}}
    for changes, words in (
        ({"label": label}, "expected one of 'label', .* got 'label' and 'value'"),
        ({"value": "age"}, "the column to predict, 'age', is also a feature"),
        ({"split": {"stratify": True}}, "numbers have no class to stratify by"),
    ):
        with pytest.raises(SiteFileError, match=words):
            load_site_file(declare(tmp_path, "anna", **changes))
    declare(tmp_path, "berta")
    (tmp_path / "berta.csv").write_text("age,pain,days\n50,1,2\n60,0,soon\n")
    with pytest.raises(DataError, match=r"berta\.csv:3: column 'days': expected a number, got 'soon'"):
        Stay("stays").load(load_site_file(tmp_path / "berta.yaml"))


def test_what_the_targets_count() -> None:
    assert Target.CLASS.counts(torch.tensor([0, 2, 2]), 3) == [1, 0, 2]
    assert Target.LABELS.counts(torch.tensor([[1, 0], [1, 1]]), 2) == [2, 1]
    assert Target.VALUE.counts(torch.tensor([0.5]), 0) is None
    assert Target.MASK.counts(torch.zeros(1, 4, 4, dtype=torch.uint8), 2) is None
