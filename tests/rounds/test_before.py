# SPDX-License-Identifier: Apache-2.0
"""``medpfl leaves JOB --site FILE``: what leaves this hospital, line by line, and what its policy keeps here."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from exchanging import Asked, slots
from medpfl.cli import app
from medpfl.core.errors import MedPFLError, SiteFileError
from medpfl.data.site_file import load_site_file
from medpfl.job import Job, load_job, write_evaluation_job, write_job
from medpfl.methods.dsfl import DSFL
from medpfl.rounds.before import prospect, write_page
from medpfl.rounds.leaves import leaves_of
from small_jobs import small_job, write_table_sites
from tools import run


def site(folder: Path, **policy: Any) -> Path:
    file = write_table_sites(folder, ["anna"])["anna"]
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "policy": policy}))
    return file


def refused(job: Job, file: Path, hospitals: int | None = 4) -> dict[str, set[str]]:
    """Task to the rules by which lines of it are refused."""
    found: dict[str, set[str]] = {}
    for line in prospect(job, load_site_file(file), hospitals).lines:
        found.setdefault(line.when, set()).add(line.refused.partition("('")[2].partition("')")[0])
    return found


def test_what_a_policy_allows_leaves_and_a_statistic_of_few_does_not(tmp_path: Path) -> None:
    job = small_job(mixers=slots(), method=Asked(lr=0.05, batch_size=8))
    assert set().union(*refused(job, site(tmp_path)).values()) == {""}
    found = refused(job, site(tmp_path, least_statistic=1000))
    assert found.pop("statistics") == {"least_statistic"} and set().union(*found.values()) == {""}


@pytest.mark.parametrize(
    "policy",
    [{"least_samples": 1000}, {"most_rounds": 1}, {"methods": []}, {"least_update": 100}, {"most_parameters": 3}],
)
def test_where_the_job_is_refused_nothing_leaves(tmp_path: Path, policy: dict[str, Any]) -> None:
    found = refused(small_job(), site(tmp_path, **policy))
    assert all(rules == set(policy) for rules in found.values())


def test_too_few_hospitals_where_their_number_is_known(tmp_path: Path) -> None:
    file = site(tmp_path, least_hospitals=3)
    assert refused(small_job(), file, 2)["train"] == {"least_hospitals"}
    assert refused(small_job(), file, None)["train"] == {""}
    assert "whether at least 3 hospitals take part" in prospect(small_job(), load_site_file(file)).afterwards


def test_patients_as_public_data_are_one_sentence(tmp_path: Path) -> None:
    method = DSFL(public="blood")
    job = small_job(mixers=method.components(), method=method)
    with pytest.raises(SiteFileError, match=r"does not say 'public: true'"):
        prospect(job, load_site_file(site(tmp_path)))


@pytest.mark.slow
def test_of_an_evaluation(table_sites: dict[str, Path], tmp_path: Path) -> None:
    run(small_job(), table_sites, tmp_path / "trained")
    model = tmp_path / "trained" / "home" / "anna" / "small" / "models" / "personal-best.safetensors"
    job = load_job(write_evaluation_job(model, tmp_path / "jobs"))
    for policy, rule in (({}, ""), ({"most_parameters": 3}, "most_parameters"), ({"tasks": []}, "tasks")):
        found = prospect(job, load_site_file(site(tmp_path / "own", **policy)))
        assert {line.refused.partition("('")[2].partition("')")[0] for line in found.lines} == {rule}


def test_the_command_says_it_as_text_as_json_and_as_a_page(tmp_path: Path) -> None:
    job, file = write_job(small_job(), tmp_path / "job"), site(tmp_path / "site", most_rounds=1)
    page = tmp_path / "page.html"

    def said(*options: str) -> str:
        done = CliRunner().invoke(app, ["leaves", str(job), *options], catch_exceptions=False)
        assert done.exit_code == 0
        return done.output

    listed = leaves_of(load_job(job))
    text = said("--site", str(file), "--page", str(page))
    sentence = "this hospital's policy ('most_rounds') allows at most 1 rounds; this job wants 3"
    assert f"{len(listed)} of {len(listed)} lines are refused here" in text
    assert f"for the first model of each method | {sentence} |" in text
    found = json.loads(said("--site", str(file), "--json"))
    assert found["hospital"] == "anna" and {line["refused"] for line in found["lines"]} == {sentence}
    assert [(line["when"], line["what"]) for line in found["lines"]] == [(one.when, one.what) for one in listed]
    html = page.read_text()
    assert html.count('<tr class="refused">') == len(listed) and "most_rounds: 1" in html and "“blood”" in html
    assert [line["what"] for line in json.loads(said("--json"))] == [one.what for one in listed]
    with pytest.raises(MedPFLError, match="--page: name the hospital's site file"):
        said("--page", str(page))


def test_names_on_the_page_are_text(tmp_path: Path) -> None:
    found = replace(prospect(small_job(), load_site_file(site(tmp_path))), job="<script>alert(1)</script>")
    write_page(found, tmp_path / "page.html")
    assert "<script>" not in (tmp_path / "page.html").read_text()
