# SPDX-License-Identifier: Apache-2.0
"""The same job twice at once: the second waits, or is refused with a sentence that names the first."""

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from medpfl.core.errors import MedPFLError
from medpfl.deployed.evaluate import write_text
from medpfl.job import Job
from medpfl.results.files import read_lines, read_training
from medpfl.results.schema import RoundLine
from medpfl.rounds import lock
from medpfl.rounds.lock import StateInUse, StateLock
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from tools import pieces, ready, round_of

Make = Callable[..., Job]
HOLD = """
import sys, time
from pathlib import Path
from medpfl.rounds.lock import StateLock
held = StateLock()
held.take(Path(sys.argv[1]), "the first job")
print("taken", flush=True)
time.sleep(60)
"""


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "PATIENCE", 0.0)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_second_server_is_refused_and_the_first_is_named(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    first, runners = pieces(make_job(), table_sites, tmp_path)
    ready(first, runners)
    second, others = pieces(make_job(), table_sites, tmp_path)
    with pytest.raises(StateInUse, match=rf"under way already: the job whose results go to {tmp_path}/r \(process \d+"):
        ready(second, others)
    first.close()
    ready(second, others)
    another, third = pieces(make_job(seed=1), table_sites, tmp_path)  # another run has a folder of its own
    ready(another, third)


@pytest.mark.slow
@pytest.mark.usefixtures("impatient")
def test_a_second_process_at_a_hospital_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = pieces(make_job(), table_sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    coordinator.close()
    again, others = pieces(make_job(), table_sites, tmp_path)
    ready(again, others)
    with pytest.raises(StateInUse, match=r"under way already: at anna \(process \d+, since .* UTC\); wait for its end"):
        round_of(again, others, 2)
    for runner in runners.values():
        runner.close()
    round_of(again, others, 2)
    others["anna"].recover()  # a hospital that failed keeps its lock, and does not wait for itself
    round_of(again, others, 3)


def test_the_lock_ends_with_its_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout and process.stdout.readline() == "taken\n"
        mine = StateLock()
        with pytest.raises(StateInUse, match=rf"the first job \(process {process.pid}, since"):
            mine.take(tmp_path, "the second job", stopped=lambda: True)
        monkeypatch.setattr(lock, "PATIENCE", 10.0)
        threading.Timer(0.3, process.kill).start()
        mine.take(tmp_path, "the second job")  # waits until the first is gone
    assert "the second job" in (tmp_path / "lock").read_text()
    mine.release()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", [0, 1], ids=["the same job", "another run of it"])
def test_a_second_simulation_leaves_the_results_of_the_first_alone(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, seed: int
) -> None:
    results, home = tmp_path / "results", tmp_path / "home"

    def second(first: Coordinator) -> None:
        if first.done == 2:
            with pytest.raises(StateInUse, match=r"another simulation writes into the same folder: the one whose res"):
                simulate(make_job(rounds=1, seed=seed), table_sites, results, home)

    simulate(make_job(seed=0), table_sites, results, home, second)
    trained = [line.round for line in read_lines(results) if isinstance(line, RoundLine)]
    assert trained == [1, 2, 3]
    simulate(make_job(rounds=1, seed=seed), table_sites, results, home)  # it is free again


def test_a_run_that_was_broken_off_does_not_lie_beside_the_results_of_the_one_before(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    results, home = tmp_path / "results", tmp_path / "home"
    simulate(make_job(), table_sites, results, home)
    before = read_training(results)
    with pytest.raises(MedPFLError):  # before its first round
        simulate(make_job(min_clients=5), table_sites, results, home)
    assert read_training(results) == before and len(read_lines(results)) > 3
    simulate(make_job(seed=1), table_sites, results, home, stop_after=1)
    with pytest.raises(MedPFLError, match=r"results: the job has not come to its end"):
        read_training(results)
    assert not (results / "report.html").exists()
    simulate(make_job(seed=1), table_sites, results, home)
    assert read_training(results).settings.seed == 1


def test_a_folder_that_cannot_be_written_is_told_outside_by_its_reason(tmp_path: Path) -> None:
    """A full disk, say, at a hospital: its lead must know of it, and not where the folder lies."""
    (tmp_path / "file").touch()
    with pytest.raises(MedPFLError, match=f"cannot lock the state folder {tmp_path}") as refused:
        StateLock().take(tmp_path / "file" / "state", "a job")
    assert refused.value.public == "the state folder could not be locked: Not a directory"
    with pytest.raises(MedPFLError, match=f"cannot write {tmp_path}") as refused:
        write_text(tmp_path / "file" / "models" / "best.md", "a model's card")
    assert refused.value.public == "a file could not be written: Not a directory"
