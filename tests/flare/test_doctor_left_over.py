# SPDX-License-Identifier: Apache-2.0
"""What a machine that lost its power leaves in a kit: numbers of processes that are other programs' by then."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from medpfl.flare.doctor import examine
from medpfl.flare.finding import Finding
from medpfl.flare.kits import read_kit
from medpfl.flare.left_over import left_over
from medpfl.flare.provision import provision

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits")).folder / "hospital-a"


@pytest.fixture
def kit(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "kit")


@pytest.fixture
def other(kit: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A program that is not FLARE's."""
    program = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield program
    program.kill()
    program.wait()


def said(kit: Path) -> list[Finding]:
    return list(left_over(read_kit(kit)))


@pytest.mark.slow
def test_the_doctor_tells_of_it(kit: Path) -> None:
    (kit / "shutdown.fl").touch()
    assert said(kit)[0] in list(examine(kit))


@pytest.mark.slow
def test_a_process_that_is_another_program_by_now(kit: Path, other: subprocess.Popen[bytes]) -> None:
    """FLARE's start.sh starts nothing then; its stop_fl.sh would kill that program."""
    assert not said(kit)
    for name in ("daemon_pid.fl", "pid.fl"):
        (kit / name).write_text(f"{other.pid}\n")
        (found,) = said(kit)
        assert found.status == "problem" and found.mend == f"rm {kit / name}"
        assert f"process {other.pid} is another program by now" in found.text
        for gone in ("", "no number\n", "99999999\n"):  # FLARE's script goes on
            (kit / name).write_text(gone)
            assert not said(kit)


@pytest.mark.slow
def test_a_site_that_runs_leaves_nothing_over(kit: Path) -> None:
    link = kit.parent / "link"
    link.symlink_to(kit)
    command = [sys.executable, "-c", "input()", f"{link}/startup/sub_start.sh"]
    (kit / "shutdown.fl").touch()
    (found,) = said(kit)
    assert found.status == "note" and found.mend == f"rm {kit / 'shutdown.fl'}"
    with subprocess.Popen(command, stdin=subprocess.PIPE) as site:
        (kit / "daemon_pid.fl").write_text(f"{site.pid}\n")
        (kit / "pid.fl").write_text(f"{site.pid}\n")
        assert not said(kit)  # it runs, and ends as it was asked to
        site.kill()
