# SPDX-License-Identifier: Apache-2.0
"""A results folder's files: written and read through one schema, and refused in one sentence where they do not fit."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from medpfl.core.errors import MedPFLError
from medpfl.results.files import (
    FAILURE,
    json_of,
    read_lines,
    read_mixing,
    read_summary,
    read_traffic,
    read_training,
    write_json,
)
from medpfl.results.schema import (
    FailureReport,
    FinalLine,
    RoundLine,
    TrainingLine,
    TrainingSummary,
    ValidationLine,
    number,
)
from tools import Make, run


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from small_jobs import small_job, write_table_sites

    folder = tmp_path_factory.mktemp("job")
    run(small_job(rounds=2), write_table_sites(folder / "sites", ["anna", "berta"]), folder)
    return folder / "results"


@pytest.fixture
def altered(results: Path, tmp_path: Path) -> Callable[..., Path]:
    """A copy of the folder with some keys of one file changed, or a whole text."""

    def change(name: str, text: str | None = None, **keys: Any) -> Path:
        for file in ("summary.json", "metrics.jsonl", "bytes.json", "mixing.npz"):
            (tmp_path / file).write_bytes((results / file).read_bytes())
        if text is None:
            text = json.dumps({**json.loads((tmp_path / name).read_text()), **keys})
        (tmp_path / name).write_text(text)
        return tmp_path

    return change


def test_a_job_that_failed_says_why_it_has_no_results(tmp_path: Path) -> None:
    reason = "only 1 of 2 hospitals are ready (anna); the job needs 2; berta failed: this hospital has no site file"
    write_json(tmp_path / FAILURE, FailureReport(job="small", reason=reason, events=[]))
    with pytest.raises(MedPFLError) as raised:
        read_summary(tmp_path)
    assert str(raised.value) == f"{tmp_path}: job 'small' failed and has no results: {reason}"
    (tmp_path / FAILURE).write_text("{")
    with pytest.raises(MedPFLError, match=r"failure\.json was altered or is of another version"):
        read_summary(tmp_path)


def test_a_job_that_was_aborted_has_no_results_yet(tmp_path: Path) -> None:
    """It was no results folder, as if the lead had downloaded something else; nor was one whose job never began."""
    (tmp_path / "log.txt").write_text("why")
    with pytest.raises(MedPFLError, match=r"is not a results folder: .*log\.txt tells how the job ended$"):
        read_summary(tmp_path / "results")
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "metrics.jsonl").write_text("")
    with pytest.raises(MedPFLError, match="results: the job has not come to its end: it is still running, or was"):
        read_summary(tmp_path / "results")


@pytest.mark.slow
def test_what_is_written_is_what_is_read(results: Path) -> None:
    summary = read_training(results)
    assert json_of(summary) == json.loads((results / "summary.json").read_text())
    assert summary.version == 1 and summary.roster == ["anna", "berta"] and summary.settings.rounds == 2
    assert summary.best["personal"].round in (1, 2)
    lines = read_lines(results)
    written = (results / "metrics.jsonl").read_text().splitlines()
    assert [json_of(line) for line in lines] == [json.loads(line) for line in written]
    assert {type(line) for line in lines} == {ValidationLine, FinalLine, TrainingLine, RoundLine}
    assert summary.test == [line for line in lines if isinstance(line, FinalLine)]
    assert [json_of(line) for line in read_traffic(results)] == json.loads((results / "bytes.json").read_text())
    assert sorted(read_mixing(results)) == sorted(f"{slot}/0000{n}" for slot in summary.slots for n in (1, 2))


def test_a_summary_without_a_version_is_of_the_first(altered: Callable[..., Path], results: Path) -> None:
    content = json.loads((results / "summary.json").read_text())
    del content["version"]
    assert read_summary(altered("summary.json", json.dumps(content))) == read_summary(results)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"version": 2}, "'version' expected 1, got 2"),
        ({"roster": "anna"}, "'roster' expected a valid array, got \"anna\""),
        ({"surprise": 1}, "'surprise' is unknown"),
        (
            {"sizes": {"anna": {"train": 24, "test": 8}, "berta": {"test": 8}}},
            "'sizes' expected a number for 'berta.train', got {",
        ),
        ({"best": {"personal": {"score": 0.5}}}, "'best.personal.round' is missing"),
        ({"best": {"personal": {"round": "1", "score": 0.5}}}, "'best.personal.round' expected a valid integer"),
    ],
)
def test_an_altered_summary_gets_one_sentence(altered: Callable[..., Path], keys: Any, sentence: str) -> None:
    folder = altered("summary.json", **keys)
    with pytest.raises(MedPFLError) as error:
        read_summary(folder)
    assert str(error.value).startswith(f"{folder / 'summary.json'} was altered or is of another version: ")
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_an_altered_line_is_named(altered: Callable[..., Path]) -> None:
    folder = altered("metrics.jsonl", '{"site": "server", "split": "round", "round": 1, "seconds": 1.0}\n{"site": 3}\n')
    with pytest.raises(MedPFLError, match=r"metrics\.jsonl was altered .*: line 2"):
        read_lines(folder)
    folder = altered("metrics.jsonl", '{"site": "server", "split": "round", "round": 1, "seconds": NaN}\n')
    with pytest.raises(MedPFLError, match=r"line 1, 'round.seconds' expected a finite number"):
        read_lines(folder)
    folder = altered("bytes.json", '[{"round": 1}]')
    with pytest.raises(MedPFLError, match=r"bytes\.json was altered .*'0\.site' is missing"):
        read_traffic(folder)


def test_what_is_not_there_gets_one_sentence(tmp_path: Path) -> None:
    for read, name in ((read_summary, "summary.json"), (read_lines, "metrics.jsonl"), (read_mixing, "mixing.npz")):
        with pytest.raises(MedPFLError, match=name):
            read(tmp_path)


def test_a_number_is_finite_or_none() -> None:
    assert number(1) == 1.0 and number(float("nan")) is None and number(float("inf")) is None
    assert number("0.5") is None and number(None) is None


@pytest.mark.slow
def test_an_evaluation_is_no_training(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    from medpfl.job import EvaluationJob, load_job, write_evaluation_job
    from medpfl.rounds.simulate import simulate_evaluation

    run(make_job(rounds=1), table_sites, tmp_path)
    model = tmp_path / "home" / "berta" / "small" / "models" / "personal-best.safetensors"
    job = load_job(write_evaluation_job(model, tmp_path / "jobs"))
    assert isinstance(job, EvaluationJob)
    simulate_evaluation(job, table_sites, tmp_path / "evaluated", tmp_path / "evaluating")
    assert not isinstance(read_summary(tmp_path / "evaluated"), TrainingSummary)
    assert "study" not in json.loads((tmp_path / "evaluated" / "summary.json").read_text())
    with pytest.raises(MedPFLError, match="only evaluated a given model; nothing was trained"):
        read_training(tmp_path / "evaluated")
