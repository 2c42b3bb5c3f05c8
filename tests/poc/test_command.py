# SPDX-License-Identifier: Apache-2.0
"""./poc/run and ./poc/hospitals answer bad input in one sentence, before they start anything."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.poc
ROOT = Path(__file__).resolve().parents[2]


def poc_run(*arguments: str, script: str = "run_jobs.py", **environment: str) -> tuple[int, str]:
    command = [sys.executable, str(ROOT / "poc" / script), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **environment}, check=False, timeout=60
    )
    assert "Traceback" not in done.stdout + done.stderr
    return done.returncode, done.stderr


def test_unwritable_results_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text = poc_run("--results", str(tmp_path / "file" / "results"))
    assert code == 1 and f"cannot write the results folder {tmp_path / 'file' / 'results'}: Not a directory" in text


def test_unknown_job(tmp_path: Path) -> None:
    code, text = poc_run("nothing", "--results", str(tmp_path))
    assert code == 1 and "there is no job 'nothing'" in text


def test_absent_data_says_what_to_download(tmp_path: Path) -> None:
    code, text = poc_run("softpull_heart", "--results", str(tmp_path), MEDPFL_HEART_DATA=str(tmp_path))
    assert code == 1 and "processed.cleveland.data" in text and "UCI Machine Learning Repository" in text


def test_port_in_use(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = poc_run("--port", str(port), "--results", str(tmp_path), TMPDIR=str(tmp_path))
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
def test_hospitals(arguments: list[str], words: str, tmp_path: Path) -> None:
    code, text = poc_run(*arguments, "--results", str(tmp_path), script="run_hospitals.py", TMPDIR=str(tmp_path))
    assert code == 1 and text.startswith("poc/hospitals: ") and words in text
    assert not list(tmp_path.glob("medpfl-poc-*"))
