# SPDX-License-Identifier: Apache-2.0
"""The commands for a model after its job: export, evaluation-job, and what checks and runs such a job."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from commands import refusal
from hospitals import change_yaml
from medpfl import load_model
from medpfl.cli import app
from medpfl.job import Job
from tools import run


@pytest.fixture
def model(make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path) -> Path:
    run(make_job(rounds=1), table_sites, tmp_path / "run")
    return tmp_path / "run" / "home" / "anna" / "small" / "models" / "personal-best.safetensors"


def medpfl(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_an_evaluation_replaces_no_file(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "blood.csv").write_text("age,sick\n50,1\n")
    given = ["evaluate", "m.safetensors", "a.yaml", "--cases", str(tmp_path / "blood.csv")]
    assert "blood.csv exists already; remove it or name another file" in refusal(capfd, *given)
    assert (tmp_path / "blood.csv").read_text() == "age,sick\n50,1\n"


@pytest.mark.slow
def test_an_evaluation_says_where_the_hospitals_split_is_another_one(
    model: Path, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """One row more, and rows that the model was trained on are in the test split."""
    assert "other numbers" not in medpfl("evaluate", model, table_sites["anna"])
    data = table_sites["anna"].with_suffix(".csv")
    data.write_text(data.read_text() + "".join(data.read_text().splitlines(keepends=True)[-4:]))
    told = medpfl("evaluate", model, table_sites["anna"])
    assert "(24 train, 8 validation, 8 test; now 26, 9, 9)" in told and "that it was trained on" in told
    with pytest.warns(UserWarning, match="now 26, 9, 9"):
        load_model(model).evaluate(table_sites["anna"])
    assert "other numbers" not in medpfl("evaluate", model, table_sites["berta"])  # which has fewer cases
    change_yaml(table_sites["anna"], lambda content: content["datasets"]["blood"].update(split={"column": "part"}))
    parts = ["part", *["train", "validation", "test", "test"] * 11]
    data.write_text(
        "\n".join(f"{line},{part}" for line, part in zip(data.read_text().splitlines(), parts, strict=True))
    )
    assert "other numbers" not in medpfl("evaluate", model, table_sites["anna"])


@pytest.mark.slow
def test_from_a_model_to_its_evaluation(model: Path, table_sites: dict[str, Path], tmp_path: Path) -> None:
    printed = medpfl("evaluate", model, table_sites["berta"])
    origin = r"personal, best round \(1\) of job small at anna: \d+ cases of the test split accuracy 0\.\d{4} "
    assert re.match(origin, printed)
    assert "out" in medpfl("export", model, "-o", tmp_path / "out", "--format", "torchscript")
    assert (tmp_path / "out" / "model.ts").is_file()
    assert "jobs/third-party" in medpfl("evaluation-job", model, "-o", tmp_path / "jobs", "--name", "third-party")
    job = tmp_path / "jobs" / "third-party"
    assert "third-party is valid: evaluates a given model, SoftPull(" in medpfl("check-job", job)
    printed = medpfl("simulate", job, "--sites", table_sites["anna"].parent, "--results", tmp_path / "results")
    assert "the given model 'personal'" in printed and "Accuracy" in printed and "dora" in printed
    assert "Accuracy" in medpfl("report", tmp_path / "results")
    medpfl("pack", job, "-o", tmp_path / "packed")
    assert (tmp_path / "packed" / "third-party" / "app" / "config" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "nowhere", "-o", "x", "--format", "onnx"], "cannot read nowhere"),
        (["export", "nowhere", "-o", "x", "--format", "pickle"], "--format must be torchscript, onnx, monai"),
        (["evaluation-job", "nowhere", "-o", "x"], "cannot read nowhere"),
    ],
)
def test_one_sentence(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert words in refusal(capfd, *arguments)
    assert not list(tmp_path.iterdir())
