# SPDX-License-Identifier: Apache-2.0
"""The search of arguments: an equal budget, chosen on validation, with seeds of its own."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from typer.testing import CliRunner

from comparing import SOFT, compared, do, plan_of, write_file
from medpfl.cli import app
from medpfl.compare.comparison_tables import budget_text
from medpfl.compare.file import Comparison, load_comparison
from medpfl.compare.plan import decide, widen
from medpfl.compare.results import Results
from medpfl.compare.runner import finished
from medpfl.compare.tuning import candidates_of
from medpfl.core.errors import ConfigError
from medpfl.results.compact import read_compact
from medpfl.results.files import parse
from medpfl.tasks.metrics.measure import Measure

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
        ({"tuning": {**TUNING, "tune": {"lr": {"low": 1, "high": 0.1}}}}, "'low' must be below 'high'"),
        ({"tuning": {**TUNING, "tune": {"lr": {"low": 0, "high": 1, "log": True}}}}, "above 0 with 'log'"),
        ({"tuning": {**TUNING, "tune": {"lr": {"low": 0.1, "hihg": 1}}}}, "unknown key 'tuning.tune.lr.hihg'"),
        ({"tuning": {**TUNING, "tune": {"lr": 0.1}}}, "'tuning.tune.lr'"),
    ],
)
def test_a_broken_search_gets_one_sentence(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_comparison(write_file(tmp_path, **changes))
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.slow
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
    assert candidates_of(file, "FedAvg", None, Measure()) == [{"lr": 0.01}, {"lr": 0.1}]
    drawn = candidates_of(file, "Soft", None, Measure())
    assert len(drawn) == 2 and drawn == candidates_of(
        file, "Soft", None, Measure()
    )  # two of six, the same ones every time
    assert all(set(each) == {"lr", "model.lam"} for each in drawn)
    own = {"Soft": {**SOFT, "tune": {"lr": [0.5, 0.7]}}}  # a method's own values go before those for all
    assert candidates_of(
        load_comparison(write_file(tmp_path, tuning=TUNING, methods=own)), "Soft", None, Measure()
    ) == [
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


RANGES: Any = {"lr": {"low": 1e-4, "high": 1.0, "log": True}, "model.lam": {"low": 0.2, "high": 0.9}}


def searched(file: Comparison, measure: Measure, score: Callable[[float], float | None]) -> list[float]:
    """The learning rates that a search tries whose score follows from them alone."""
    found: list[Any] = []
    while True:
        new = candidates_of(file, "Soft", None, measure, [score(one["lr"]) for one in found])
        assert new[: len(found)] == found  # what was proposed stays
        if len(new) == len(found):
            return [one["lr"] for one in found]
        found = new


@pytest.mark.slow
def test_candidates_of_ranges_follow_from_the_scores(tmp_path: Path) -> None:
    tuning = {**TUNING, "budget": 30, "tune": RANGES}
    file = load_comparison(write_file(tmp_path, tuning=tuning, methods={"Soft": SOFT}))
    begun = candidates_of(file, "Soft", None, Measure())
    assert len(begun) == 10 and begun == candidates_of(file, "Soft", None, Measure())
    assert begun != candidates_of(file, "Local", None, Measure()) != candidates_of(file, "Local", 3, Measure())
    assert all(1e-4 <= one["lr"] <= 1 and 0.2 <= one["model.lam"] <= 0.9 for one in begun)  # type: ignore[operator]
    assert all(one["lr"] == float(f"{one['lr']:.4g}") for one in begun)  # short enough to be told

    def near(lr: float) -> float:
        return -abs(math.log10(lr) + 2)  # 0.01 is the best

    for measure, score in ((Measure(), near), (Measure(direction="lower"), lambda lr: -near(lr))):
        tried = searched(file, measure, score)
        assert len(tried) == 30 and tried == searched(file, measure, score)
        early, late = (np.mean([near(lr) for lr in part]) for part in (tried[:10], tried[20:]))
        assert late > early + 0.3
    assert len(searched(file, Measure(), lambda lr: None if lr > 0.1 else near(lr))) == 30  # some diverge


def test_ranges_hold_whole_numbers_and_stand_beside_lists(tmp_path: Path) -> None:
    axes = {"inner": {"low": 1, "high": 6}, "sizes": [[4], [8, 4]], "log": {"low": 1, "high": 1000, "log": True}}
    tuning = {**TUNING, "budget": 9, "tune": axes}
    found = candidates_of(load_comparison(write_file(tmp_path, tuning=tuning)), "Local", None, Measure(), [0.5] * 8)
    assert len(found) == 9
    assert all(one["inner"] in range(1, 7) and one["sizes"] in ([4], [8, 4]) for one in found)
    assert all(isinstance(one[name], int) for one in found for name in ("inner", "log"))


@pytest.mark.usefixtures("in_process")
@pytest.mark.slow
def test_the_command_goes_on_with_what_a_search_proposes(tmp_path: Path, table_sites: dict[str, Path]) -> None:
    """Candidate after candidate; a search that was stopped goes on to the same end."""
    tuning = {"budget": 4, "seeds": [100], "tune": {"lr": {"low": 1e-4, "high": 1.0, "log": True}}}
    file = write_file(tmp_path, tuning=tuning, rounds=1)
    sites = str(tmp_path / "sites")

    def command(out: str) -> list[Any]:
        arguments = ["compare", str(file), "--sites", sites, "-o", str(tmp_path / out), "--jobs", "1"]
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found: list[Any] = json.loads((tmp_path / out / "results.json").read_text())["tuning"]
        return found

    found = command("out")
    assert [len(search["candidates"]) for search in found] == [4, 4]
    assert "Parzen estimator proposed candidates" in (tmp_path / "out" / "results.md").read_text()
    last = plan_of(tmp_path, table_sites, tuning=tuning, rounds=1)
    while (wider := widen(last, tmp_path / "out")) is not None:
        last = wider
    lost = [search.runs[-1][0].digest for search in last.searches] + [last.searches[0].runs[0][0].digest]
    for digest in lost:
        shutil.rmtree(tmp_path / "out" / "runs" / digest)
    assert command("out") == found


def test_who_is_left_out_took_part_in_the_search(tmp_path: Path) -> None:
    """The page said that such a hospital took no part, and its validation cases chose arguments with the others'."""
    file = load_comparison(write_file(tmp_path, methods=METHODS, tuning=TUNING))
    stored = Path(__file__).resolve().parents[2] / "docs" / "results" / "compare-heart.json.xz"
    content = parse(TypeAdapter(Results), json.dumps(read_compact(stored)), stored)
    sentence = "its validation cases had a say in the arguments."
    for unseen in (False, True):
        told = budget_text(content.model_copy(update={"file": file.model_copy(update={"unseen": unseen})}))
        assert (sentence in told) == unseen
