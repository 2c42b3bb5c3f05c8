# SPDX-License-Identifier: Apache-2.0
"""Folders and classes with square brackets in their names: a terminal's markup is written so, and is not meant.

Spaces in them: a command that is to be typed next has them in quotes."""

import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.job import write_job
from small_jobs import small_job, write_table_sites


def medpfl(*arguments: object) -> str:
    result = CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_paths_are_printed_as_they_are(tmp_path: Path) -> None:
    own = tmp_path / "run[bold] 2[old]"
    write_table_sites(own / "sites")
    write_job(small_job(1), own / "job")
    said = medpfl("simulate", own / "job", "--sites", own / "sites", "--results", own / "results")
    assert f"Report: {own}/results/report.html\n" in said
    assert f"Report: {own}/results/report.html\n" in medpfl("report", own / "results")
    packed = Path(medpfl("pack", own / "job", "-o", own / "packed").removesuffix("\n"))
    assert packed.parent == own / "packed" and packed.is_dir()
    model = next((own / "results").rglob("anna/**/personal-best.safetensors"))
    written = medpfl("evaluation-job", model, "-o", own / "asked")
    assert Path(written.removesuffix("\n")).is_dir()


def test_a_class_of_which_a_part_would_be_taken_for_markup(tmp_path: Path) -> None:
    file = write_table_sites(tmp_path)["anna"]
    content = yaml.safe_load(file.read_text())
    content["datasets"]["blood"]["label"]["classes"] = {"crp [low]": [0], "crp [/high]": [1]}
    file.write_text(yaml.safe_dump(content))
    assert "crp [low]" in (said := medpfl("check-data", file)) and "crp [/high]" in said


def test_a_command_that_is_told_to_be_typed_next_has_paths_in_quotes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("blood.csv").write_text("age,ill\n" + "".join(f"{30 + i},{i % 2}\n" for i in range(40)))
    schema = tmp_path / "our schema.yaml"
    medpfl("site", "init", "blood.csv", "-o", "first.yaml", "--dataset", "blood", "--label", "ill", "--yes")
    medpfl("schema", "first.yaml", "-o", schema)
    said = medpfl(
        "site",
        "init",
        "blood.csv",
        "-o",
        "my sites/anna.yaml",
        "--site",
        "anna",
        "--like",
        schema,
        "--label",
        "ill",
        "--yes",
    )
    assert command(said) == ["medpfl", "check-data", "my sites/anna.yaml", "--schema", str(schema)]
    said = medpfl("job", "new", "ours", "--from", "softpull_heart", "-o", "my jobs")
    assert command(said) == ["medpfl", "check-job", "my jobs/ours", "--sites", "DIR"]
    said = medpfl("provision", "--example", "my project.yml")
    assert command(said) == ["medpfl", "provision", "--project", "my project.yml"]


def command(said: str) -> list[str]:
    return shlex.split(said[said.index("medpfl ") :].splitlines()[0])
