# SPDX-License-Identifier: Apache-2.0
"""A command that is ended by a signal cleans up before it ends; one that runs under nohup outlives its terminal."""

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_COMMAND = """
import signal, sys
from pathlib import Path
import medpfl.cli as cli

def app():
    try:
        print("ready", flush=True)
        while True:
            signal.pause()
    finally:
        print("cleaning up", flush=True)
        Path(sys.argv[1]).touch()

cli.app = app
cli.main()
"""


@contextmanager
def begun(cleaned: Path, *before: str) -> Iterator["subprocess.Popen[str]"]:
    """A command that waits, and makes a file when it is ended."""
    command = [*before, sys.executable, "-c", _COMMAND, str(cleaned)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_a_command_as_ctrl_c_does(number: signal.Signals, tmp_path: Path) -> None:
    with begun(tmp_path / "cleaned") as process:
        process.send_signal(number)
        assert process.wait(30) == 128 + number
    assert (tmp_path / "cleaned").exists()


def test_under_nohup_a_command_outlives_its_terminal(tmp_path: Path) -> None:
    with begun(tmp_path / "cleaned", "nohup") as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM


def test_a_terminal_that_is_closed(tmp_path: Path) -> None:
    """The system tells its processes so by SIGHUP, and whatever they write then is an error."""
    process, terminal = pty.fork()
    if process == 0:
        os.execv(sys.executable, [sys.executable, "-c", _COMMAND, str(tmp_path / "cleaned")])
    assert os.read(terminal, 5) == b"ready"
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 128 + signal.SIGHUP
    assert (tmp_path / "cleaned").exists()
