# SPDX-License-Identifier: Apache-2.0
"""What a soak says of what it saw; the soak itself needs a federation (``python -m benchmarks soak``)."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from benchmarks.soak import COLUMNS, Seen, as_results, contents, draw, faults, growth, measure, reading, table_of
from medpfl.core.errors import MedPFLError


def results(leak: float = 0.0, **change: Any) -> dict[str, Any]:
    """Of 100 rounds, looked at in every second; ``leak``: MB that the server's process loses a round."""
    rng = np.random.default_rng(0)
    rows = [[float(n), 500, 400 + leak * n + rng.normal(), 450, 50 + n % 2, 20, 8, 0] for n in range(0, 100, 2)]
    start = [[0.0, 100, 50, 60, 2, 9, 2, 0]]  # while it starts, before the warm-up is over
    seen = Seen(
        processes={"server: job": start + rows, "server: daemon": [row[:] for row in rows[:2]]},
        folders={"server": [[float(n), 2.0, 3.0, 1.0] for n in range(0, 100, 2)]},
        seconds=[1.0] * 100,
        left={"processes": [], "ports": []},
        console={"threads": 3, "files": 0},
        started={"server: job": [17]},
    )
    return as_results(seen, 100, 4, 2.0) | change


def test_what_is_level_is_no_fault_and_its_start_does_not_count() -> None:
    assert faults(results()) == [] and table_of(results()).endswith("and nothing was left.")
    assert abs(growth(results())["server: job"]["uss"]) < 2


def test_a_leak_is_measured_and_told_of() -> None:
    found = results(leak=0.3)
    assert growth(found)["server: job"]["uss"] == pytest.approx(30, abs=2)
    (told,) = faults(found)
    assert told.startswith("server: job: +") and told.endswith("MB of own memory in 100 rounds, the limit is 10")
    assert told in table_of(found)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"left": {"ports": ["8002"]}}, "ports left: 8002"),
        ({"restarts": {"hospital-a: job": 1}}, "hospital-a: job was started again 1 times"),
        ({"console": {"threads": 40, "files": 0}}, "has 40 more threads, the limit is 8"),
        ({"seconds": [1.0], "processes": {"server: job": [[50.0] + [1.0] * 7]}}, "+nan MB of own memory"),
    ],
)
def test_whatever_is_left_or_not_known_is_a_fault(change: dict[str, Any], words: str) -> None:
    assert any(words in told for told in faults(results(**change)))


@contextlib.contextmanager
def process(code: str) -> Iterator[psutil.Process]:
    with subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE) as started:
        assert started.stdout is not None and started.stdout.readline()
        yield psutil.Process(started.pid)
        started.kill()


def test_a_process_is_read_as_it_is(tmp_path: Path) -> None:
    more = f"""
import socket, subprocess, sys, threading, time
held = [open({str(tmp_path / "x")!r}, "w") for _ in range(3)], socket.socket(), bytearray(b"x" * 40_000_000)
held[1].listen()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
child = subprocess.Popen(["sleep", "60"])
print(1, flush=True); time.sleep(60)"""
    with process("import time; print(1, flush=True); time.sleep(60)") as plain, process(more) as other:
        before, after = reading(plain), reading(other)
        (child,) = other.children()
        child.kill()
    grown = dict(zip(COLUMNS[1:], np.subtract(after, before), strict=True))
    assert grown["uss"] > 39 and grown["rss"] > 39
    assert (grown["threads"], grown["files"], grown["sockets"], grown["children"]) == (1, 4, 1, 1)


def test_folders_and_the_picture(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "b").write_bytes(b"x" * 2000)
    assert contents(tmp_path) == (0.002, 1)
    draw(results(), tmp_path / "soak.svg")
    assert "<svg" in (tmp_path / "soak.svg").read_text()


def test_too_little_is_not_measured() -> None:
    with pytest.raises(MedPFLError, match="at least 10 rounds"):
        measure(5, 4, 1.0, print)
