# SPDX-License-Identifier: Apache-2.0
"""``medpfl leaves JOB --site FILE``: what leaves this hospital, line by line, and what its policy keeps here."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from nvflare.apis.shareable import Shareable
from typer.testing import CliRunner

from exchanging import Asked, slots
from hostile import attacked
from medpfl.cli import app
from medpfl.core.errors import MedPFLError, PolicyRefused, SiteFileError
from medpfl.data.site_file import load_site_file
from medpfl.flare.wire import read_reply
from medpfl.job import Job, load_job, write_evaluation_job, write_job
from medpfl.methods.dsfl import DSFL
from medpfl.rounds.hospital.before import prospect, write_page
from medpfl.rounds.leaves import leaves_of
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import FinishReply, TrainReply
from small_jobs import small_job, write_table_sites
from tools import pieces, run


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


@pytest.mark.parametrize("line", ["train loss", "train seconds", "finish chosen", "train notes"])
def test_what_a_reply_can_lack_stays_here_and_the_job_goes_on(tmp_path: Path, line: str) -> None:
    lines = prospect(small_job(), load_site_file(site(tmp_path, kept_here=[line]))).lines
    kept = {f"{one.when} {one.what}" for one in lines if one.refused}
    assert kept == {line}


@pytest.mark.parametrize("line", ["train metrics", "init sizes", "finish metrics", "train tensors of slot 'model'"])
def test_without_any_other_line_the_hospital_takes_no_part(tmp_path: Path, line: str) -> None:
    file = site(tmp_path, kept_here=[line])
    sentence = f"this hospital's policy ('kept_here') keeps '{line}' here"
    assert {one.refused for one in prospect(small_job(), load_site_file(file)).lines} == {sentence}
    both = {"anna": file, "berta": file}
    coordinator, runners = pieces(small_job(), both, tmp_path / "run")
    with pytest.raises(PolicyRefused, match=re.escape(sentence)):
        runners["anna"].handle(coordinator.init_messages()["anna"])


@pytest.mark.slow
def test_every_line_of_a_job_can_be_refused(tmp_path: Path) -> None:
    """The newest ones too: nobody has to know them."""
    job = small_job(mixers=slots(), method=Asked(lr=0.05, batch_size=8))
    for line in leaves_of(job, 4):
        name = f"{line.when} {line.what}"
        lines = prospect(job, load_site_file(site(tmp_path, kept_here=[name])), 4).lines
        assert all(one.refused for one in lines if f"{one.when} {one.what}" == name), name


def test_a_line_that_no_job_has_is_one_sentence(tmp_path: Path) -> None:
    file = site(tmp_path, kept_here=["train losses"])
    with pytest.raises(PolicyRefused, match=r"names the line 'train losses'.*; did you mean 'train loss'"):
        prospect(small_job(), load_site_file(file))


@pytest.mark.slow
def test_what_is_kept_here_is_in_no_message(tmp_path: Path) -> None:
    """Of anna; berta's messages are as ever, and the job ends with both."""
    sites = write_table_sites(tmp_path, ["anna", "berta"])
    content = yaml.safe_load(sites["anna"].read_text())
    kept = ["train loss", "train seconds", "finish chosen", "train notes"]
    sites["anna"].write_text(yaml.safe_dump({**content, "policy": {"kept_here": kept}}))
    told: dict[str, list[TrainReply | FinishReply]] = {"anna": [], "berta": []}

    def heard(hospital: str, asked: Message[Any], honest: Shareable) -> Shareable:
        reply = read_reply(honest, asked.slots).header
        if isinstance(reply, TrainReply | FinishReply):
            told[hospital].append(reply)
        return honest

    coordinator, _ = attacked(small_job(), sites, tmp_path / "run", heard)
    assert coordinator.done == small_job().settings.rounds
    for reply in told["anna"]:
        assert reply.chosen is None if isinstance(reply, FinishReply) else (reply.loss, reply.seconds) == ({}, 0.0)
    assert all(reply.chosen if isinstance(reply, FinishReply) else reply.loss for reply in told["berta"])


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
    loss = "the training loss of the round's last batch, for the first model of each method; None where the batch has "
    assert f"{loss}fewer cases or patients than 'least_scored' | 3 times |" in text
    assert f" | {sentence} |" in text
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
