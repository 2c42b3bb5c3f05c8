# SPDX-License-Identifier: Apache-2.0
"""``benchmarks faults``: what goes wrong in a federation, done to a real one, and what came of it.

One federation of four provisioned hospitals (mutual TLS, ``start.sh``) runs the same job again and again, each time
with another fault; the job needs three of the four. A job that ends is submitted again. What is left in the end is
compared with what ``simulate`` leaves of the same job without a fault, to the last bit: test results and the server's
models. A fault whose result is another one must be told of by an event.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch
import typer

from benchmarks.common import OutOption, machine, write_json
from benchmarks.faults_done import FAULTS, ROUNDS, VICTIM, Bench, Fault
from benchmarks.line import Line
from medpfl import store
from medpfl.bundle import find_bundle
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.demo.phantom import write_phantoms
from medpfl.flare.federation import LOST, usable_port
from medpfl.flare.hospitals import HospitalFederation
from medpfl.flare.kit_files import Project, Way
from medpfl.job import Job, load_job
from medpfl.results.compact import read_compact
from medpfl.rounds.simulate import simulate


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


class _Hospitals(HospitalFederation):
    """FLARE's server waits 20 seconds, not 15 minutes, for a hospital that is gone when the job is over; and the one
    whose line is cut connects to a port of its own."""

    def __init__(self, *settings: Any, **more: Any):
        super().__init__(*settings, **more)
        self.line = Line(usable_port(None), self.port)

    def _localised(self) -> Project:
        project = super()._localised()
        way = Way(host="localhost", port=self.line.port)
        victim = next(one for one in project.participants if one.name == VICTIM)
        others = [one for one in project.participants if one is not victim]
        return project.model_copy(update={"participants": [*others, victim.model_copy(update={"connect_to": way})]})

    def _environment(self, name: str) -> dict[str, str]:
        return {**super()._environment(name), "NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT": "20"}


def chosen(only: str, out: Path | None) -> dict[str, Fault]:
    """The faults whose words hold ``only``.

    Raises:
        MedPFLError: there are none, or the file for the numbers holds another benchmark's.
    """
    found = {words: do for words, do in FAULTS.items() if only in words}
    if not found:
        raise MedPFLError(f"--only: no fault's words hold '{only}'; there are: {'; '.join(FAULTS)}")
    if out is not None and out.exists() and "faults" not in read_compact(out):
        raise MedPFLError(f"{out}: expected a result of the benchmark 'faults'")
    return found


def measure(faults: Mapping[str, Fault]) -> Iterator[Found]:
    """Do every fault to a federation of its own; no process is left.

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

        def whole(job: Job) -> dict[str, Any]:
            """What a run without a fault leaves."""
            simulate(job, files, folder / "whole", folder / "home")
            return _left(folder / "whole")

        same = whole(job)
        project = find_bundle() / "poc" / "project.yml"
        hospitals = _Hospitals(project, folder / "sites", sites, workspace=folder / "federation")
        with hospitals.line, hospitals as federation:
            for words, do in faults.items():
                bench = Bench(federation, hospitals.line, job, same, whole, folder)
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


def command(
    only: Annotated[str, typer.Option(help="Only the faults whose words hold this.")] = "",
    out: OutOption = None,
) -> None:
    """Every fault that a federation must survive, done to four provisioned hospitals on this machine."""
    facts = machine()
    found = []
    for one in measure(chosen(only, out)):
        found.append(one)
        say(f"{one.fault}: {one.verdict} ({one.seconds:.0f} s)")
        write_json(out, "faults", facts, as_results(found, out))
    say(table_of(as_results(found, None)))
    if any(one.verdict.isupper() or "NOTHING" in one.verdict for one in found):
        raise typer.Exit(1)
