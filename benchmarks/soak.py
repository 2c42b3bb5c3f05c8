# SPDX-License-Identifier: Apache-2.0
"""``benchmarks soak``: many rounds of one job in a real federation: what grows with them, and what is left afterwards.

Provisioned hospitals (mutual TLS, ``start.sh``) train SoftPull on the phantoms, with local training, FedAvg and
FedAvg + fine-tuning beside it, one step a round. Every few seconds the processes are looked at: the memory that is
theirs alone, threads, open files, sockets and children; and the folders in which they keep things. A straight line
through what was seen after the warm-up is the growth, which has a limit. When the federation was told to end, no
process, port or temporary file of it may be left, and this process has the threads and files that it had before.
"""

import contextlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer

from benchmarks.common import OutOption, machine, markdown, write_json
from medpfl.bundle import find_bundle
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.demo.phantom import write_phantoms
from medpfl.deployed.evaluate import write_text
from medpfl.flare.federation import _listening
from medpfl.flare.hospitals import HospitalFederation
from medpfl.job import Job, load_job, write_job
from medpfl.results.files import LINES
from medpfl.results.svg import svg_text

NAME = "soak"
MB = 1e6
WARM_UP = 0.3
"""Part of the rounds that does not count: caches and memory pools fill, and best rounds change."""
KEPT_THREADS = "2"
"""Seconds for which FLARE keeps a sleeping thread for every message that came; its default is 60."""
LAST_THREADS = 75.0
"""Seconds after which the last of them has ended in the process that opened the console."""
CONSOLE = {"threads": 8, "files": 0}
"""How many more threads and files that process may have afterwards: FLARE's pools of threads are there once."""
LIMITS = {"uss": 10.0, "threads": 5.0, "files": 1.0, "sockets": 1.0, "children": 0.5}
"""How much a process may grow in 100 rounds: MB of memory that is its own, threads, ..."""
FOLDER_LIMITS = {"state": 1.5, "run": 5.0, "count": 1.0}
"""How much folders may grow in 100 rounds: MB of state and of FLARE's folder of the job, files of state."""
WORDS = {
    "uss": "MB of own memory", "state": "MB of state", "run": "MB of FLARE's run folder", "count": "files of state",
    "files": "open files",
}  # fmt: skip
COLUMNS = ("round", "rss", "uss", "pss", "threads", "files", "sockets", "children")
FOLDER_COLUMNS = ("round", "state", "count", "run")
PER_ROUND = 60.0  # seconds a round may take before the job is given up


@dataclass
class Seen:
    """What was seen: ``processes``: whose ("hospital-a: job") to rows of ``COLUMNS``, memory in MB; ``folders``: whose
    to rows of ``FOLDER_COLUMNS``; ``seconds``: of each round; ``left``: what was left in the end, kind to what;
    ``console``: how many more threads and files this process then had; ``started``: whose to its processes' ids."""

    processes: dict[str, list[list[float]]] = field(default_factory=dict)
    folders: dict[str, list[list[float]]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    left: dict[str, list[str]] = field(default_factory=dict)
    console: dict[str, int] = field(default_factory=dict)
    started: dict[str, list[int]] = field(default_factory=dict)


class _Hospitals(HospitalFederation):
    """Temporary files have a place of their own; what FLARE's shutdown leaves is looked at before it is killed."""

    left: Sequence[str] = ()

    def _environment(self, name: str) -> dict[str, str]:
        self.temporary.mkdir(exist_ok=True)
        own = {"TMPDIR": str(self.temporary), "NVFLARE_STREAMING_RETRY_TIMEOUT": KEPT_THREADS}
        return {**super()._environment(name), **own}

    @property
    def temporary(self) -> Path:
        return self.workspace / "temporary"

    def _shut_down(self) -> None:
        super()._shut_down()
        self.left = [_command(process) for process in self._members()]


def measure(rounds: int, hospitals: int, interval: float, progress: Callable[[str], None]) -> dict[str, Any]:
    """Run the job and look at it every ``interval`` seconds; no process is left.

    Args:
        rounds: of the job, at least 10.
        hospitals: 2 to 4.
        interval: seconds between two looks.

    Raises:
        MedPFLError: the federation does not start, or the job fails.
    """
    if rounds < 10 or not 2 <= hospitals <= 4 or interval <= 0:
        raise MedPFLError("soak takes at least 10 rounds, 2 to 4 hospitals and an interval above 0")
    seen = Seen()
    before = _own()
    with tempfile.TemporaryDirectory(prefix="medpfl-soak-") as scratch:
        folder = Path(scratch)
        sites = write_phantoms(folder / "sites")[:hospitals]
        project = find_bundle() / "poc" / "project.yml"
        with _Hospitals(project, folder / "sites", sites, workspace=folder / "federation") as federation:
            _run(federation, _job(rounds, hospitals, folder), seen, rounds, interval, progress)
        seen.left["processes"] = list(federation.left)
        seen.left["ports"] = [str(federation.port)] if _listening(federation.port) else []
        seen.left["temporary files"] = _names(federation.temporary)
        seen.left["unfinished files"] = _unfinished(federation)
    deadline = time.monotonic() + LAST_THREADS
    while _own()["threads"] > before["threads"] and time.monotonic() < deadline:
        time.sleep(0.5)
    seen.console = {what: max(0, count - before[what]) for what, count in _own().items()}
    return as_results(seen, rounds, hospitals, interval)


def _job(rounds: int, hospitals: int, folder: Path) -> Path:
    job = load_job(find_bundle() / "jobs" / "softpull_phantom")
    assert isinstance(job, Job)
    settings = replace(job.settings, rounds=rounds, finetune=1)
    job = replace(job, name=NAME, min_clients=hospitals, settings=settings, method=replace(job.method, steps=1))
    return write_job(job, folder / NAME)


def _run(
    federation: HospitalFederation, job: Path, seen: Seen, rounds: int, interval: float, progress: Callable[[str], None]
) -> None:
    """Look, submit, look until the job is over, and look once more."""
    _look(federation, "", 0, seen)
    job_id = federation.submit(job)
    lines = federation.run_folder("server", job_id) / "results" / LINES
    position, next_look, said = 0, 0.0, 0

    def tick() -> None:
        nonlocal position, next_look, said
        with contextlib.suppress(OSError):  # the server removes the folder when the job is over
            with lines.open(encoding="utf-8") as file:
                file.seek(position)
                text = file.read()
            whole = text.rfind("\n") + 1
            position += len(text[:whole].encode())
            seen.seconds += _round_seconds(text[:whole].splitlines())
        if time.monotonic() >= next_look:
            next_look = time.monotonic() + interval
            _look(federation, job_id, len(seen.seconds), seen)
        if len(seen.seconds) >= said + 25:
            said = len(seen.seconds)
            progress(f"round {said} of {rounds}")

    if warning := federation.follow(job_id, NAME, rounds * PER_ROUND, tick):
        progress(warning)
    time.sleep(interval)  # what belongs to the job is put away
    _look(federation, "", rounds, seen)


def _round_seconds(lines: Sequence[str]) -> Iterator[float]:
    for line in lines:
        found = json.loads(line)
        if found["split"] == "round":
            yield float(found["seconds"])


def _look(federation: HospitalFederation, job_id: str, number: int, seen: Seen) -> None:
    """One look at everything; without a job, at the daemons only."""
    members = [(process, _command(process)) for process in federation._members()]
    for name in ("server", *federation.sites):
        kit = federation.kit(name)
        for process, command in members:
            kind = "job" if job_id and job_id in command else "daemon" if "_train" in command else ""
            if kind and str(kit) in command:
                with contextlib.suppress(psutil.Error):
                    row = [float(number), *reading(process)]
                    seen.processes.setdefault(f"{name}: {kind}", []).append(row)
                    pids = seen.started.setdefault(f"{name}: {kind}", [])
                    pids += [process.pid] if process.pid not in pids else []
        if job_id and (state := kit / "medpfl" / NAME).is_dir():
            size, count = contents(state)
            run = contents(federation.run_folder(name, job_id))[0]
            seen.folders.setdefault(name, []).append([float(number), size, float(count), run])


def reading(process: psutil.Process) -> list[float]:
    """A process's row of ``COLUMNS`` after the first.

    Raises:
        psutil.Error: it has ended.
    """
    memory = process.memory_full_info()
    numbers = process.num_threads(), process.num_fds(), len(process.net_connections()), len(process.children())
    return [*(round(value / MB, 3) for value in (memory.rss, memory.uss, memory.pss)), *map(float, numbers)]


def contents(folder: Path) -> tuple[float, int]:
    """MB and number of the files below a folder."""
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(OSError):  # it is gone meanwhile
            if path.is_file():
                sizes.append(path.stat().st_size)
    return round(sum(sizes) / MB, 3), len(sizes)


def _own() -> dict[str, int]:
    return {"threads": threading.active_count(), "files": psutil.Process().num_fds()}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _names(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


def _unfinished(federation: HospitalFederation) -> list[str]:
    """Files that are written under another name first and were not renamed."""
    kits = [federation.kit(name) / "medpfl" for name in ("server", *federation.sites)]
    return sorted(str(path.relative_to(federation.workspace)) for kit in kits for path in kit.rglob("*.tmp*"))


# -- what is said of it -----------------------------------------------------------------------------------------------


def as_results(seen: Seen, rounds: int, hospitals: int, interval: float) -> dict[str, Any]:
    """For the JSON file."""
    return {
        "rounds": rounds,
        "hospitals": hospitals,
        "interval": interval,
        "columns": list(COLUMNS),
        "folder_columns": list(FOLDER_COLUMNS),
        "restarts": {name: len(pids) - 1 for name, pids in seen.started.items() if len(pids) > 1},
        "left": seen.left,
        "console": seen.console,
        "processes": seen.processes,
        "folders": seen.folders,
        "seconds": [round(value, 2) for value in seen.seconds],
    }


def slope(rows: Sequence[Sequence[float]], column: int, rounds: int) -> float:
    """Growth in 100 rounds: of the straight line (least squares) through what was seen after the warm-up and before
    the last round, after which models are tested and written; NaN where too little was seen."""
    points = np.array([(row[0], row[column]) for row in rows if WARM_UP * rounds <= row[0] < rounds])
    if len(points) < 2 or np.ptp(points[:, 0]) == 0:
        return float("nan")
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0] * 100)


def growth(results: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Whose (a job's process, "folders of ...") to what to its growth in 100 rounds."""
    rounds, found = int(results["rounds"]), {}
    for name, rows in results["processes"].items():
        if name.endswith(": job"):
            found[name] = {what: slope(rows, COLUMNS.index(what), rounds) for what in LIMITS}
    for name, rows in results["folders"].items():
        found[f"{name}: folders"] = {what: slope(rows, FOLDER_COLUMNS.index(what), rounds) for what in FOLDER_LIMITS}
    return found


def faults(results: Mapping[str, Any]) -> list[str]:
    """A sentence on everything that grew beyond its limit, was started again, or was left behind."""
    limits = {**LIMITS, **FOLDER_LIMITS}
    found = [
        f"{name}: {value:+.2f} {WORDS.get(what, what)} in 100 rounds, the limit is {limits[what]:g}"
        for name, grown in growth(results).items()
        for what, value in grown.items()
        if not value <= limits[what]
    ]
    found += [f"{name} was started again {count} times" for name, count in results["restarts"].items()]
    found += [f"{what} left: {', '.join(names)}" for what, names in results["left"].items() if names]
    more = results["console"]
    return found + [
        f"the process that opened the console has {more[what]} more {what}, the limit is {most}"
        for what, most in CONSOLE.items()
        if more[what] > most
    ]


def table_of(results: Mapping[str, Any]) -> str:
    """Markdown tables and the verdict."""
    rounds, grown = int(results["rounds"]), growth(results)
    jobs, daemons = [], []
    for name, rows in sorted(results["processes"].items()):
        at = {what: [row[COLUMNS.index(what)] for row in rows] for what in COLUMNS}
        counts = [f"{at[what][0]:.0f} / {at[what][-1]:.0f}" for what in ("threads", "files", "sockets", "children")]
        if name in grown:
            warm = [row for row in rows if row[0] >= WARM_UP * rounds]
            memory = [f"{each[0][COLUMNS.index('uss')]:.0f}" for each in (warm, warm[::-1])]
            peak = f"{max(at['rss']):.0f}"
            slopes = [_signed(grown[name][what]) for what in LIMITS]
            jobs.append([name.partition(":")[0], *memory, peak, *slopes])
        else:
            memory = [f"{at['uss'][0]:.0f}", f"{at['uss'][-1]:.0f}"]
            daemons.append([name.partition(":")[0], *memory, *counts])
    folders = [
        [
            name,
            *(f"{value:.2f}" for row in (rows[0], rows[-1]) for value in (row[1], row[3])),
            f"{rows[-1][2]:.0f}",
            *(_signed(grown[f"{name}: folders"][what]) for what in FOLDER_LIMITS),
        ]
        for name, rows in sorted(results["folders"].items())
    ]
    shown = ", ".join(f"{limit:g} {WORDS.get(what, what)}" for what, limit in {**LIMITS, **FOLDER_LIMITS}.items())
    seconds = np.array(results["seconds"])
    tenth = max(1, len(seconds) // 10)
    medians = [float(np.median(part)) for part in (seconds, seconds[:tenth], seconds[-tenth:])]
    wrong = faults(results)
    left = ", ".join(f"no {what}" for what, names in results["left"].items() if not names)
    more = results["console"]
    looks = max(len(rows) for rows in results["processes"].values())
    headings = ["process of the job at", "own memory after the warm-up, MB", "in the end", "resident, peak",
                "own memory, MB in 100 rounds", "threads", "open files", "sockets", "children"]  # fmt: skip
    of_daemon = ["daemon at", "own memory before the job, MB", "after it", "threads before / after", "open files",
                 "sockets", "children"]  # fmt: skip
    of_folder = ["folder at", "state at first, MB", "FLARE's run folder", "state in the end", "FLARE's run folder",
                 "files of state", "state, MB in 100 rounds", "FLARE's run folder", "files of state"]  # fmt: skip
    return "\n\n".join(
        [
            f"{rounds} rounds of {results['hospitals']} hospitals, {looks} looks. The median round "
            f"took {medians[0]:.2f} s, of the first tenth {medians[1]:.2f} s, of the last {medians[2]:.2f} s. "
            f"Limits in 100 rounds: {shown}.",
            markdown(headings, jobs),
            markdown(of_folder, folders),
            markdown(of_daemon, daemons),
            f"After the shutdown: {left or 'see below'}; in the process that opened the console {more['threads']} more "
            f"threads and {more['files']} more files.",
            "Nothing grew beyond its limit, and nothing was left." if not wrong else "\n".join(f"- {x}" for x in wrong),
        ]
    )


def _signed(value: float) -> str:
    return f"{round(value, 2) + 0.0:+.2f}"  # no minus before a zero


def draw(results: Mapping[str, Any], path: Path) -> None:
    """Memory, threads and files of the job's processes, and the folders, by round, as SVG."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    figure = Figure(figsize=(9.0, 5.4), layout="constrained")
    axes = figure.subplots(2, 2)
    panels = (("uss", "own memory, MB"), ("threads", "threads"), ("files", "open files"))
    for axis, (what, label) in zip(axes.flat, panels, strict=False):
        for name, rows in sorted(results["processes"].items()):
            if name.endswith(": job"):
                values = np.array(rows)
                axis.plot(values[:, 0], values[:, COLUMNS.index(what)], label=name.partition(":")[0], linewidth=1.4)
        axis.set_ylabel(label)
    for name, rows in sorted(results["folders"].items()):
        values = np.array(rows)
        axes[1, 1].plot(values[:, 0], values[:, 1], label=name, linewidth=1.4)
    axes[1, 1].set_ylabel("state on disk, MB")
    for axis in axes.flat:
        axis.axvspan(0, WARM_UP * results["rounds"], color="#000000", alpha=0.05, linewidth=0)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("round")
        axis.grid(alpha=0.25)
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    handles = axes[0, 0].get_legend_handles_labels()
    figure.legend(*handles, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    write_text(path, svg_text(figure))


def command(
    rounds: Annotated[int, typer.Option(help="Rounds of the job.")] = 300,
    hospitals: Annotated[int, typer.Option(help="Number of hospitals, 2 to 4.")] = 4,
    interval: Annotated[float, typer.Option(help="Seconds between two looks at the processes.")] = 3.0,
    out: OutOption = None,
) -> None:
    """Many rounds on provisioned hospitals: does memory, a thread, a file or a socket grow, and what is left behind.

    With --out, a picture beside the JSON file, too; exit code 1 if anything grew beyond its limit or was left."""
    facts = machine()
    results = measure(rounds, hospitals, interval, say)
    write_json(out, "soak", facts, results)
    if out is not None:
        draw(results, out.with_suffix(".svg"))
    say(table_of(results))
    raise typer.Exit(1 if faults(results) else 0)
