# SPDX-License-Identifier: Apache-2.0
"""Several labels, a number, and the time until an event: from site files to models in use. Nothing outside the tasks
and the kinds of datasets knows them; over FLARE a job of theirs is as ``simulate``, bit for bit."""

import csv
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from answers import SITES, declare
from comparing import SOFT, compared
from evaluating import evaluate_at
from in_process import Harness
from medpfl.check.check import check_data
from medpfl.cli import app
from medpfl.compare.report import write_report
from medpfl.core.mixers import Identity, Mean, SoftPull
from medpfl.data.site_file import load_site_file
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.job import EvaluationJob, Job, load_job, write_evaluation_job
from medpfl.methods.softpull import SoftPull as SoftPulled
from medpfl.results.files import read_summary, read_training
from medpfl.rounds.simulate import simulate_evaluation
from medpfl.tasks import MultiLabel, Regression, Survival
from medpfl.tasks.contract import Task
from small_jobs import small_job
from tools import assert_same, outcome, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("few_resamples")]
ROOT = Path(__file__).resolve().parents[2]
TASKS: dict[str, Task] = {
    "several": MultiLabel(dataset="ward"),
    "value": Regression(dataset="ward", centre=5.0, spread=4.0, unit="days"),
    "survival": Survival(
        dataset="ward", horizons=(20.0, 60.0), unit="days", more_metrics=("integrated_brier", "brier_1")
    ),
}
NAMED = {"several": "macro auc", "value": "mae (days, lower is better)", "survival": "c index"}
ARGS: dict[str, dict[str, Any]] = {
    "several": {"dataset": "ward"},
    "value": {"dataset": "ward", "centre": 5.0, "spread": 4.0, "unit": "days"},
    "survival": {"dataset": "ward", "horizons": [20, 60], "unit": "days", "more_metrics": ["integrated_brier"]},
}


def invoked(*arguments: object) -> str:
    done = CliRunner().invoke(app, [str(one) for one in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return " ".join(done.output.split())


def job_folder(answer: str, folder: Path) -> Path:
    """A shipped job whose task is another."""
    shutil.copytree(ROOT / "jobs" / "softpull_heart", folder)
    client, server = (folder / "app" / "config" / f"config_fed_{side}.json" for side in ("client", "server"))
    content = json.loads(client.read_text())
    kind = type(TASKS[answer])
    content["executors"][0]["executor"]["args"] = {
        "method": {"path": "medpfl.methods.softpull.SoftPull", "args": {"lr": 0.1}},
        "task": {"path": f"{kind.__module__}.{kind.__name__}", "args": ARGS[answer]},
    }
    client.write_text(json.dumps(content))
    content = json.loads(server.read_text())
    content["workflows"][0]["args"] = {"rounds": 4, "finetune": 1}
    server.write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module", params=list(TASKS))
def done(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """What is learnt, and the folder of its sites, its job and its results."""
    answer, folder = request.param, tmp_path_factory.mktemp(request.param)
    for site in SITES:
        declare(folder / "sites", site, answer)
    job = job_folder(answer, folder / "job")
    assert "ward" in invoked("check-data", folder / "sites" / "anna.yaml", "--job", job)
    printed = invoked("simulate", job, "--sites", folder / "sites", "--results", folder / "results")
    assert NAMED[answer] in printed.lower()
    return answer, folder


def test_it_is_learnt_told_and_used(done: tuple[str, Path], tmp_path: Path) -> None:
    answer, folder = done
    summary = read_training(folder / "results")
    score = TASKS[answer].score
    assert summary.score == score and summary.measure(score) == TASKS[answer].measure
    found = [line.metrics[score] for line in summary.test if line.choice == "best" and line.model == "personal"]
    values = [value for value in found if value is not None]
    mean = sum(values) / len(SITES)  # chance has 0.5; the mean of all days is wrong by 2.5
    assert len(values) == len(SITES) and (mean < 2 if answer == "value" else mean > 0.65)
    page = (folder / "results" / "report.html").read_text()
    assert NAMED[answer].split(" (")[0] in page.lower()

    model = next((folder / "results" / "home").glob("anna/*/models/personal-best.safetensors"))
    rows = list(csv.DictReader(model.with_suffix(".csv").open()))
    assert len(rows) == 12 and model.with_suffix(".md").is_file()
    (tmp_path / "new.csv").write_text("age,pain\n40,-1\n80,1\n")
    invoked("predict", model, tmp_path / "new.csv", "-o", tmp_path / "out")
    well, ill = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    for column in well:
        if column != "case":
            assert float(well[column]) < float(ill[column])
    columns = {
        "several": {"p_oedema", "p_effusion", "p_nodule"},
        "value": {"predicted"},
        "survival": {"log_hazard_ratio", "risk_20", "risk_60"},
    }
    assert set(well) - {"case"} == columns[answer]

    deployed = load_deployed(model)
    assert score in evaluate_at(deployed, load_site_file(folder / "sites" / "berta.yaml"), "test").metrics
    export(model, tmp_path / "ts", "torchscript")
    more = {"medpfl.json": ""}
    torch.jit.load(str(tmp_path / "ts" / "model.ts"), _extra_files=more)
    told = json.loads(more["medpfl.json"])["output"]
    expected = {
        "several": "sigmoid of each",
        "value": "4 times the output plus 5 (days)",
        "survival": "survival is the",
    }
    assert expected[answer] in told.get("answer", told.get("probabilities"))


def test_a_survival_models_baseline_stays_in_its_file(done: tuple[str, Path]) -> None:
    answer, folder = done
    if answer != "survival":
        pytest.skip("other tasks fit none")
    models = sorted((folder / "results" / "home").glob("*/*/models/personal-best.safetensors"))
    fitted = [history.fitted for model in models if (history := load_deployed(model).meta.history)]
    assert len(set(fitted)) == len(SITES) and all(1 > first > second > 0 for first, second, *_ in fitted)
    brier = read_training(folder / "results").test[0].metrics["integrated_brier"]
    assert brier is not None and 0 < brier < 0.5
    for text in (folder / "results").glob("*.json*"):
        assert all(str(value) not in text.read_text() for each in fitted for value in each)


def test_a_given_survival_model_is_tested_where_no_training_case_has_the_event(
    done: tuple[str, Path], tmp_path: Path
) -> None:
    """It can be tested there, though nothing can be trained; only the Brier scores need a baseline of its own."""
    answer, folder = done
    if answer != "survival":
        pytest.skip("others need no event")
    sites = {site: declare(tmp_path / "sites", site, answer) for site in SITES[:2]}
    sites["clara"] = declare(tmp_path / "sites", "clara", answer, split={"column": "part"})
    head, *lines = (tmp_path / "sites" / "clara.csv").read_text().splitlines()
    parts = [f"{line},test" for line in lines[:30]]
    parts += [
        f"{line.replace('dead', 'alive')},{['train', 'validation'][row % 2]}" for row, line in enumerate(lines[30:])
    ]
    (tmp_path / "sites" / "clara.csv").write_text("\n".join([f"{head},part", *parts]) + "\n")
    model = next((folder / "results" / "home").glob("anna/*/models/personal-best.safetensors"))
    job = load_job(write_evaluation_job(model, tmp_path / "jobs"))
    assert isinstance(job, EvaluationJob)
    simulate_evaluation(job, sites, tmp_path / "results", tmp_path / "home")
    found = {line.site: line.metrics for line in read_summary(tmp_path / "results").test}
    assert found["clara"]["c_index"] is not None and found["clara"]["integrated_brier"] is None
    assert found["anna"]["integrated_brier"] is not None


def test_methods_are_compared_by_it(tmp_path: Path) -> None:
    sites = {site: declare(tmp_path / "sites", site, "survival") for site in SITES[:2]}
    task = {"path": "medpfl.tasks.survival.Survival", "args": {"dataset": "ward", "horizons": [50]}}
    _, content = compared(tmp_path, sites, task=task, methods={"Soft": SOFT}, lr=0.1, pooled=True)
    assert content.score == "c_index" and not math.isnan(content.target or math.nan)
    assert "c index" in write_report(content, tmp_path / "page").read_text().lower()


@pytest.mark.harness
def test_over_flare_it_is_as_simulated(tmp_path: Path) -> None:
    """Batches are small enough that some of them have no event."""
    sites = {site: declare(tmp_path / "sites", site, "survival") for site in SITES[:2]}

    def job() -> Job:
        mixers = {"local": Identity(), "fedavg": Mean(), "model": SoftPull(lam=0.5)}
        return small_job(2, mixers, SoftPulled(lr=0.1, batch_size=3), TASKS["survival"])

    harness = Harness(job(), sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(job(), sites, tmp_path / "simulated"))


def test_the_data_check_tries_it(tmp_path: Path) -> None:
    file = declare(tmp_path, "anna", "several")
    report = check_data(file, None, ("ward", TASKS["several"]), lambda what, done, count: None)
    assert report.passed and report.trial and report.trial.parameters == 9
