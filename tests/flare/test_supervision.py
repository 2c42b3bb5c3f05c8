# SPDX-License-Identifier: Apache-2.0
"""A job process that was killed is started again; what FLARE then sees. Real processes."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.utils.process_utils import ProcessAdapter, spawn_process

from medpfl.flare import supervision
from medpfl.flare.kit_files import Resources
from medpfl.flare.supervision import SupervisedHandle, supervise, unsupervised

DIES = "import os, sys; open(sys.argv[1], 'a').write('x'); os.kill(os.getpid(), int(sys.argv[2]))"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervision, "_PAUSE", 0.0)


def starting(*command: str) -> Callable[[], ProcessAdapter]:
    return lambda: spawn_process([sys.executable, "-S", "-c", *command], dict(os.environ))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGHUP])
def test_a_killed_process_is_started_again_and_then_given_up(tmp_path: Path, number: int) -> None:
    """Programs that look after memory (earlyoom) end a process by SIGTERM first."""
    file = tmp_path / "starts"
    handle = SupervisedHandle(starting(DIES, str(file), str(int(number))), restarts=2)
    handle.wait()
    assert file.read_text() == "xxx"
    assert handle.poll() == JobReturnCode.EXECUTION_ERROR  # the server is told, and goes on without this hospital


@pytest.mark.parametrize(("command", "code"), [("", JobReturnCode.SUCCESS), ("1/0", JobReturnCode.EXECUTION_ERROR)])
def test_a_process_that_ended_by_itself_stays_ended(command: str, code: int) -> None:
    started = []

    def start() -> ProcessAdapter:
        started.append(1)
        return starting(command)()

    handle = SupervisedHandle(start)
    handle.wait()
    assert len(started) == 1 and handle.poll() == code


def test_an_aborted_process_is_not_started_again(tmp_path: Path) -> None:
    file = tmp_path / "starts"
    handle = SupervisedHandle(
        starting(
            "import sys, time; open(sys.argv[1], 'a').write('x'); open(sys.argv[1] + '.done', 'x'); time.sleep(60)",
            str(file),
        )
    )
    assert handle.poll() == JobReturnCode.UNKNOWN
    waiting = threading.Thread(target=handle.wait)
    waiting.start()
    while not file.with_name("starts.done").exists():  # the first file is there before what is in it
        time.sleep(0.01)
    handle.terminate()
    waiting.join(10)
    assert not waiting.is_alive() and file.read_text() == "x"


def test_a_process_that_waits_to_be_started_again_is_aborted_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(supervision, "_PAUSE", 2.0)
    file = tmp_path / "starts"
    handle = SupervisedHandle(starting(DIES, str(file), str(int(signal.SIGKILL))))
    waiting = threading.Thread(target=handle.wait, daemon=True)
    waiting.start()
    while not caplog.messages:  # it was killed, and is to be started again
        time.sleep(0.01)
    handle.terminate()
    waiting.join(30)
    assert not waiting.is_alive() and file.read_text() == "x"


def test_a_kit_is_told_once(tmp_path: Path) -> None:
    launcher = {"id": "process_launcher", "path": "nvflare.app_common.job_launcher.client_process_launcher."}
    launcher["path"] += "ClientProcessJobLauncher"
    hospital = Resources.model_validate({"components": [dict(launcher)]})
    server = Resources.model_validate({"components": [{"id": "job_store", "path": "x"}]})
    assert unsupervised(hospital, hospital=True) == unsupervised(server, hospital=False) == "before"
    for _ in range(2):
        supervise(hospital, hospital=True)
        supervise(server, hospital=False)
    assert unsupervised(hospital, hospital=True) is unsupervised(server, hospital=False) is None
    other = {**launcher, "path": "nvflare.app_opt.job_launcher.docker_launcher.Launcher"}
    containers = Resources.model_validate({"components": [other]})
    assert unsupervised(containers, hospital=True) == "other"
    assert hospital.written()["components"] == [{**launcher, "path": "medpfl.flare.supervision.SupervisedLauncher"}]
    assert [entry.path for entry in server.components] == ["x", "medpfl.flare.supervision.LostJobs"]
