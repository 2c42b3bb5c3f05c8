# SPDX-License-Identifier: Apache-2.0
"""The own page of a hospital whose score has a unit."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.job import Job
from medpfl.rounds.hospital.page import PAGE
from medpfl.tasks.regression import Regression
from small_jobs import SITES, write_table_sites
from tools import run


@pytest.mark.slow
def test_a_score_that_is_not_defined_is_not_said_to_be_of_too_few_patients(
    make_job: Callable[..., Job], tmp_path: Path
) -> None:
    """Of test patients with one number all, who have no R2, the page said that they are too few for an interval."""
    sites = write_table_sites(tmp_path / "sites", rows=60)
    for file in sites.values():
        content = yaml.safe_load(file.read_text())
        del content["datasets"]["blood"]["label"]
        content["datasets"]["blood"] |= {"value": "sick", "split": {"column": "part"}}
        file.write_text(yaml.safe_dump(content))
        head, *lines = file.with_suffix(".csv").read_text().splitlines()
        ill = [f"{line},test" for line in lines if line.endswith("1")][:8]
        rest = [line for line in lines if f"{line},test" not in ill]
        rest = [f"{line},{['train', 'validation'][n % 2]}" for n, line in enumerate(rest)]
        file.with_suffix(".csv").write_text("\n".join([f"{head},part", *ill, *rest]) + "\n")
    run(make_job(task=Regression(dataset="blood", score="r2"), rounds=1), sites, tmp_path)
    page = (tmp_path / "home" / SITES[0] / "small" / "models" / PAGE).read_text()
    assert "is not defined on its test cases" in page and "too few test patients" not in page


@pytest.mark.slow
def test_headings_and_an_evaluation_say_the_unit(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """Errors, and answers beside the truth, stood there as bare numbers."""
    sites = write_table_sites(tmp_path / "sites")
    for file in sites.values():
        content = yaml.safe_load(file.read_text())
        blood = content["datasets"]["blood"]
        del blood["label"], blood["features"]["c"]
        blood |= {"value": "c", "units": {"c": "mmol/l"}}
        file.write_text(yaml.safe_dump(content))
    run(make_job(task=Regression(dataset="blood", centre=0.0, spread=1.0, unit="mmol/l"), rounds=1), sites, tmp_path)
    page = (tmp_path / "home" / SITES[0] / "small" / "models" / PAGE).read_text()
    assert "<th>validation MAE (mmol/l)</th>" in page and "<th>answer, truth (mmol/l)</th>" in page
    model = tmp_path / "home" / SITES[0] / "small" / "models" / "personal-best.safetensors"
    said = CliRunner().invoke(app, ["evaluate", str(model), str(sites[SITES[0]])], catch_exceptions=False).output
    assert re.search(r"^mae \d+\.\d+ mmol/l, lower is better$", said, re.MULTILINE)
    assert re.search(r"^r2 -?\d+\.\d+$", said, re.MULTILINE)
