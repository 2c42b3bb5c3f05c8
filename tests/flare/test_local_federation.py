# SPDX-License-Identifier: Apache-2.0
"""A federation of this machine: which processes it ends, and where it can run. Jobs on it are in tests/poc."""

import errno
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.fuel.flare_api.api_spec import InternalError, NoConnection

from medpfl.core.errors import MedPFLError
from medpfl.flare.hospitals import HospitalFederation
from medpfl.flare.poc import Federation
from medpfl.flare.running import _collect, check_targets
from small_jobs import small_job

ROOT = Path(__file__).resolve().parents[2]

Started = list[subprocess.Popen[bytes]]


@pytest.fixture
def started() -> Iterator[Started]:
    """Processes that the test begins, none of them in the federation's own sessions."""
    processes: Started = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


def begin(started: Started, *arguments: str) -> subprocess.Popen[bytes]:
    """A process with these arguments that does nothing until it is ended."""
    command = [sys.executable, "-c", "print(flush=True); import time; time.sleep(60)", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    started.append(process)
    assert process.stdout is not None and process.stdout.readline() == b"\n"
    return process


def test_only_flares_processes_of_the_workspace_are_ended(tmp_path: Path, started: Started) -> None:
    """``timeout 600 medpfl poc hospitals --workspace w`` was ended by what it had begun, and so were a pager in
    ``w/server.console`` and the federation in ``w2``."""
    federation = Federation(tmp_path, ["hospital-a"])
    federation.workspace.rmdir()
    federation.workspace = tmp_path / "w"
    worker = "nvflare.private.fed.app.client.worker_process"
    bystanders = [
        begin(started, "poc", "hospitals", "--workspace", str(tmp_path / "w")),
        begin(started, str(tmp_path / "w" / "server.console")),
        begin(started, "-m", worker, "-m", str(tmp_path / "w2" / "hospital-a" / "kit")),
    ]
    ours = begin(started, "-m", worker, "-m", str(tmp_path / "w" / "hospital-a" / "kit"))
    federation._stop()
    assert ours.poll() is not None
    assert [process.poll() for process in bystanders] == [None, None, None]


@pytest.mark.parametrize("name", ["two words", "O'Brien", "run#2"])
def test_a_workspace_in_which_flare_starts_nothing(tmp_path: Path, name: str) -> None:
    """Its scripts' and its job processes' commands would be cut in two there, and the federation waited in vain."""
    with pytest.raises(MedPFLError, match="a space, a quote, '#' or a backslash is in the path; name another"):
        HospitalFederation(ROOT / "poc" / "project.yml", tmp_path, ["hospital-a"], workspace=tmp_path / name)
    assert not (tmp_path / name).exists()


def test_a_server_that_is_lost_while_its_job_is_followed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(job_id: str) -> str:
        raise NoConnection("cannot connect to server")

    federation = Federation(tmp_path, ["hospital-a"])
    monkeypatch.setattr(federation, "status", lost)
    with pytest.raises(MedPFLError, match=r"small ended with its server, which was killed \(out of memory\?\) or does"):
        federation.follow("1", "small", timeout=10)
    federation.workspace.rmdir()


def test_a_server_that_does_not_answer_whoever_logs_in_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one on a full disk does not. It was a traceback of FLARE's."""

    def unanswered(person: str) -> None:
        raise InternalError("Communication Error - please try later")

    federation = Federation(tmp_path, ["hospital-a"])
    for name in ("server", "hospital-a"):
        federation._console(name).write_text("OSError: [Errno 28] No space left on device\n")
    monkeypatch.setattr("medpfl.flare.federation.START_TIMEOUT", 0.5)
    monkeypatch.setattr("medpfl.flare.federation._listening", lambda port: True)
    monkeypatch.setattr(federation, "_launch", lambda name: None)
    monkeypatch.setattr(federation, "_open_session", unanswered)
    with pytest.raises(MedPFLError, match=r"not connected: hospital-a\n(.*\n)*server: OSError: .* No space left"):
        federation._start()
    shutil.rmtree(federation.workspace)


def test_a_job_whose_process_at_the_server_was_killed_says_so(tmp_path: Path) -> None:
    """FLARE tells of it as information; of errors it logged that an answer was not forwarded, and no more."""
    federation = Federation(tmp_path, ["hospital-a"])
    before = "2026-11-27 21:10:48,477 - CoreCell - ERROR - [ME=server O=:pital-a] cannot forward req: no path"
    said = "2026-11-27 21:10:49,915 - ServerEngine - INFO - Job: 7 child process exit with return code 1"
    federation._console("server").write_text(f"{before}\n{said}\n")
    assert federation.decisive_lines()[1:] == ["server: Job: 7 child process exit with return code 1"]
    shutil.rmtree(federation.workspace)


@pytest.mark.parametrize("there", [True, False])
def test_results_that_have_no_room_are_one_sentence(tmp_path: Path, there: bool) -> None:
    """A limit on the size of files stands for a full disk."""
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "metrics.jsonl").write_text("x" * 1000)
    target = tmp_path / "results" / "small"
    target.parent.mkdir()
    if there:
        target.mkdir()
        (target / "summary.json").write_text("of before")
    federation: Any = SimpleNamespace(download=lambda job_id: tmp_path / "server", sites=[])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(MedPFLError, match=r"small has ended, and its results cannot be written to .*: .*too large"):
            _collect(federation, small_job(), "1", target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in target.parent.iterdir()] == (["small"] if there else [])


def left_at_the_server(tmp_path: Path) -> Any:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "summary.json").write_text("new")
    return SimpleNamespace(download=lambda job_id: tmp_path / "server", sites=[])


@pytest.mark.parametrize("there", [True, False])
def test_results_go_where_a_link_leads(there: bool, tmp_path: Path) -> None:
    """To a larger disk, say: the link was in the way, and the new results were removed, after hours of training."""
    disk, target = tmp_path / "disk" / "small", tmp_path / "results" / "small"
    (disk if there else disk.parent).mkdir(parents=True)
    if there:
        (disk / "summary.json").write_text("of before")
        (disk / "elsewhere").symlink_to(tmp_path / "kept")
        (tmp_path / "kept").mkdir()
        (tmp_path / "kept" / "file").write_text("kept")
    target.parent.mkdir()
    target.symlink_to(disk)
    _collect(left_at_the_server(tmp_path), small_job(), "1", target)
    assert target.is_symlink() and (target / "summary.json").read_text() == "new"
    assert [path.name for path in disk.parent.iterdir()] == ["small"] and [path.name for path in disk.iterdir()] == [
        "summary.json"
    ]
    assert not there or (tmp_path / "kept" / "file").read_text() == "kept"


def test_results_that_cannot_take_the_place_of_others_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the old ones were removed before, and then all of the new ones."""
    target = tmp_path / "results" / "small"
    target.mkdir(parents=True)
    (target / "summary.json").write_text("of before")
    rename = Path.rename

    def busy(path: Path, other: Path) -> Path:
        if other == target and path.name.endswith(f"-{os.getpid()}"):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", busy)
    with pytest.raises(MedPFLError, match=r"cannot be written to .*: Device or resource busy; they lie in ") as raised:
        _collect(left_at_the_server(tmp_path), small_job(), "1", target)
    assert (target / "summary.json").read_text() == "of before"
    assert (Path(str(raised.value).rpartition("they lie in ")[2]) / "summary.json").read_text() == "new"


def test_two_jobs_of_one_name_are_refused(tmp_path: Path) -> None:
    """The second one's results took the place of the first one's, and its hospitals went on with the first's state."""
    with pytest.raises(MedPFLError, match=r"one and .*two are both named 'small'"):
        check_targets(tmp_path / "results", {tmp_path / "one": small_job(), tmp_path / "two": small_job()})


@pytest.mark.parametrize("held", ["meta.json", "summary.json", None])
def test_what_is_no_results_folder_is_not_replaced(held: str | None, tmp_path: Path) -> None:
    """With --results jobs, say: the job folder itself was removed."""
    (tmp_path / "small").mkdir()
    if held:
        (tmp_path / "small" / held).write_text("")
    if held != "meta.json":
        check_targets(tmp_path, {tmp_path / "job": small_job()})
        return
    with pytest.raises(MedPFLError, match="small holds something else than a job's results"):
        check_targets(tmp_path, {tmp_path / "job": small_job()})
