# SPDX-License-Identifier: Apache-2.0
"""A comparison's runs on a Dask cluster of two workers, one of which is killed while it works; and on several GPUs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from distributed import LocalCluster

from comparing import compared, plan_of, write_file
from medpfl.compare import processes
from medpfl.compare.cluster import cluster_of, outcome
from medpfl.compare.collect import collect
from medpfl.compare.runner import do_runs
from medpfl.core.errors import MedPFLError
from small_jobs import write_table_sites

STUB = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
(folder / "seen").write_text(os.environ.get("CUDA_VISIBLE_DEVICES", "none"))
while not (folder.parent / "go").exists():
    time.sleep(0.02)
"""
"""In a worker's place: says which GPU it was given and waits."""
WAITING = """
import sys, time
from medpfl.compare.cluster import cluster_of, ended
with cluster_of(1, None) as cluster:
    future = cluster.submit("stub", sys.argv[1])
    deadline = time.monotonic() + 20
    while not ended(future):
        assert time.monotonic() < deadline, "the run's end was not seen"
        time.sleep(0.05)
"""


def wait_for(what: Callable[[], object], seconds: float = 100) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Cluster:
    """A scheduler and two workers of one thread, as ``dask scheduler`` and ``dask worker`` start them."""

    def __init__(self, folder: Path):
        self.file = folder / "scheduler.json"
        self.log = open(folder / "dask.txt", "w")  # noqa: SIM115  (held while it runs)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.start("scheduler", "--port", "0", "--no-show", "--dashboard-address", "127.0.0.1:0")
        wait_for(lambda: self.file.is_file() and self.file.stat().st_size)  # it is there before what is in it
        self.address = json.loads(self.file.read_text())["address"]
        for _ in range(2):
            self.start("worker", "--nthreads", "1", "--no-nanny", "--no-dashboard", "--local-directory", str(folder))

    def start(self, what: str, *options: str) -> None:
        command = [sys.executable, "-m", "dask", what, "--host", "127.0.0.1", "--scheduler-file", str(self.file)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        process = subprocess.Popen([*command, *options], env=environment, stdout=self.log, stderr=self.log)
        self.processes.append(process)

    def close(self) -> None:
        for process in self.processes:
            for child in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
                child.kill()
            process.kill()
            process.wait()
        self.log.close()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    started = Cluster(tmp_path)
    yield started
    started.close()


@pytest.mark.slow
def test_a_worker_killed_while_it_works_changes_no_digit(cluster: Cluster, tmp_path: Path) -> None:
    """It is killed with the process that it had begun; the other worker begins the run again."""
    sites = write_table_sites(tmp_path / "sites")
    plan, here = compared(tmp_path, sites)
    assert len(plan.runs) == 2
    results = tmp_path / "there"
    killed: list[subprocess.Popen[bytes]] = []

    def kill_one(rounds: int) -> None:
        alive = [one for one in cluster.processes[1:] if one.poll() is None]
        busy = [one for one in alive if psutil.Process(one.pid).children()]
        if busy and not killed:
            killed.append(busy[0])
            for pid in (busy[0].pid, psutil.Process(busy[0].pid).children()[0].pid):
                os.kill(pid, signal.SIGKILL)

    assert not do_runs(plan, results, 1, lambda run, reason: None, kill_one, cluster.address)
    assert killed[0].wait() == -signal.SIGKILL
    found = collect(plan, results, {})
    for row, same in zip(found.rows, here.rows, strict=True):
        assert row.model_copy(update={"seconds": same.seconds, "reach": same.reach}) == same
    assert not list(results.glob("runs/*.part"))


@pytest.mark.slow
def test_comparisons_that_share_a_run_have_it_each(tmp_path: Path) -> None:
    """Dask took both for one task and did it into the first one's folder: the other comparison had no Local."""
    parts = [tmp_path / name / "runs" / "0.part" for name in ("one", "other")]
    for part in parts:
        part.mkdir(parents=True)
    alone: dict[str, Any] = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with ExitStack() as stack:
        here = LocalCluster(**alone, host="127.0.0.1", protocol="tcp://", local_directory=str(tmp_path))
        there = stack.enter_context(here)
        clusters = [stack.enter_context(cluster_of(1, there.scheduler_address)) for _ in parts]
        runs = [cluster.submit("this", str(part)) for cluster, part in zip(clusters, parts, strict=True)]
        for run, part in zip(runs, parts, strict=True):
            assert str(part / processes.LOG) in str(outcome(run))  # it leaves no result, and the sentence says where


@pytest.mark.slow
def test_nobody_at_the_address_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("medpfl.compare.cluster._WAIT", 0.2)
    plan = plan_of(tmp_path, write_table_sites(tmp_path / "sites"))
    with pytest.raises(MedPFLError, match=r"no Dask scheduler answers at tcp://127.0.0.1:9"):
        do_runs(plan, tmp_path, 1, lambda run, reason: None, lambda rounds: None, "tcp://127.0.0.1:9")


@pytest.mark.parametrize("address", ["nonsense", "tcp://here", "here:port", "htp://here:8786"])
def test_what_is_no_address_is_one_sentence(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dask's client waits half a minute for itself to close, and writes a traceback beside the sentence."""
    monkeypatch.setattr("distributed.Client", lambda *_, **__: pytest.fail("a client was made"))
    with pytest.raises(MedPFLError, match=f"no Dask scheduler answers at {address}"), cluster_of(1, address):
        pass


@pytest.mark.slow
def test_a_machine_that_slept_goes_on(tmp_path: Path) -> None:
    """Longer than Dask waits for a sign of life: five minutes, here five seconds."""
    (tmp_path / "stub.py").write_text(STUB)
    part = tmp_path / "0.part"
    part.mkdir()
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    environment = {**os.environ, "PYTHONPATH": path, "DASK_DISTRIBUTED__SCHEDULER__WORKER_TTL": "1s"}
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(part)], env=environment)
    try:
        wait_for((part / "seen").is_file)
        process.send_signal(signal.SIGSTOP)
        time.sleep(7)
        process.send_signal(signal.SIGCONT)
        time.sleep(1)
        (tmp_path / "go").touch()
        assert process.wait(40) == 0
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_comparison_that_is_killed_takes_its_runs_and_its_copies_of_data_with_it(tmp_path: Path) -> None:
    """By SIGTERM, as a batch system does it."""
    write_table_sites(tmp_path / "sites")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "medpfl", "compare", str(write_file(tmp_path, rounds=500)), "--sites"]
    process = subprocess.Popen(
        [*command, str(tmp_path / "sites"), "-o", str(tmp_path / "results")],
        env={**os.environ, "TMPDIR": str(scratch), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: list((tmp_path / "results").glob("runs/*.part/**/metrics.jsonl")))
        begun = psutil.Process(process.pid).children(recursive=True)
        assert begun and list(scratch.glob("medpfl-*"))
        process.terminate()
        assert process.wait(60) == 143
        assert not psutil.wait_procs(begun, 10)[1]
        assert not list(scratch.glob("medpfl-*"))
    finally:
        for one in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []:
            one.kill()
        process.kill()
        process.wait()


@pytest.mark.slow
def test_of_a_comparison_that_is_ended_no_run_is_begun_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for a run takes the next one when it is ended, as Dask's threads do."""
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = [tmp_path / f"{number}.part" for number in range(2)]
    for part in parts:
        part.mkdir()

    def one_after_the_other() -> list[str | None]:
        return [processes.run_in_process("stub", str(part)) for part in parts]

    with ThreadPoolExecutor(1) as thread:
        with pytest.raises(KeyboardInterrupt), cluster_of(1, None):
            told = thread.submit(one_after_the_other)
            wait_for((parts[0] / "seen").exists)
            raise KeyboardInterrupt
        (tmp_path / "go").touch()
        assert "it was not begun" in str(told.result()[1]) and not (parts[1] / "seen").exists()
    with cluster_of(1, None) as cluster:  # the next comparison of this process begins its runs
        assert "exit code 0" in str(outcome(cluster.submit("stub", str(parts[1]))))


@pytest.mark.slow
def test_runs_of_this_machine_open_no_port_to_others(tmp_path: Path) -> None:
    def listening() -> set[tuple[str, int]]:
        found = psutil.Process().net_connections()
        return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}

    before = listening()
    with cluster_of(2, None) as cluster:
        assert outcome(cluster.submit("stub", str(tmp_path / "gone.part"))) is not None
        assert {ip for ip, _ in listening() - before} <= {"127.0.0.1"}
    assert listening() == before


def test_several_gpus_have_as_many_runs_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without any: the environment of the runs' own processes says what they would see."""
    monkeypatch.delenv("MEDPFL_DEVICE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    (tmp_path / "stub.py").write_text(STUB)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(processes, "_gpus_taken", Counter())
    parts = [tmp_path / f"{number}.part" for number in range(4)]
    for part in parts:
        part.mkdir()
    with ThreadPoolExecutor(4) as threads:
        runs = [threads.submit(processes.run_in_process, "stub", str(part)) for part in parts]
        wait_for(lambda: all((part / "seen").exists() and (part / "seen").read_text() for part in parts))
        (tmp_path / "go").touch()
        assert all("exit code 0" in str(run.result()) for run in runs)  # it leaves no result
    assert sorted((part / "seen").read_text() for part in parts) == ["2", "2", "5", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-a, MIG-b")
    assert processes.visible_gpus() == ["MIG-a", "MIG-b"]
    monkeypatch.setenv("MEDPFL_DEVICE", "cuda:1")  # which would not be there, were a run shown one of them alone
    assert processes._take_gpu() is None
    monkeypatch.delenv("MEDPFL_DEVICE")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert processes.visible_gpus() == [] and processes._take_gpu() is None


def test_what_a_cluster_cannot_do_is_one_sentence(tmp_path: Path) -> None:
    told = processes.run_in_process("stub", str(tmp_path / "gone.part"))
    assert told is not None and "results must lie on a disk that all workers see" in told
    (tmp_path / "a.part").mkdir()
    told = processes.run_in_process("stub", str(tmp_path / "a.part"), version="0.0.9")
    assert told is not None and "and the comparison is of 0.0.9" in told
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / processes.RESULT).touch()
    assert processes.run_in_process("stub", str(tmp_path / "b.part")) is None  # another worker ended it
