# SPDX-License-Identifier: Apache-2.0
"""The end of a job: every hospital takes the model that its own validation cases support."""

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from evaluating import evaluate_at
from in_process import Harness
from medpfl.core.errors import ProtocolError
from medpfl.core.mixers import Mean
from medpfl.data.site_file import load_site_file
from medpfl.deployed.choice import Choice
from medpfl.deployed.export import export
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.results.files import read_training
from medpfl.rounds.hospital import choosing
from medpfl.rounds.protocol.replies import FinishReply
from medpfl.rounds.protocol.requests import FinishRequest
from medpfl.rounds.server.answers import check_answer
from medpfl.rounds.simulate import simulate
from medpfl.rounds.terms import terms_of
from medpfl.tasks.metrics.sheet import Sheet
from small_jobs import SITES, write_table_sites
from stay import Stay
from tools import run

Make = Callable[..., Job]


def taking(name: str) -> Callable[..., Choice]:
    """A validation that supports the model of that name."""

    def choice(sheets: dict[str, Sheet], *_: object) -> Choice:
        return Choice(name, {each: sheet.score for each, sheet in sheets.items()}, 9, name, 0.2, 0.1, 1.5, (0.1, 0.3))

    return choice


def models(folder: Path, site: str = "anna") -> Path:
    return folder / "home" / site / "small" / "models"


@pytest.mark.slow
def test_the_choice_and_the_intervals_are_in_the_results(make_job: Make, tmp_path: Path) -> None:
    sites = write_table_sites(tmp_path / "sites", rows=60)
    run(make_job(), sites, tmp_path)
    summary = read_training(tmp_path / "results")
    assert list(summary.chosen) == SITES
    for site, row in summary.chosen.items():
        (line,) = [one for one in summary.test if (one.site, one.model, one.choice) == (site, row.test.model, "best")]
        assert row.test == line  # of the model as it was tested
        deployed = load_deployed(models(tmp_path, site) / "chosen-best.safetensors")
        history = deployed.meta.history
        assert history is not None and history.chosen is not None and history.certainty == row.test.certainty
        assert history.chosen.model == row.test.model
        assert set(history.chosen.candidates) == {
            "local", "fedavg", "fedavg_before_mean", "fedavg_finetuned", "personal", "personal_before_pull", "average"
        }  # fmt: skip
        found = evaluate_at(deployed, load_site_file(sites[site], site), "test").metrics
        assert found["accuracy"] == row.test.metrics["accuracy"]
        assert f'support the model "{row.test.model}"' in (models(tmp_path, site) / "chosen-best.md").read_text()
    for line in summary.test:
        sure = line.certainty
        assert sure is not None and sure.patients == summary.sizes[line.site]["test"]
        assert sure.interval[0] <= line.metrics["accuracy"] <= sure.interval[1]  # type: ignore[operator]
        local = next(o for o in summary.test if (o.site, o.model, o.choice) == (line.site, "local", line.choice))
        expected = line.metrics["accuracy"] - local.metrics["accuracy"]  # type: ignore[operator]
        assert sure.gain == (None if line.model == "local" else pytest.approx(expected, abs=1e-6))


@pytest.mark.slow
def test_the_average_of_all_is_deployed_as_the_others_are(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("medpfl.rounds.hospital.choosing.choose", taking("average"))
    job = make_job()
    run(job, table_sites, tmp_path)
    summary = read_training(tmp_path / "results")
    row = summary.chosen["anna"]
    assert (row.test.model, row.test.round, row.gain, row.interval) == ("average", 3, 0.2, (0.1, 0.3))
    assert "average" not in {line.model for line in summary.test}  # a column of its own it has not
    folder = models(tmp_path)
    average = load_deployed(folder / "chosen-best.safetensors")
    members = [load_deployed(path) for path in sorted(folder.glob("*-best.safetensors")) if "chosen" not in path.name]
    assert len(members) == 6
    inputs = torch.randn(5, 3)
    mean = torch.stack([one.task.decide(one(inputs)) for one in members]).mean(dim=0)
    torch.testing.assert_close(average.task.decide(average(inputs)), mean)
    site_file = load_site_file(table_sites["anna"], "anna")
    assert evaluate_at(average, site_file, "test").metrics["auc"] == row.test.metrics["auc"]
    rows = list(csv.DictReader((folder / "chosen-best.csv").open()))
    assert len(rows) == summary.sizes["anna"]["test"]
    assert (export(folder / "chosen-best.safetensors", tmp_path / "exported", "torchscript") / "model.ts").is_file()


@pytest.mark.slow
def test_numbers_are_chosen_and_averaged_too(make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sites = write_table_sites(tmp_path / "sites")
    for path in sites.values():
        content = yaml.safe_load(path.read_text())
        blood = content["datasets"]["blood"]
        del blood["label"]
        blood["value"] = "c"
        blood["features"] = {"a": "number", "b": "number"}
        path.write_text(yaml.safe_dump(content))
    run(make_job(task=Stay("blood")), sites, tmp_path / "by itself")
    summary = read_training(tmp_path / "by itself" / "results")
    for row in summary.chosen.values():
        sure = row.test.certainty
        assert sure is not None and sure.interval[0] <= row.test.metrics["mae"] <= sure.interval[1]  # type: ignore[operator]
    (local,) = [o for o in summary.test if (o.site, o.model, o.choice) == ("anna", "local", "best")]
    (fedavg,) = [o for o in summary.test if (o.site, o.model, o.choice) == ("anna", "fedavg", "best")]
    assert fedavg.certainty is not None  # lower is better: a gain is what it is lower by
    assert fedavg.certainty.gain == pytest.approx(local.metrics["mae"] - fedavg.metrics["mae"], abs=1e-5)  # type: ignore[operator]
    monkeypatch.setattr("medpfl.rounds.hospital.choosing.choose", taking("average"))
    run(make_job(task=Stay("blood")), sites, tmp_path / "average")
    average = load_deployed(models(tmp_path / "average") / "chosen-best.safetensors")
    assert average(torch.randn(5, 2)).shape == (5, 1)


@pytest.mark.parametrize("rule", ["no validation", "no local model", "few patients"])
@pytest.mark.slow
def test_where_there_is_nothing_to_choose_by(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, rule: str
) -> None:
    job = make_job()
    content = yaml.safe_load(table_sites["anna"].read_text())
    if rule == "no validation":
        content["datasets"]["blood"]["split"] = {"fractions": {"train": 0.7, "test": 0.3}}
    if rule == "few patients":
        content["policy"] = {"least_scored": 7}
        content["datasets"]["blood"]["split"] = {"fractions": {"train": 0.6, "validation": 0.2, "test": 0.2}}
    if rule == "no local model":
        job = make_job(mixers={"fedavg": Mean()}, method=FedAvg(lr=0.05, batch_size=8))
    table_sites["anna"].write_text(yaml.safe_dump(content))
    run(job, table_sites, tmp_path)
    summary = read_training(tmp_path / "results")
    if rule == "no local model":
        assert not summary.chosen and not (models(tmp_path) / "chosen-best.safetensors").exists()
        assert all(line.certainty is None or line.certainty.gain is None for line in summary.test)
    elif rule == "no validation":
        row = summary.chosen["anna"]
        assert (row.test.model, row.gain, row.interval) == ("local", None, None)
        assert "too few" in (models(tmp_path) / "chosen-best.md").read_text()
    else:
        assert summary.chosen["anna"].gain is not None  # eight of each


@pytest.mark.harness
@pytest.mark.slow
def test_flare_chooses_as_simulate_does(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    harness = Harness(make_job(), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    simulate(make_job(), table_sites, tmp_path / "here" / "results", tmp_path / "here" / "home")
    found = [json.loads(path.read_text()) for path in sorted(tmp_path.rglob("summary.json"))]
    assert len(found) == 2 and found[0]["chosen"] == found[1]["chosen"] and found[0]["chosen"]
    assert found[0]["test"] == found[1]["test"]


def answer(make_job: Make) -> tuple[FinishRequest, FinishReply, Any]:
    line = {"model": "local", "split": "test", "round": 3, "metrics": {"accuracy": 0.5}, "choice": "best"}
    reply = FinishReply.model_validate_json(json.dumps({"metrics": [], "notes": [], "chosen": {"test": line}}))
    request = FinishRequest(run="r", round=3, rounds=3, best={}, finetune=2)
    return request, reply, terms_of(make_job())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "music"}, "tells of 'music', which is not of the job's method"),
        ({"model": "average", "round": 2}, "not of the test of a best or the last round|not of the job's method"),
        ({"metrics": {"accuracy": 1.5}}, "not between 0 and 1"),
        ({"metrics": {"accuracy": None}, "certainty": {"patients": 8, "interval": [0, 1]}}, "and not the accuracy"),
        ({"certainty": {"patients": 8, "interval": [0.1, 1.5]}}, "an interval of 'local' is not between 0 and 1"),
        ({"certainty": {"patients": 8, "interval": [0.6, 0.5]}}, "ends before it begins"),
        ({"certainty": {"patients": 8, "interval": [0, 1], "gain": -1.2}}, "not between -1 and 1"),
    ],
    ids=str,
)
def test_a_choice_that_cannot_be_is_refused(make_job: Make, change: dict[str, Any], words: str) -> None:
    request, reply, terms = answer(make_job)
    check_answer(request, reply, terms)
    said = json.loads(reply.model_dump_json())
    said["chosen"]["test"].update(change)
    with pytest.raises(ProtocolError, match=words):
        check_answer(request, FinishReply.model_validate_json(json.dumps(said)), terms)


def test_without_a_local_model_nothing_can_be_chosen(make_job: Make) -> None:
    request, reply, _ = answer(make_job)
    alone = make_job(mixers={"fedavg": Mean()}, method=FedAvg(lr=0.05))
    with pytest.raises(ProtocolError, match="no local model rides along"):
        check_answer(request, reply, terms_of(alone))


@pytest.mark.slow
def test_a_model_whose_best_round_is_the_last_is_tested_once(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test set may be large volumes; both files hold what the one test found."""
    tested: list[str] = []
    evaluate_test = choosing.evaluate_test

    def counted(method: Method, name: str, *rest: Any) -> Any:
        tested.append(name)
        return evaluate_test(method, name, *rest)

    monkeypatch.setattr(choosing, "evaluate_test", counted)
    job = make_job(rounds=1)
    run(replace(job, settings=replace(job.settings, finetune=0)), table_sites, tmp_path)
    summary = read_training(tmp_path / "results")
    found = {(line.site, line.model, line.choice): line for line in summary.test if line.site in table_sites}
    assert len(tested) == len(found) / 2 > 0
    for site, model, _ in found:
        best, last = found[site, model, "best"], found[site, model, "last"]
        assert best.round == last.round == 1 and best.metrics == last.metrics
