# SPDX-License-Identifier: Apache-2.0
"""Folders and classes with square brackets in their names: a terminal's markup is written so, and is not meant."""

from pathlib import Path

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
