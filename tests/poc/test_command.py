# SPDX-License-Identifier: Apache-2.0
"""medpfl poc run and medpfl poc hospitals (./poc/run, ./poc/hospitals) answer bad input in one sentence, at once."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from medpfl.cli import main

pytestmark = pytest.mark.poc
ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def poc_run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    """Runs a verb of "medpfl poc" in this process, where its imports are paid once: exit code and stderr."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def run(*arguments: str, verb: str = "run") -> tuple[int, str]:
        monkeypatch.setattr("sys.argv", ["medpfl", "poc", verb, *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(str(ended.value.code)), capfd.readouterr().err

    return run


def test_unknown_job_at_the_shell(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "medpfl", "poc", "run", "nothing", "--results", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("medpfl: there is no job 'nothing'"), done.stderr
    assert "Traceback" not in done.stdout + done.stderr


def test_unwritable_results_folder(poc_run: Run, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text = poc_run("--results", str(tmp_path / "file" / "results"))
    assert code == 1 and f"cannot write the results folder {tmp_path / 'file' / 'results'}: Not a directory" in text


def test_absent_data_says_what_to_download(poc_run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MEDPFL_HEART_DATA", str(tmp_path))
    code, text = poc_run("softpull_heart", "--results", str(tmp_path))
    assert code == 1 and "processed.cleveland.data" in text and "UCI Machine Learning Repository" in text


def test_port_in_use(poc_run: Run, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = poc_run("--port", str(port), "--results", str(tmp_path))
    assert code == 1 and f"port {port} cannot be used: Address already in use" in text
    assert not list(tmp_path.glob("medpfl-poc-*"))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nothing"], "there is no job 'nothing'"),
        (["--workspace", "poc"], "the workspace poc is not empty; name a new folder"),
        (["--workspace", "README.md"], "cannot use the workspace README.md: File exists"),
    ],
)
def test_hospitals(poc_run: Run, arguments: list[str], words: str, tmp_path: Path) -> None:
    code, text = poc_run(*arguments, "--results", str(tmp_path), verb="hospitals")
    assert code == 1 and text.startswith("medpfl: ") and words in text
    assert not list(tmp_path.glob("medpfl-poc-*"))
