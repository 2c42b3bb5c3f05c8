# SPDX-License-Identifier: Apache-2.0
"""The command ``medpfl``, verb by verb."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import medpfl as medpfl_package
from commands import refusal
from medpfl.bundle import find_bundle, manifest
from medpfl.cli import app
from medpfl.flare.allow import component_classes
from medpfl.job import write_job
from small_jobs import small_job, write_table_sites

ROOT = Path(__file__).resolve().parents[2]


def medpfl(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
def test_jobs_and_check_job() -> None:
    assert "softpull_heart" in medpfl("jobs")
    assert "softpull_phantom is valid" in medpfl("check-job", "softpull_phantom")


@pytest.mark.slow
def test_the_version() -> None:
    assert medpfl("--version") == medpfl_package.__version__


def test_the_list_of_jobs_fits_a_narrow_window() -> None:
    """Nothing is cut off, and no word is broken."""
    command = [sys.executable, "-m", "medpfl", "jobs"]
    said = subprocess.run(command, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, check=True)
    lines = said.stdout.splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in said.stdout
    told = " ".join(" ".join(line.split("│")[2].split()) for line in lines if line.startswith("│"))
    for name, entry in manifest(find_bundle()).jobs.items():
        assert any(name in line for line in lines)
        assert all(word in told for word in f"{entry.task} {entry.data} {entry.paper}".split())


@pytest.mark.parametrize("verb", [("compare", "x.yaml", "--flare"), ("poc", "run", "x"), ("poc", "hospitals", "x")])
@pytest.mark.parametrize("limit", ["0", "-5", "nan"])
def test_a_limit_in_which_nothing_can_run_is_refused(verb: tuple[str, ...], limit: str) -> None:
    result = CliRunner().invoke(app, [*verb, "--timeout", limit])
    assert result.exit_code == 2 and "'--timeout'" in result.output and "to 1" in " ".join(result.output.split())


@pytest.mark.slow
def test_demo_and_pack(tmp_path: Path) -> None:
    assert "hospital-a, hospital-b" in medpfl("demo", "phantom", str(tmp_path / "demo"))
    assert yaml.safe_load((tmp_path / "demo" / "hospital-d.yaml").read_text())["site"] == "hospital-d"
    medpfl("pack", "softpull_heart", "-o", str(tmp_path))
    stamp = json.loads((tmp_path / "softpull_heart" / "app" / "custom" / "medpfl_pack.json").read_text())
    assert stamp["manifest"]["method"] == "SoftPull"


@pytest.mark.slow
def test_site_allow_keeps_no_class_that_was_not_asked_for(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    before = {"format_version": 2, "class_allow_list": ["nvflare.a.B"], "components": [{"id": "x"}]}
    (tmp_path / "local" / "resources.json.default").write_text(json.dumps(before))
    for _ in range(2):  # safe to repeat
        medpfl("site", "allow", str(tmp_path), "--class", "benchmarks.empty.Empty")
    after = json.loads((tmp_path / "local" / "resources.json").read_text())
    assert after["class_list_enforcement_mode"] == "enforce"
    lost_jobs = {"id": "medpfl_lost_jobs", "path": "medpfl.flare.supervision.LostJobs", "args": {}}
    assert after["components"] == [{"id": "x"}, lost_jobs]  # a server's kit; FLARE's own component stays
    assert set(after["class_allow_list"]) == {"benchmarks.empty.Empty", *component_classes()}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check-job", "nothing"], "there is no job 'nothing'"),
        (["site", "allow", "nowhere"], "is not a server's or hospital's startup kit"),
        (["report", "nowhere"], "nowhere is not a results folder"),
        (["simulate", "softpull_phantom", "--sites", "nowhere"], "--sites: nowhere is not a folder"),
        (["demo", "heart", "x", "--split", "half"], "--split must be flamby or validated, got 'half'"),
    ],
)
def test_one_sentence(capfd: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    assert words in refusal(capfd, *arguments)


@pytest.mark.parametrize(
    "verb",
    [
        ["fingerprint", "{site}", "-o"],
        ["report", "{results}", "--tensorboard"],
    ],
    ids=lambda verb: verb[0],
)
def test_what_cannot_be_written_is_one_sentence(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, verb: list[str]
) -> None:
    """A file lies where the folder would be."""
    (tmp_path / "file").write_text("")
    here = {"site": str(tmp_path / "sites" / "hospital-a.yaml"), "results": str(tmp_path / "results")}
    if verb[0] == "fingerprint":
        medpfl("demo", "phantom", str(tmp_path / "sites"))
    else:
        write_table_sites(tmp_path / "sites", ["hospital-a", "hospital-b"])
    if verb[0] == "report":
        written = write_job(small_job(1), tmp_path / "job")
        medpfl("simulate", str(written), "--sites", str(tmp_path / "sites"), "--results", here["results"])
    arguments = [*(part.format(**here) for part in verb), str(tmp_path / "file" / "x")]
    assert "cannot write " in refusal(capfd, *arguments)


def test_provisioned_hospitals_with_a_broken_site_file(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Said before anything is started."""
    files = write_table_sites(tmp_path / "sites", ["hospital-a", "hospital-b"])
    files["hospital-b"].write_text("datasets: none")
    job = write_job(small_job(1), tmp_path / "job")
    said = refusal(
        capfd, "poc", "hospitals", str(job), "--sites", str(tmp_path / "sites"), "--results", str(tmp_path / "results")
    )
    assert "hospital-b.yaml" in said and "datasets" in said


def test_a_port_that_no_machine_has() -> None:
    for verb in ("run", "hospitals"):
        assert "65535" in CliRunner().invoke(app, ["poc", verb, "--port", "99999"]).output


@pytest.mark.slow
def test_one_sentence_and_no_traceback_from_the_installed_command() -> None:
    command = [str(Path(sys.executable).with_name("medpfl")), "report", "nowhere"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith("medpfl: nowhere is not a results folder"), done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["subprocess.run", "nothing.Here", "os."])
def test_site_allow_refuses_what_is_no_class(capfd: pytest.CaptureFixture[str], tmp_path: Path, name: str) -> None:
    (tmp_path / "local").mkdir()
    (tmp_path / "local" / "resources.json.default").write_text("{}")
    assert f"'{name}' cannot be allowed" in refusal(capfd, "site", "allow", tmp_path, "--class", name)
    assert not (tmp_path / "local" / "resources.json").exists()
