# SPDX-License-Identifier: Apache-2.0
"""One real POC federation, mTLS-free but with every process and the class allow list, shared by these tests."""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from nvflare.apis.fl_exception import FLCommunicationError
from nvflare.fuel.flare_api.api_spec import JobNotFound, JobNotRunning
from nvflare.fuel.flare_api.flare_api import Session
from nvflare.lighter.utils import load_yaml

from medpfl.compare.file import load_comparison
from medpfl.compare.plan import make_plan
from medpfl.compare.run_results import TrainedRun
from medpfl.compare.runner import do_runs, read_run
from medpfl.compare.runs import Run
from medpfl.core.errors import MedPFLError
from medpfl.data.site_file import load_site_file
from medpfl.deployed.evaluate import evaluate
from medpfl.deployed.model_file import load_deployed
from medpfl.flare import federation as flare_federation
from medpfl.flare.compared import do_runs_on, do_runs_over_flare, foreign_classes, over_flare
from medpfl.flare.poc import Federation
from medpfl.job import Job, load_job, write_evaluation_job
from medpfl.models.lenet import LeNet5
from medpfl.results.files import json_of
from medpfl.tasks.classification import Classification
from no_workers import without_workers
from pictures import TABLE, write_images
from small_jobs import small_job, write_table_sites
from tools import assert_same, deploy_to, interrupt, outcome, run, write_job

COMPARISON: dict[str, Any] = {
    "name": "small",
    "task": {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "blood", "hidden": [4]}},
    "rounds": 2,
    "seeds": [1],
    "steps": 5,
    "lr": 0.05,
    "finetune": 2,
    "methods": {"Bounded": {"path": "bounded_fedavg.BoundedFedAvg", "args": {"bound": 0.5}}},
}
pytestmark = [pytest.mark.poc, pytest.mark.timeout(400)]
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def hospitals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two with a table, and at each the same few pictures, split in its own way. (A third is a process more in every
    job and shows nothing else; volumes, whose processes take twice as long to start, train in test_provisioned.)"""
    folder = tmp_path_factory.mktemp("sites")
    files = write_table_sites(folder, ["hospital-a", "hospital-b"])
    write_images(folder / "pictures", count=24)
    for seed, file in enumerate(files.values()):
        content = yaml.safe_load(file.read_text())
        pictures = {**TABLE, "files": "pictures/images/*.png", "split": {**TABLE["split"], "seed": seed}}
        pictures |= {"table": {**TABLE["table"], "file": "pictures/list.csv"}}
        pictures |= {"masks": {**TABLE["masks"], "files": "pictures/masks/*.png"}}
        content["datasets"]["skin"] = pictures
        file.write_text(yaml.safe_dump(content, sort_keys=False))
    return files


@pytest.fixture(scope="module")
def federation(hospitals: dict[str, Path]) -> Iterator[Federation]:
    other_package = ["bounded_fedavg.BoundedFedAvg"]  # as with: medpfl site allow KIT --class ...
    up = Federation(next(iter(hospitals.values())).parent, list(hospitals), classes=other_package)
    with up:
        yield up
    assert not up.workspace.exists()
    assert not up._members()


def wait(federation: Federation, job_id: str, patience: float = 200) -> str:
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        status = federation.status(job_id)
        if status.startswith("FINISHED"):
            return status
        time.sleep(0.5)
    raise AssertionError(f"job {job_id} did not finish")


def written(folder: Path, name: str, rounds: int = 2) -> Path:
    """The folder of a small job."""
    return write_job(replace(small_job(rounds), name=name), folder / name)


@pytest.fixture(scope="module")
def submitted(federation: Federation) -> tuple[Path, str]:
    """A small job, submitted by the admin console: its folder and its id."""
    folder = written(federation.kits / "admin@medpfl.local" / "transfer" / "jobs", "from-the-console", rounds=30)
    done = subprocess.run(
        ["bash", "-c", federation.console_command()],
        input="submit_job jobs/from-the-console\nlist_jobs\nbye\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "HOME": str(federation.workspace / "home")},
    )
    assert "Submitted job" in done.stdout, done.stdout + done.stderr
    newest = max(federation.session.list_jobs(), key=lambda entry: entry["submit_time"])
    assert newest["job_name"] == "from-the-console"
    return folder, newest["job_id"]


def test_a_job_from_the_console_tells_its_progress_and_a_kill_changes_nothing(
    federation: Federation, hospitals: dict[str, Path], submitted: tuple[Path, str], tmp_path: Path
) -> None:
    """A process that is killed, in training or in the middle of its answer, is started again, where FLARE alone ends
    the whole job. (What is left alone equals simulate, too: the comparison below, and test_provisioned.)"""
    folder, job_id = submitted
    best = f"best_{small_job().task.score}_personal"
    progress = federation.run_folder("server", job_id) / "results" / "metrics.jsonl"
    deadline = time.monotonic() + 200
    while not (progress.exists() and '"split": "round", "round": 1' in progress.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    (killed,) = federation.job_processes(job_id)["hospital-b"]
    psutil.Process(killed).kill()
    seen: dict[str, Any] = {}
    while not (status := federation.status(job_id)).startswith("FINISHED"):
        assert time.monotonic() < deadline
        if status == "RUNNING" and best not in str(seen):
            with contextlib.suppress(JobNotFound, JobNotRunning):  # not yet started at the server, or over by now
                seen = federation.session.show_stats(job_id, "server")
        time.sleep(0.2)
    assert status == "FINISHED:COMPLETED", federation.decisive_lines(job_id)
    assert best in str(seen)
    downloaded = federation.download(job_id)
    names = {path.name for path in downloaded.iterdir()}
    assert names == {"metrics.jsonl", "mixing.npz", "bytes.json", "summary.json", "slots", "report.html"}
    events = json.loads((downloaded / "summary.json").read_text())["events"]
    assert {event["site"] for event in events} == {"hospital-b"}
    assert events[-1]["event"].startswith("resumed from the state after round ")
    assert all("it is asked once more" in event["event"] for event in events[:-1])
    assert_same(outcome(downloaded), run(load_job(folder), hospitals, tmp_path / "simulated"))
    for site in hospitals:
        log = (federation.run_folder(site, job_id) / "log.txt").read_text()
        assert "slot 'model':" in log and "never sent" in log  # what leaves and what stays, told at the start
        kept = federation.kits / site / "medpfl" / "from-the-console" / "models"
        assert (kept / "personal-best.safetensors").is_file()
        assert f"of {site}" in (kept / "personal-best.md").read_text()


def test_a_hospital_that_left_is_told_of_and_the_results_are_whole(federation: Federation, tmp_path: Path) -> None:
    """Its daemon dies and is back before the job's end: FLARE lets it into no job that runs, and says ABNORMAL.
    The task names its network by class: FLARE builds it inside the task, from the allow list."""
    job = load_job(written(tmp_path, "left"))
    assert isinstance(job, Job)
    task = Classification("skin", size=(24, 24), architecture=LeNet5())
    job = replace(job, task=task, min_clients=1, settings=replace(job.settings, rounds=12, grace=1.0, patience=1))
    job_id = federation.submit(write_job(job, tmp_path / "left-longer" / "left"))
    progress = federation.run_folder("server", job_id) / "results" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (progress.exists() and '"split": "round", "round": 2' in progress.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    kit = str(federation.kits / "hospital-b")
    for process in federation._members():
        with contextlib.suppress(psutil.Error):
            if kit in " ".join(process.cmdline()):
                process.kill()
    federation._launch("hospital-b")
    warning = federation.follow(job_id, "left", 200)
    assert warning == (
        "left is complete. FLARE calls it FINISHED:ABNORMAL because a hospital left: its events say who, and when"
    )
    summary = json.loads((federation.download(job_id) / "summary.json").read_text())
    assert {line["site"] for line in summary["test"]} == {"hospital-a"}
    (last,) = [event["event"] for event in summary["events"] if event["event"].startswith("trained in")]
    assert last.endswith(" of 12") and last != "trained in none of 12"


def test_a_hospital_that_cannot_build_a_job_ends_its_own_part_alone(federation: Federation, tmp_path: Path) -> None:
    """It has not run ``medpfl site allow`` since an upgrade. FLARE alone ends the job at all hospitals, and so whoever
    says such a thing in the middle of a job could. A job that needs this hospital ends with a sentence."""
    resources = federation.kits / "hospital-b" / "local" / "resources.json"
    now = resources.read_text()
    assert "medpfl.tasks.tabular.Tabular" in now
    resources.write_text(now.replace("medpfl.tasks.tabular.Tabular", "medpfl.tasks.tabular.Former"))
    try:
        ids = {}
        for name, needed in (("without-one", 1), ("needs-both", 2)):
            job = load_job(written(tmp_path, name))
            assert isinstance(job, Job)
            ids[name] = federation.submit(write_job(replace(job, min_clients=needed), tmp_path / "made" / name))
        status = {name: wait(federation, job_id) for name, job_id in ids.items()}
    finally:
        resources.write_text(now)
    assert status == {"without-one": "FINISHED:COMPLETED", "needs-both": "FINISHED:EXECUTION_EXCEPTION"}
    said = "its process of the job has ended; the reason is in that hospital's own log"
    whole = json.loads((federation.download(ids["without-one"]) / "summary.json").read_text())
    short = json.loads((federation.download(ids["needs-both"]) / "failure.json").read_text())
    assert {line["site"] for line in whole["test"]} == {"hospital-a"}
    assert {"round": 0, "site": "hospital-b", "event": f"failed: {said}"} in whole["events"]
    assert "only 1 of 2 hospitals are ready" in short["reason"]
    assert {"round": 0, "site": "hospital-b", "event": f"failed: {said}"} in short["events"]


def test_a_given_model_is_evaluated_at_every_hospital(
    federation: Federation, hospitals: dict[str, Path], submitted: tuple[Path, str], tmp_path: Path
) -> None:
    assert wait(federation, submitted[1]) == "FINISHED:COMPLETED", federation.decisive_lines(submitted[1])
    file = federation.kits / "hospital-b" / "medpfl" / "from-the-console" / "models" / "personal-best.safetensors"
    job_id = federation.submit(write_evaluation_job(file, tmp_path))
    assert wait(federation, job_id) == "FINISHED:COMPLETED", federation.decisive_lines(job_id)
    summary = json.loads((federation.download(job_id) / "summary.json").read_text())
    model = load_deployed(file)
    told = {line["site"]: line["metrics"] for line in summary["test"]}
    assert set(told) == set(hospitals)
    for site, path in hospitals.items():
        samples = model.task.load(load_site_file(path, site)).splits["test"]
        found = evaluate(model.method, model.name, model.networks, model.task, samples, torch.device("cpu"))
        assert found and found.metrics == pytest.approx(told[site], abs=1e-9)
        kept = federation.kits / site / "medpfl" / "evaluate-personal" / "evaluation"
        assert {entry.name for entry in kept.iterdir()} == {"personal.md", "personal.csv"}


def test_a_comparison_over_flare_equals_one_in_process(
    federation: Federation, hospitals: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FedAvg with fine-tuning, and a method from somebody else's package, which the sites allow by its class."""
    file = tmp_path / "compare.yaml"
    file.write_text(yaml.safe_dump(COMPARISON))
    without_workers(monkeypatch)  # of the comparison's own; the federation has its processes
    plan = make_plan(load_comparison(file), hospitals)
    plan = replace(plan, runs=[run for run in plan.runs if run.name != "Local"])
    assert foreign_classes(plan) == ["bounded_fedavg.BoundedFedAvg"]
    assert do_runs(plan, tmp_path / "here", 2, lambda run, reason: None, lambda rounds: None) == {}
    flare, there, told = over_flare(plan), tmp_path / "there", list[Any]()

    def tell(run: Run, reason: str | None) -> None:
        told.append((run.name, reason))

    assert do_runs_on(federation, flare, there, 200, tell, lambda rounds: None) == {}
    assert told == [("FedAvg", None), ("Bounded", None)]
    for mine, theirs in zip(plan.runs, flare.runs, strict=True):
        assert computed(there, theirs) == computed(tmp_path / "here", mine)
    assert do_runs_over_flare(flare, there, 200, tell, lambda rounds: None) == {}
    assert len(told) == 2  # what is finished is not repeated, and no federation is started for it


def computed(results: Path, run: Run) -> dict[str, Any]:
    """What a run found, without times, and the bytes of every hospital's models."""
    found = json_of(read_run(results, run, TrainedRun))
    models = sorted((results / "runs" / run.digest / "home").rglob("*.safetensors"))
    assert found.pop("seconds") > 0 and len(models) >= 2
    return {**found, "models": {f"{path.parts[-4]}/{path.name}": path.read_bytes() for path in models}}


def test_a_job_cannot_call_a_function(federation: Federation, tmp_path: Path) -> None:
    """One for all that tests/flare/test_builder.py lists: the job's processes enforce the kits' allow lists."""
    folder = written(tmp_path, "calls-a-function")
    victim = tmp_path / "victim"
    victim.mkdir()
    config = folder / "app" / "config" / "config_fed_server.json"
    content = json.loads(config.read_text())
    path = "medpfl.flare.pack.shutil.rmtree"  # what a module of the package has imported
    content["components"].append({"id": "evil", "path": path, "args": {"path": str(victim)}})
    config.write_text(json.dumps(content))
    job_id = federation.submit(deploy_to(folder, ["hospital-a"]))  # the server refuses: one hospital is enough
    assert wait(federation, job_id, 120) != "FINISHED:COMPLETED"
    refusals = [line for line in federation.decisive_lines(job_id, most=100) if "ComponentNotAuthorized" in line]
    assert any(f"'path': '{path}'" in line for line in refusals)
    assert victim.is_dir()


def test_every_site_lists_full_class_names_only(federation: Federation) -> None:
    for name in ("server", *federation.sites):
        resources = load_yaml(str(federation.kits / name / "local" / "resources.json"))
        assert resources["class_list_enforcement_mode"] == "enforce"
        ours = [entry for entry in resources["class_allow_list"] if "medpfl" in entry]
        assert "medpfl.core.mixers.SoftPull" in ours and not any(entry.endswith(".") for entry in ours)


def test_a_second_federation_at_the_same_time(
    federation: Federation, hospitals: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = next(iter(hospitals.values())).parent
    early = iter([FLCommunicationError("failed to challenge server: process_exception: no callback")])
    plain = flare_federation.new_secure_session

    def connect(person: str, kit: str, timeout: float) -> Session:
        """On a busy machine a server listens before it has anything that answers."""
        for error in early:
            raise error
        return plain(person, kit, timeout=timeout)

    monkeypatch.setattr(flare_federation, "new_secure_session", connect)
    with Federation(folder, ["hospital-a"]) as other:
        assert other.port != federation.port and other.workspace != federation.workspace
        assert {client.name for client in other.session.get_system_info().client_info} == {"hospital-a"}
    assert len(federation.session.get_system_info().client_info) == len(hospitals)
    with pytest.raises(MedPFLError, match=f"port {federation.port} cannot be used"):
        Federation(folder, ["hospital-a"], port=federation.port)


def test_an_interrupted_run_leaves_no_process(tmp_path: Path) -> None:
    interrupt("run", tmp_path, 30)
