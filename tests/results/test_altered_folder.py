# SPDX-License-Identifier: Apache-2.0
"""A results folder of which parts do not belong together: changed by somebody, or left by an earlier job."""

import json
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.core.mixers import Mean, SoftPull
from medpfl.results.differences import sdwd_of_slots
from medpfl.results.files import read_mixing, read_summary, read_training, write_slots
from medpfl.results.report import write_report
from medpfl.results.terminal_table import print_results
from small_jobs import small_job, write_table_sites
from tools import run

pytestmark = pytest.mark.slow
EYE = np.eye(2)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a small job left; nothing changes it."""
    folder = tmp_path_factory.mktemp("job")
    job = small_job(rounds=2, mixers={"fedavg": Mean(), "model": SoftPull(lam=0.7)})
    run(job, write_table_sites(folder / "sites", ["anna", "berta"]), folder)
    return folder / "results"


@pytest.fixture
def results(left: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(left, tmp_path / "results"))


def change(folder: Path, update: Callable[[dict[str, Any]], object], name: str = "summary.json") -> None:
    content = json.loads((folder / name).read_text())
    update(content)
    (folder / name).write_text(json.dumps(content))


def write_mixing(folder: Path, **matrices: NDArray[Any]) -> None:
    with open(folder / "mixing.npz", "wb") as file:
        np.savez(file, **matrices)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "matrix", "told"),
    [
        ("model", EYE, "'model' names no slot and round"),
        ("model/x", EYE, "'model/x' names no slot and round"),
        ("model/²", EYE, "'model/²' names no slot and round"),
        ("model/" + "9" * 5000, EYE, r"'model/9+\.\.\.' names no slot and round"),
        ("model/00001", np.eye(0), "'model/00001' has 0 rows for 2 hospitals"),
        ("model/00001", np.eye(3000), "'model/00001' has 3000 rows for 2 hospitals"),
    ],
)
def test_matrices_that_no_job_left(name: str, matrix: NDArray[Any], told: str, results: Path) -> None:
    """The last one was drawn number by number, for hours."""
    write_mixing(results, **{name: matrix})
    with pytest.raises(MedPFLError, match=rf"mixing\.npz was altered: {told}$"):
        write_report(results)


@pytest.mark.parametrize("rounds", [20, 200])
def test_matrices_are_read_in_one_go(rounds: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file's list of contents was read anew for each of them: of a job of twice the rounds that took four times as
    long, of 4000 rounds many minutes."""
    write_mixing(tmp_path, **{f"model/{number:05d}": EYE for number in range(rounds)})
    opened, read = [], zipfile.ZipFile._RealGetContents  # type: ignore[attr-defined]
    monkeypatch.setattr(zipfile.ZipFile, "_RealGetContents", lambda file: (opened.append(file), read(file))[1])
    assert len(read_mixing(tmp_path, 2)) == rounds and len(opened) <= 4


PANEL = {"kind": "graph", "slot": "model", "edges": [["anna", "zoe"]]}


@pytest.mark.parametrize(
    ("update", "told"),
    [
        (lambda one: one.update(roster=[]), "'roster' expected hospitals, each once"),
        (lambda one: one.update(roster=["anna", "anna"]), "'roster' expected hospitals, each once"),
        (lambda one: one.update(panels=[PANEL]), "expected edges between hospitals of the roster alone"),
        (lambda one: one.update(networks={"model": [["anna", "zoe"]]}), "expected edges between hospitals"),
        (lambda one: one["test"][0]["metrics"].update(accuracy=1e308), r"'test\.0\.metrics\.accuracy' expected less"),
    ],
)
def test_a_summary_that_does_not_fit_itself(update: Callable[[Any], object], told: str, results: Path) -> None:
    change(results, update)
    with pytest.raises(MedPFLError, match=rf"summary\.json was altered or is of another version: {told}"):
        write_report(results)


def test_an_evaluation_of_a_hospital_of_no_size(results: Path) -> None:
    from medpfl.results.schema import EvaluationSummary

    given = {"model": "m", "method": {}, "task": {}, "parameters": 1, "sha256": ""}
    test = {"site": "zoe", "model": "m", "round": 0, "metrics": {"accuracy": 0.5}, "choice": "given"}
    kept = ("version", "job", "medpfl", "written", "roster", "classes", "versions", "components")
    content = {key: value for key, value in json.loads((results / "summary.json").read_text()).items() if key in kept}
    content |= {"best": {}, "slots": {}, "events": [], "settings": {}, "evaluated": given, "test": [test]}
    (results / "summary.json").write_text(json.dumps({**content, "sizes": {"zoe": {"test": 3}}}))
    assert isinstance(read_summary(results), EvaluationSummary)
    (results / "summary.json").write_text(json.dumps({**content, "sizes": {}}))
    with pytest.raises(MedPFLError, match="expected sizes of each hospital that was tested"):
        print_results(results, None)  # type: ignore[arg-type]


def test_values_beyond_all_figures(results: Path) -> None:
    """A hospital can tell none beyond 1e100."""
    lines = [json.loads(line) for line in (results / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["split"] == "validation":
            line["metrics"] = dict.fromkeys(line["metrics"], 1e308)
    (results / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with pytest.raises(MedPFLError, match=r"metrics\.jsonl was altered or is of another version: line \d+, "):
        write_report(results)


def test_more_bytes_than_there_are(results: Path) -> None:
    (results / "bytes.json").write_text((results / "bytes.json").read_text().replace('"raw": ', f'"raw": {10**400}'))
    with pytest.raises(MedPFLError, match=r"bytes\.json was altered or is of another version: '0\.raw' expected less"):
        write_report(results)


def write_slot(folder: Path, tensors: dict[str, Tensor], slot: str = "model") -> str:
    path = folder / "slots" / f"{slot}.safetensors"
    store.save(path, tensors, {"slot": slot, "job": "small"})
    return store.file_digest(path)


ONE, TWO = torch.zeros(1), torch.zeros(2)


@pytest.mark.parametrize(
    "tensors",
    [{"anna::a": ONE, "berta::b": ONE}, {"anna::a": ONE, "berta::a": TWO}, {"anna::a": ONE, "berta::a": ONE.int()}],
)
def test_models_of_other_entries(tensors: dict[str, Tensor], results: Path) -> None:
    digest = write_slot(results, tensors)
    change(results, lambda one: one["slots"].update(model=digest))
    with pytest.raises(
        MedPFLError, match=r"model\.safetensors was altered: the hospitals' models in it have different"
    ):
        write_report(results)


def test_models_of_counters_alone_have_no_box(results: Path) -> None:
    counters = {"anna::a": ONE.long(), "berta::a": ONE.long()}
    assert sdwd_of_slots(results, {"model": write_slot(results, counters)}) == {}


def test_an_earlier_jobs_models_are_not_this_ones(left: Path, results: Path) -> None:
    """Of a job with other slots, run into the same folder, the report showed how that one's models differ."""
    slots = read_training(results).slots
    before = sdwd_of_slots(left, slots)
    write_slot(results, {"anna::a": torch.zeros(3), "berta::a": torch.ones(3)}, "earlier")
    assert before and sdwd_of_slots(results, slots) == before
    write_slots(results, "small", {"model": {"anna": {"a": ONE}, "berta": {"a": ONE}}})
    assert [file.stem for file in (results / "slots").iterdir()] == ["model"]
    with pytest.raises(MedPFLError, match=r"model\.safetensors is not the one that the job left: its SHA-256"):
        write_report(results)


@pytest.mark.parametrize(("name", "where"), [("metrics.jsonl", r"line \d+, "), ("bytes.json", "")])
def test_a_file_that_is_cut_off_is_said_to_be_no_json(results: Path, name: str, where: str) -> None:
    """As after half a download: "expected Invalid JSON: EOF while parsing an object at line 1 column 220"."""
    text = (results / name).read_text()
    (results / name).write_text(text[: len(text) * 2 // 3])
    with pytest.raises(MedPFLError, match=rf"{name} was altered or is of another version: {where}expected JSON, got "):
        write_report(results)
