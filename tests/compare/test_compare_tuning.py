# SPDX-License-Identifier: Apache-2.0
"""The search of arguments: an equal budget, chosen on validation, with seeds of its own."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from comparing import SOFT, compared, do, plan_of, write_file
from medpfl.cli import app
from medpfl.compare.file import load_comparison
from medpfl.compare.plan import decide
from medpfl.compare.runner import finished
from medpfl.compare.tuning import candidates_of
from medpfl.core.errors import ConfigError

TUNING: dict[str, Any] = {"budget": 2, "seeds": [100], "tune": {"lr": [0.01, 0.1]}}
METHODS: dict[str, Any] = {"Soft": {**SOFT, "tune": {"model.lam": [0.4, 0.6, 0.8]}}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"methods": METHODS}, "methods.Soft.tune needs 'tuning' with a budget"),
        ({"tuning": {**TUNING, "seeds": [0]}}, "seed 0 is in 'tuning.seeds' and in 'seeds'"),
        ({"tuning": {**TUNING, "budget": 1}}, "'tuning.budget': input should be greater than or equal to 2"),
        (
            {"tuning": {**TUNING, "tune": {"steps": [1, 2]}}},
            "tuning.tune may not set 'steps': it is the same for every",
        ),
        ({"tuning": {**TUNING, "tune": {"lr": []}}}, "'tuning.tune.lr': list should have at least 1 item"),
        ({"tuning": {"budget": 2, "seeds": [1]}}, "'tuning.tune' is missing"),
    ],
)
def test_a_broken_search_gets_one_sentence(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_comparison(write_file(tmp_path, **changes))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tuning": {**TUNING, "budget": 3}}, "tuning: Local has 2 candidates (lr) and the budget is 3"),
        ({"tuning": {**TUNING, "tune": {"mu": [0.1, 0.2]}}}, "Local: unknown argument 'mu' of Local"),
        (
            {"tuning": {**TUNING, "tune": {"lr": ["fast", 0.1]}}},
            "argument 'lr' of Local must be a number",
        ),
        (
            {"tuning": TUNING, "methods": {"Soft": {**SOFT, "tune": {"head.lam": [0.5]}}}},
            "methods.Soft: there is no slot 'head'; its slots are: model",
        ),
        (
            {"tuning": TUNING, "methods": {"Soft": {**SOFT, "tune": {"model.lam": [0.01]}}}},
            "methods.Soft.slots.model: SoftPull's lam must be in",
        ),
        (
            {"tuning": TUNING, "methods": {"Soft": {**SOFT, "tune": {"model.mu": [0.5]}}}},
            "methods.Soft.slots.model: unknown argument 'mu' of SoftPull",
        ),
    ],
)
def test_a_search_that_cannot_be_gets_one_sentence(
    tmp_path: Path, table_sites: dict[str, Path], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_of(tmp_path, table_sites, **changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
def test_every_method_gets_as_many_candidates(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    file = load_comparison(write_file(tmp_path, tuning=TUNING, methods=METHODS))
    assert candidates_of(file, "FedAvg") == [{"lr": 0.01}, {"lr": 0.1}]
    drawn = candidates_of(file, "Soft")
    assert len(drawn) == 2 and drawn == candidates_of(file, "Soft")  # two of six, the same ones every time
    assert all(set(each) == {"lr", "model.lam"} for each in drawn)
    own = {"Soft": {**SOFT, "tune": {"lr": [0.5, 0.7]}}}  # a method's own values go before those for all
    assert candidates_of(load_comparison(write_file(tmp_path, tuning=TUNING, methods=own)), "Soft") == [
        {"lr": 0.5},
        {"lr": 0.7},
    ]
    plan = plan_of(tmp_path, table_sites, tuning={**TUNING, "seeds": [100, 101]}, methods=METHODS, pooled=True)
    assert {search.name: len(search.candidates) for search in plan.searches} == {
        "Local": 2, "FedAvg": 2, "Pooled": 2, "Soft": 2,
    }  # fmt: skip
    assert not plan.runs and all(
        [run.seed for run in runs] == [100, 101] for each in plan.searches for runs in each.runs
    )
    soft = plan.searches[-1].candidates
    assert [(entry.method.lr, entry.mixers["model"].lam) for entry in soft] == [  # type: ignore[attr-defined]
        (each["lr"], each["model.lam"]) for each in drawn
    ]


@pytest.mark.slow
def test_the_choice_is_the_best_on_validation_and_no_test_is_read(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    tuning = {**TUNING, "seeds": [100, 101], "tune": {"lr": [1e30, 0.01, 0.1]}, "budget": 3}
    plan, content = compared(tmp_path, table_sites, tuning=tuning, methods={"Soft": SOFT})
    runs = tmp_path / "results" / "runs"
    assert content.tuning is not None
    told = {found.method: found for found in content.tuning}
    assert list(told) == ["Local", "FedAvg", "Soft"]
    for search in plan.searches:
        found = told[search.name]
        means: list[float] = []
        for candidate, of_seeds in zip(found.candidates, search.runs, strict=True):
            for run, score in zip(of_seeds, candidate.scores, strict=True):
                place = runs / run.digest
                assert not list(place.rglob("models")) and not (place / "results" / "summary.json").exists()
                lines = [json.loads(line) for line in (place / "results" / "metrics.jsonl").read_text().splitlines()]
                assert all(line["split"] != "test" for line in lines)
                rounds = [
                    line["metrics"]["accuracy"]
                    for line in lines
                    if line["site"] == "mean" and line["split"] == "validation"
                ]
                assert score is None or score >= max(rounds)  # and the last round's, which is not in the file
            means.append(-1.0 if candidate.mean is None else candidate.mean)
        assert found.chosen == means.index(max(means))
    # A step of 1e30 leaves weights that the server refuses: that candidate is out, and says why.
    assert told["FedAvg"].candidates[0].mean is None
    assert "holds NaN or infinite values" in told["FedAvg"].candidates[0].reason
    chosen = {entry.name: entry.method.lr for entry in plan.entries}
    assert chosen == {name: found.candidates[found.chosen].values["lr"] for name, found in told.items()}
    assert {(run.method, run.seed) for run in content.runs} == {("Local", 0), ("FedAvg", 0), ("Soft", 0)}
    assert not content.failures


@pytest.mark.usefixtures("in_process")
@pytest.mark.slow
def test_the_command_searches_first(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    tuning = {**TUNING, "tune": {"lr": [1e-6, 0.1]}}
    file = write_file(tmp_path, tuning=tuning)
    arguments = ["compare", str(file), "--sites", str(tmp_path / "sites"), "-o", str(tmp_path / "out"), "--jobs", "2"]
    first = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [found["method"] for found in content["tuning"]] == ["Local", "FedAvg"]
    assert {row["name"] for row in content["rows"]} == {
        "Local",
        "FedAvg",
        "FedAvg before the mean",
        "FedAvg + fine-tuning",
    }
    for name in ("report.html", "results.md"):
        text = " ".join((tmp_path / "out" / name).read_text().split())
        assert "Search of arguments" in text and "lr 1e-06" in text
        assert "Tuning budget: 2 candidates for every method, references included" in text
    again = CliRunner().invoke(app, arguments, catch_exceptions=False)
    output = " ".join(again.output.split())
    assert "4 of 4 searching runs are done already" in output and "2 of 2 runs are done already" in output


@pytest.mark.slow
def test_an_unfinished_search_chooses_nothing(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    plan, results = plan_of(tmp_path, table_sites, tuning=TUNING), tmp_path / "results"
    local, fedavg = plan.searches
    do((run for runs in local.runs for run in runs), table_sites, results)
    do(fedavg.runs[0], table_sites, results)
    begun = decide(plan, results)
    assert [run.name for run in begun.runs] == ["Local"] and begun.found[1].chosen is None
    do(fedavg.runs[1], table_sites, results)
    whole = decide(plan, results)
    assert [run.name for run in whole.runs] == ["Local", "FedAvg"] and whole.runs[0] == begun.runs[0]
    again = plan_of(tmp_path, table_sites, tuning=TUNING)  # the same file finds its searching runs again
    assert all(finished(results, run) for search in again.searches for runs in search.runs for run in runs)
    assert decide(again, results).runs == whole.runs
    shutil.rmtree(results / "runs" / fedavg.runs[1][0].digest)
    assert [run.name for run in decide(again, results).runs] == ["Local"]
