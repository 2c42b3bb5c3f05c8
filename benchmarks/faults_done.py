# SPDX-License-Identifier: Apache-2.0
"""The faults of ``benchmarks faults``, and the federation that they are done to."""

import contextlib
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
from nvflare.fuel.flare_api.api_spec import JobNotRunning

from benchmarks.line import Line
from medpfl.core.errors import MedPFLError
from medpfl.flare.federation import LOST
from medpfl.flare.hospitals import HospitalFederation
from medpfl.job import Job, write_job
from medpfl.models.unet import UNet
from medpfl.tasks import Segmentation

ROUNDS = 8
STRUCK = 2
"""The round after which the fault comes."""
VICTIM, GONE = "hospital-b", "hospital-d"
PATIENCE = 400.0  # seconds a job may take


class Bench:
    """The federation, and what the job leaves without a fault; ``run``: what another job leaves without one."""

    def __init__(
        self,
        federation: HospitalFederation,
        line: Line,
        job: Job,
        whole: dict[str, Any],
        run: Callable[[Job], dict[str, Any]],
        folder: Path,
    ):
        self.federation, self.line, self.job, self.whole, self.folder = federation, line, job, whole, folder
        self._run = run
        self.ids: list[str] = []

    def take(self, job: Job) -> None:
        """This job from now on, in place of the one that the other faults have."""
        self.job, self.whole = job, self._run(job)

    def submit(self, name: str, **settings: float) -> str:
        """Submit the job under a name of its own, or once more."""
        job = replace(self.job, name=name, settings=replace(self.job.settings, **settings))  # type: ignore[arg-type]
        self.ids.append(self.federation.submit(write_job(job, self.folder / "jobs" / name)))
        return self.ids[-1]

    def reach(self, job_id: str, number: int) -> None:
        """Wait until a round is finished."""
        lines = self.federation.run_folder("server", job_id) / "results" / "metrics.jsonl"
        text = f'"split": "round", "round": {number}'
        _wait(lambda: lines.exists() and text in lines.read_text(), f"round {number}")

    def answer(self, job_id: str, site: str) -> None:
        """Wait until the server has the text of a hospital's next answer, and not its tensors yet."""
        log = self.federation.run_folder("server", job_id) / "log.txt"
        text = f"submit_update process. client_name:{site} "
        before = log.read_text(errors="replace").count(text)
        _wait(lambda: log.read_text(errors="replace").count(text) > before, f"an answer of {site}", pause=0.001)

    def end(self, job_id: str) -> str:
        """Wait for a job's end; FLARE's word for it."""
        _wait(lambda: self._status(job_id).startswith("FINISHED"), "the job's end")
        return self._status(job_id)

    def _status(self, job_id: str) -> str:
        try:
            return self.federation.status(job_id)
        except LOST:
            return ""

    def abort(self, job_id: str) -> None:
        """As the lead does on the console."""
        with contextlib.suppress(JobNotRunning):
            self.federation.session.abort_job(job_id)
        self.end(job_id)

    def process(self, site: str, job_id: str) -> psutil.Process:
        """The process that runs a job at the server or at a hospital."""
        return psutil.Process(self.federation.job_processes(job_id)[site][0])

    def members(self, site: str) -> list[psutil.Process]:
        """All processes of the server or of a hospital, its daemon's shell too."""
        kit = str(self.federation.kit(site))
        found = []
        for process in self.federation._members():
            with contextlib.suppress(psutil.Error):
                if kit in " ".join(process.cmdline()):
                    found.append(process)
        return found

    def state(self, site: str, name: str, kind: str) -> Path:
        """The newest state file of a kind."""
        folder = self.federation.kit(site) / "medpfl" / name / "state"
        return max(folder.glob(f"*/{kind}-*.safetensors"), key=lambda file: file.name)

    def reconnect(self) -> None:
        """Wait until the server is up again and has all its hospitals."""

        def back() -> bool:
            with contextlib.suppress(*LOST, MedPFLError):
                self.federation.log_in(self.federation.submitter)
                there = {client.name for client in self.federation.session.get_system_info().client_info}
                return there >= set(self.federation.sites)
            return False

        _wait(back, "the server's return")


def _wait(reached: Callable[[], bool], what: str, pause: float = 0.3) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > deadline:
            raise MedPFLError(f"waited {PATIENCE:g} seconds for {what} in vain")
        time.sleep(pause)


# -- the faults: each gives the job a name, does its work, and returns after the last submission -----------------------

Fault = Callable[[Bench, str], None]
FAULTS: dict[str, Fault] = {}


def fault(words: str) -> Callable[[Fault], Fault]:
    """Add one, under the words of the table."""

    def add(done: Fault) -> Fault:
        FAULTS[words] = done
        return done

    return add


@fault("a hospital's job process killed")
def _job_process(bench: Bench, name: str) -> None:
    job_id = bench.submit(name)
    bench.reach(job_id, STRUCK)
    bench.process(VICTIM, job_id).kill()


@fault("a hospital's job process killed in the middle of its answer of 116 MB")
def _middle(bench: Bench, name: str) -> None:
    bench.process(VICTIM, _answering(bench, name)).kill()


@fault("a hospital's line broken in the middle of its answer of 116 MB, back after 30 s")
def _middle_of_line(bench: Bench, name: str) -> None:
    _answering(bench, name)
    bench.line.lost()
    time.sleep(30)
    bench.line.mended()


@fault("a hospital frozen for 30 s, grace of 5 s")
def _frozen(bench: Bench, name: str) -> None:
    job_id = bench.submit(name, grace=5.0)
    bench.reach(job_id, STRUCK)
    process = bench.process(VICTIM, job_id)
    process.suspend()
    time.sleep(30)
    process.resume()


@fault("a hospital's line silent for 30 s while it computes")
def _silent(bench: Bench, name: str) -> None:
    _cut(bench, name, bench.line.silent)


@fault("a hospital's line broken while it computes, back after 30 s")
def _broken(bench: Bench, name: str) -> None:
    _cut(bench, name, bench.line.lost)


@fault("a hospital's line silent for 30 s while it waits")
def _silent_waiting(bench: Bench, name: str) -> None:
    _cut(bench, name, bench.line.silent, waiting=True)


@fault("a hospital's line broken while it waits, back after 30 s")
def _broken_waiting(bench: Bench, name: str) -> None:
    _cut(bench, name, bench.line.lost, waiting=True)


@fault("the server's processes killed; its daemon starts it again")
def _server(bench: Bench, name: str) -> None:
    job_id = bench.submit(name)
    bench.reach(job_id, STRUCK)
    for process in bench.members("server"):
        with contextlib.suppress(psutil.Error):
            if "nvflare" in " ".join(process.cmdline()):
                process.kill()
    bench.reconnect()
    bench.end(job_id)
    bench.submit(name)


@fault("aborted on the console")
def _aborted(bench: Bench, name: str) -> None:
    _interrupted(bench, name)
    bench.submit(name)


@fault("the same job submitted twice at once")
def _twice(bench: Bench, name: str) -> None:
    job_id = bench.submit(name)
    bench.reach(job_id, 1)
    second = bench.submit(name)
    bench.ids[-2:] = [second, job_id]  # the first is the one whose results count


@fault("a hospital cannot write its state during two rounds")
def _hospitals_disk(bench: Bench, name: str) -> None:
    job_id = bench.submit(name)
    bench.reach(job_id, STRUCK)
    with _no_writing(bench.process(VICTIM, job_id)):
        bench.reach(job_id, STRUCK + 2)


@fault("the server can write nothing for 20 s")
def _servers_disk(bench: Bench, name: str) -> None:
    job_id = bench.submit(name)
    bench.reach(job_id, STRUCK)
    with _no_writing(bench.process("server", job_id)):
        time.sleep(20)
    if bench.end(job_id) != "FINISHED:COMPLETED":
        bench.submit(name)


@fault("the server's checkpoint truncated")
def _truncated(bench: Bench, name: str) -> None:
    _damaged(bench, name, "server", "server", lambda content: content[:-100])


@fault("one byte of the server's checkpoint flipped")
def _flipped(bench: Bench, name: str) -> None:
    _damaged(bench, name, "server", "server", _flip)


@fault("a hospital's private state truncated")
def _private_truncated(bench: Bench, name: str) -> None:
    _damaged(bench, name, VICTIM, "private", lambda content: content[:-100])


@fault("one byte of a hospital's private state flipped")
def _private_flipped(bench: Bench, name: str) -> None:
    _damaged(bench, name, VICTIM, "private", _flip)


@fault("a hospital's client process killed; its daemon starts it again")
def _parent(bench: Bench, name: str) -> None:
    job_id = bench.submit(name, grace=5.0)
    bench.reach(job_id, STRUCK)
    for process in bench.members(GONE):
        with contextlib.suppress(psutil.Error):
            if "client_train" in " ".join(process.cmdline()):
                process.kill()


@fault("all processes of a hospital killed for good")
def _for_good(bench: Bench, name: str) -> None:
    job_id = bench.submit(name, grace=5.0)
    bench.reach(job_id, STRUCK)
    _kill(bench)


@fault("a hospital absent from the start")
def _absent(bench: Bench, name: str) -> None:
    _kill(bench)
    bench.submit(name, grace=5.0)


def _answering(bench: Bench, name: str) -> str:
    """The job, in the middle of a hospital's answer; with another network than in the other faults, so that there is
    a middle."""
    task = bench.job.task
    assert isinstance(task, Segmentation)
    task = replace(task, architecture=UNet((16, 32, 128, 1024, 1024), residual_units=1))
    bench.take(replace(bench.job, task=task))
    job_id = bench.submit(name)
    bench.reach(job_id, STRUCK)
    bench.answer(job_id, VICTIM)
    return job_id


def _cut(bench: Bench, name: str, cut: Callable[[], None], waiting: bool = False) -> None:
    """For 30 seconds; ``waiting``: once the hospital has answered, while another one takes 10 seconds more."""
    job_id = bench.submit(name)
    bench.reach(job_id, STRUCK)
    slow = bench.process(GONE, job_id)
    if waiting:
        slow.suspend()
        time.sleep(5)
    cut()
    time.sleep(30)
    bench.line.mended()
    if waiting:
        time.sleep(10)
        slow.resume()


def _kill(bench: Bench) -> None:
    """All processes of a hospital, if it still has any, the daemon's shell before what it would start again."""
    for process in sorted(bench.members(GONE), key=lambda one: "sub_start" not in " ".join(one.cmdline())):
        with contextlib.suppress(psutil.Error):
            process.kill()


def _interrupted(bench: Bench, name: str) -> None:
    job_id = bench.submit(name)
    bench.reach(job_id, STRUCK)
    bench.abort(job_id)


def _damaged(bench: Bench, name: str, site: str, kind: str, damage: Callable[[bytes], bytes]) -> None:
    _interrupted(bench, name)
    file = bench.state(site, name, kind)
    file.write_bytes(damage(file.read_bytes()))
    bench.submit(name)


def _flip(content: bytes) -> bytes:
    return content[:-9] + bytes([content[-9] ^ 0x40]) + content[-8:]


@contextlib.contextmanager
def _no_writing(process: psutil.Process) -> Iterator[None]:
    """No file of the process can grow beyond a few bytes, as on a full disk."""
    before = process.rlimit(psutil.RLIMIT_FSIZE)
    process.rlimit(psutil.RLIMIT_FSIZE, (16, resource.RLIM_INFINITY))
    try:
        yield
    finally:
        with contextlib.suppress(psutil.Error):
            process.rlimit(psutil.RLIMIT_FSIZE, before)
