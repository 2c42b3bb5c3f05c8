# SPDX-License-Identifier: Apache-2.0
"""A test run ends, and fails, when a test's process dies or hangs."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

LIVES = """
import time
import pytest

@pytest.mark.parametrize("number", range(40))
def test_lives(number):
    time.sleep(0.1)
"""
DIES = """
import os

def test_dies():
    os.abort()

def test_after():
    pass
"""
# As a loop in compiled code does, it lets no signal in: neither an interrupt nor pytest-timeout's alarm ends it.
HANGS = """
import signal
import time

def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    while True:
        time.sleep(1)
"""


@pytest.mark.parametrize("processes", ["0", "2"])
@pytest.mark.parametrize(("bad", "words"), [(DIES, "Fatal Python error: Aborted"), (HANGS, "Timeout (0:00:02)!")])
def test_a_run_ends_and_fails(tmp_path: Path, bad: str, words: str, processes: str) -> None:
    (tmp_path / "test_bad.py").write_text(bad)
    if processes != "0":  # for the other process
        for name in "cd":
            (tmp_path / f"test_{name}.py").write_text(LIVES)
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    command += ["-n", processes, "--dist", "loadfile", "-o", "faulthandler_timeout=2", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode != 0  # the other process may finish its files before the run ends
    assert words in done.stderr and "test_bad.py" in done.stderr  # where it was
    assert processes == "0" or "test_bad.py::" in done.stdout.partition("short test summary")[2]
