# SPDX-License-Identifier: Apache-2.0
"""``benchmarks faults``: what goes wrong in a federation, done to a real one, and what came of it.

One federation of four provisioned hospitals (mutual TLS, ``start.sh``) runs the same job again and again, each time
with another fault; the job needs three of the four. A job that ends is submitted again. What is left in the end is
compared with what ``simulate`` leaves of the same job without a fault, to the last bit: test results and the server's
models. A fault whose result is another one must be told of by an event.
"""

import contextlib
import json
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
from nvflare.fuel.flare_api.api_spec import JobNotRunning

from medpfl import store
from medpfl.bundle import find_bundle
from medpfl.core.errors import MedPFLError
from medpfl.demo.phantom import write_phantoms
from medpfl.flare.federation import LOST
from medpfl.flare.hospitals import HospitalFederation
from medpfl.job import Job, load_job, write_job
from medpfl.results.compact import read_compact
from medpfl.rounds.simulate import simulate

ROUNDS = 8
STRUCK = 2
"""The round after which the fault comes."""
VICTIM, GONE = "hospital-b", "hospital-d"
PATIENCE = 240.0  # seconds a job may take


@dataclass(frozen=True)
class Found:
    """What came of a fault.

    Attributes:
        ended: FLARE's words for the job's end, one for every submission; none where something went wrong here.
        same: whether test results and models are those of an uninterrupted run.
        told: what the events and the error say.
        seconds: from the submission to the last end.
    """

    fault: str
    ended: list[str]
    same: bool
    told: list[str]
    seconds: float

    @property
    def verdict(self) -> str:
        if not self.ended:
            return "NOT MEASURED"
        if self.same:
            return "the same result"
        return "another result, and it is told" if self.told else "ANOTHER RESULT, AND NOTHING SAYS SO"


class Bench:
    """The federation, and what the job leaves without a fault."""

    def __init__(self, federation: HospitalFederation, job: Job, whole: dict[str, Any], folder: Path):
        self.federation, self.job, self.whole, self.folder = federation, job, whole, folder
        self.ids: list[str] = []

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


def _wait(reached: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE
    while not reached():
        if time.monotonic() > deadline:
            raise MedPFLError(f"waited {PATIENCE:g} seconds for {what} in vain")
        time.sleep(0.3)


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


@fault("a hospital frozen for 30 s, grace of 5 s")
def _frozen(bench: Bench, name: str) -> None:
    job_id = bench.submit(name, grace=5.0)
    bench.reach(job_id, STRUCK)
    process = bench.process(VICTIM, job_id)
    process.suspend()
    time.sleep(30)
    process.resume()


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


# -- the measurement -------------------------------------------------------------------------------------------------


class _Hospitals(HospitalFederation):
    """FLARE's server waits 20 seconds, not 15 minutes, for a hospital that is gone when the job is over."""

    def _environment(self, name: str) -> dict[str, str]:
        return {**super()._environment(name), "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20"}


def measure(only: str) -> Iterator[Found]:
    """Do every fault whose words hold ``only`` to a federation of its own; no process is left.

    Raises:
        MedPFLError: the federation does not start.
    """
    with tempfile.TemporaryDirectory(prefix="medpfl-faults-") as scratch:
        folder = Path(scratch)
        sites = write_phantoms(folder / "sites")
        job = load_job(find_bundle() / "jobs" / "softpull_phantom")
        assert isinstance(job, Job)
        settings = replace(job.settings, rounds=ROUNDS, finetune=1, grace=90.0)
        job = replace(job, min_clients=3, settings=settings, method=replace(job.method, steps=4))
        files = {site: folder / "sites" / f"{site}.yaml" for site in sites}
        simulate(job, files, folder / "whole", folder / "home")
        project = find_bundle() / "poc" / "project.yml"
        with _Hospitals(project, folder / "sites", sites, workspace=folder / "federation") as federation:
            for words, do in FAULTS.items():
                if only in words:
                    bench = Bench(federation, job, _left(folder / "whole"), folder)
                    yield _one(bench, words, do)


def _one(bench: Bench, words: str, do: Fault) -> Found:
    name = "fault-" + "-".join("".join(c if c.isalnum() else " " for c in words).split())
    started = time.monotonic()
    try:
        do(bench, name)
        ended = [bench.end(job_id) for job_id in bench.ids]
        left = bench.federation.download(bench.ids[-1])
        others = [bench.federation.download(job_id) for job_id in bench.ids[:-1]]
        told = [_failure(folder) for folder in others] + _events(left)
        same = _same(_left(left), bench.whole)
    except (MedPFLError, OSError, ValueError, psutil.Error, *LOST) as error:
        return Found(words, [], False, [f"{type(error).__name__}: {error}"], time.monotonic() - started)
    return Found(words, ended, same, list(dict.fromkeys(filter(None, told))), time.monotonic() - started)


def _left(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    slots = {file.stem: store.read(file)[0] for file in sorted((folder / "slots").glob("*.safetensors"))}
    return {"test": summary["test"], "best": summary["best"], "slots": slots}


def _same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if (one["test"], one["best"], one["slots"].keys()) != (other["test"], other["best"], other["slots"].keys()):
        return False
    return all(
        tensors.keys() == other["slots"][slot].keys()
        and all(torch.equal(tensor, other["slots"][slot][key]) for key, tensor in tensors.items())
        for slot, tensors in one["slots"].items()
    )


def _events(folder: Path) -> list[str]:
    events = json.loads((folder / "summary.json").read_text())["events"]
    return [f"{event['site']}: {event['event']} (round {event['round']})" for event in events]


def _failure(folder: Path) -> str:
    file = folder / "failure.json"
    return f"the job that ended: {json.loads(file.read_text())['reason']}" if file.is_file() else ""


def as_results(found: Sequence[Found], out: Path | None) -> dict[str, Any]:
    """For the JSON file; what it holds of other faults stays in it."""
    before: Any = read_compact(out)["faults"] if out is not None and out.exists() else []
    entries = {one["fault"]: one for one in before}
    entries |= {one.fault: {**asdict(one), "verdict": one.verdict} for one in found}
    return {"rounds": ROUNDS, "faults": [entries[words] for words in FAULTS if words in entries]}


def table_of(results: dict[str, Any]) -> str:
    """The Markdown table."""
    lines = ["| fault | FLARE says | result | what the events say | s |", "|---|---|---|---|---:|"]
    for one in results["faults"]:
        told = "<br>".join(text.replace("|", "/") for text in _together(one["told"])) or "nothing"
        ended = ", then ".join(word.removeprefix("FINISHED:") for word in one["ended"])
        lines.append(f"| {one['fault']} | {ended} | {one['verdict']} | {told} | {one['seconds']:.0f} |")
    return "\n".join(lines)


def _together(told: list[str]) -> list[str]:
    """What several hospitals say alike, once."""
    who: dict[str, list[str]] = {}
    for text in told:
        name, _, said = text.partition(": ")
        who.setdefault(said, []).append(name)
    return [f"{', '.join(names)}: {said}" for said, names in who.items()]
