# SPDX-License-Identifier: Apache-2.0
"""``benchmarks scale``: what rounds cost as hospitals, models and rounds grow.

Every point is measured in a process of its own, so that its peak memory is its own. Three kinds of points:

- ``server``: the real server's side (``Coordinator``) with hospitals that send back what they were sent, a little
  changed, as fast as memory allows. One hospital's message exists at a time, as in ``simulate``. Its time is the
  server's: taking answers, checking, mixing, checkpoint.
- ``simulate``: ``medpfl simulate`` of logistic regression on small tables, hospitals and server in one process.
- ``rounds``: the same with four hospitals and many rounds: time and memory at a third of the rounds and at the end.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
import yaml
from torch import Tensor

from benchmarks.common import OutOption, environment, machine, markdown, resident, write_json
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.core.mapped import release
from medpfl.core.mixers import Mean, MeanOfLatest, Mixer, NetworkProx, SoftPull, StatisticsDistance
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.softpull import SoftPull as SoftPulled
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.loop import Exchange, carry, training
from medpfl.rounds.memory import WANTED
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import FinishReply, InitReply, Reply, StatisticsReply, TrainReply, ValidateReply
from medpfl.rounds.protocol.requests import InitRequest, Request, StatisticsRequest, TrainRequest, ValidateRequest
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from medpfl.tasks.tabular import Tabular

ENTRIES = 20  # tensors of a model, equally large
PLENTY, NONE = "10000000", "0"  # MiB that models may take
MIXERS: Mapping[str, Mixer] = {
    "mean": Mean(),
    "SoftPull": SoftPull(lam=0.5),
    "FedAP": StatisticsDistance(),
    "CusFL": MeanOfLatest(uniform=True),
    "pFedNet": NetworkProx(tau=0.1, graph="complete"),
}
"""FedSM mixes by the mean and SoftPull, MH-pFLID its messengers by the mean."""


def measure(points: list[dict[str, Any]], folder: Path) -> dict[str, Any]:
    """Each point with its results; one that fails says the sentence it ended with."""
    found = []
    for point in points:
        arguments = {**point, "folder": str(folder)}
        command = [sys.executable, "-m", "benchmarks.scale", json.dumps(arguments)]
        memory = NONE if point["on_disk"] else PLENTY
        limits = environment(OMP_NUM_THREADS="1", **{WANTED: memory})
        done = subprocess.run(command, env=limits, capture_output=True, text=True, check=False)
        told = {"failed": done.stderr.strip()[-300:]} if done.returncode else json.loads(done.stdout.splitlines()[-1])
        found.append({**point, **told})
        say(str(found[-1]))
    return {"points": found, "slopes": _slopes(found)}


# -- in a process of its own ------------------------------------------------------------------------------------------


def _sites(folder: Path, hospitals: int, rows: int = 40) -> dict[str, Path]:
    """Hospitals with a small table each."""
    folder.mkdir(parents=True)
    files = {}
    for number in range(hospitals):
        site = f"hospital-{number:03d}"
        rng = np.random.default_rng(number)
        x = rng.normal(size=(rows, 3))
        labels = (x.sum(axis=1) > 0).astype(int)
        lines = [",".join([*(f"{v:.6f}" for v in row), str(label)]) for row, label in zip(x, labels, strict=True)]
        (folder / f"{site}.csv").write_text("\n".join(["a,b,c,sick", *lines]) + "\n")
        features = dict.fromkeys("abc", "number")
        label = {"column": "sick", "classes": {"no": [0], "yes": [1]}}
        table = {"kind": "table", "files": [f"{site}.csv"], "features": features, "label": label}
        files[site] = folder / f"{site}.yaml"
        files[site].write_text(yaml.safe_dump({"site": site, "datasets": {"blood": table}}))
    return files


def _job(rounds: int, mixer: Mixer, hidden: tuple[int, ...] = ()) -> Job:
    settings = Settings(rounds=rounds, references=(), finetune=0)
    return Job(
        "scale", 2, settings, {"model": mixer}, SoftPulled(lr=0.05, batch_size=8), Tabular("blood", hidden=hidden)
    )


class _Hospitals:
    """Hospitals that answer what they were sent, a little changed.

    Args:
        values: of their models.
        busy: seconds that all of them train in a round, side by side.
    """

    def __init__(self, first: InitReply, values: int, busy: float):
        self._first, self._size, self._busy = first, max(1, values // ENTRIES), busy
        self.seconds = 0.0
        """Their own time, which is not the server's."""

    def answer(self, number: int, message: Message[Request]) -> Message[Reply]:
        started = time.monotonic()
        if number == 0 and isinstance(message.header, TrainRequest):
            time.sleep(self._busy)
        reply = self._answer(number, message)
        self.seconds += time.monotonic() - started
        return reply

    def _answer(self, number: int, message: Message[Request]) -> Message[Reply]:
        asked = message.header
        if isinstance(asked, InitRequest):
            return Message(self._first, {"model": {f"model.{i}": torch.zeros(self._size) for i in range(ENTRIES)}})
        if isinstance(asked, StatisticsRequest):
            told = {"0.mean": torch.randn(8, dtype=torch.float64), "0.variance": torch.ones(8, dtype=torch.float64)}
            return Message(StatisticsReply(), {name: told for name in asked.names})
        if isinstance(asked, TrainRequest):
            sent: dict[str, Tensor] = {}
            for key, tensor in message.slots["model"].items():
                sent[key] = tensor + 0.001 * (number + 1)
                release([tensor])  # a network card would hold no more of it either
            reply = TrainReply(round=asked.round, metrics=(), loss={}, notes=(), seconds=0.0)
            return Message(reply, {"model": sent})
        return Message(
            ValidateReply(metrics=(), notes=())
            if isinstance(asked, ValidateRequest)
            else FinishReply(metrics=(), notes=())
        )


def _server(scratch: Path, hospitals: int, megabytes: float, rounds: int, mixer: str, busy: float) -> dict[str, Any]:
    job = _job(rounds, MIXERS[mixer])
    (file,) = _sites(scratch / "sites", 1).values()
    runner = SiteRunner("hospital-000", job.method, job.task, lambda: _site_file(file), scratch / "site")
    names = [f"hospital-{number:03d}" for number in range(hospitals)]
    coordinator = Coordinator(job, names, scratch / "home", scratch / "results")
    said = runner.handle(coordinator.init_messages()["hospital-000"]).header
    assert isinstance(said, InitReply)
    small = resident("VmHWM")
    played = _Hospitals(said, round(megabytes * 1e6 / 4), busy)
    ends: list[tuple[float, float]] = []
    turned: list[float] = []
    last = 0.0

    def deliver(exchange: Exchange) -> dict[str, Message[Reply]]:
        nonlocal last
        if isinstance(next(iter(exchange.messages.values())).header, TrainRequest | ValidateRequest):
            ends.append((time.monotonic(), played.seconds))
            turned.append(time.monotonic() - last)
        found = {}
        for number, (site, message) in enumerate(exchange.messages.items()):
            found[site] = coordinator.arrived(site, played.answer(number, message))
            release(tensor for state in message.slots.values() for tensor in state.values())  # as ``simulate`` does
        last = time.monotonic()
        return found

    carry(training(coordinator, test=False), deliver)
    spans = [(after[0] - before[0]) - (after[1] - before[1]) for before, after in itertools.pairwise(ends)]
    refused = [event.event for event in coordinator.record.events if "refused" in event.event]
    if refused:
        raise MedPFLError(refused[0])
    state = [path for path in (scratch / "home").rglob("*") if path.is_file()]
    return {
        "seconds_a_round": round(float(np.median(spans)), 4),
        "turn_s": round(float(np.median(turned[1:])), 4),
        "peak_mb": round(resident("VmHWM"), 1),
        "before_mb": round(small, 1),
        "state_mb": round(sum(path.stat().st_size for path in state) / 1e6, 1),
        "gb_per_second": round(hospitals * megabytes / 1e3 / float(np.median(spans)), 3),
        **_disk(scratch, min(1000.0, hospitals * megabytes)),
    }


def _site_file(file: Path) -> Any:
    from medpfl.data.site_file import load_site_file

    return load_site_file(file, "hospital-000")


def _disk(scratch: Path, megabytes: float) -> dict[str, float]:
    """What a plain write with one fsync, and a read after it, give in the same run."""
    block, file = os.urandom(1 << 20), scratch / "plain"
    count = max(1, round(megabytes))
    started = time.monotonic()
    with open(file, "wb") as out:
        for _ in range(count):
            out.write(block)
        os.fsync(out.fileno())
    wrote = time.monotonic()
    with open(file, "rb", buffering=0) as back:
        while back.read(1 << 20):
            pass
    read = time.monotonic()
    file.unlink()
    size = count * len(block) / 1e9
    return {"disk_write_gb_s": round(size / (wrote - started), 3), "disk_read_gb_s": round(size / (read - wrote), 3)}


def _simulate(scratch: Path, hospitals: int, rounds: int, hidden: int) -> dict[str, Any]:
    sites = _sites(scratch / "sites", hospitals)
    ends: list[float] = []
    memory: list[float] = []
    processor: list[float] = []

    def progress(coordinator: Coordinator) -> None:
        ends.append(time.monotonic())
        processor.append(time.process_time())
        memory.append(resident("VmRSS"))

    job = _job(rounds, MIXERS["SoftPull"], (hidden,) if hidden else ())
    simulate(job, sites, scratch / "results", scratch / "home", progress, test=False)
    spans = np.diff(ends)
    third = len(spans) // 3
    busy = np.diff(processor)
    return {
        "processor_s": round(float(np.median(busy)), 4),
        "processor_ms_in_100_rounds": round(1e5 * float(np.polyfit(np.arange(len(busy)), busy, 1)[0]), 2),
        "seconds_a_round": round(float(np.median(spans)), 4),
        "first_third_s": round(float(np.median(spans[:third])), 4),
        "last_third_s": round(float(np.median(spans[-third:])), 4),
        "rss_third_mb": round(memory[third], 1),
        "rss_end_mb": round(memory[-1], 1),
        "peak_mb": round(resident("VmHWM"), 1),
    }


def _point(point: dict[str, Any]) -> dict[str, Any]:
    scratch = Path(tempfile.mkdtemp(prefix="medpfl-scale-", dir=point["folder"]))
    try:
        if point["kind"] == "server":
            keys = ("hospitals", "megabytes", "rounds", "mixer", "busy")
            return _server(scratch, *(point[key] for key in keys))
        return _simulate(scratch, point["hospitals"], point["rounds"], point["hidden"])
    finally:
        shutil.rmtree(scratch)


# -- what is told -----------------------------------------------------------------------------------------------------


def _slopes(points: list[dict[str, Any]]) -> dict[str, float]:
    """Growth from the smallest to the largest point of a row, as the exponent of the size: 1 is proportional."""
    found = {}
    for name, kind, axis, fixed in (
        ("server, hospitals", "server", "hospitals", {"mixer": "SoftPull", "on_disk": False, "megabytes": 4.0}),
        ("server, model", "server", "megabytes", {"mixer": "SoftPull", "on_disk": True, "hospitals": 20}),
        ("simulate, hospitals", "simulate", "hospitals", {"on_disk": False, "hidden": 0}),
    ):
        row = [p for p in points if p["kind"] == kind and "failed" not in p and fixed.items() <= p.items()]
        row.sort(key=lambda p: p[axis])
        if len(row) > 1:
            ratio = np.log(row[-1][axis] / row[0][axis])
            found[name] = round(float(np.log(row[-1]["seconds_a_round"] / row[0]["seconds_a_round"]) / ratio), 3)
    return found


def table_of(results: dict[str, Any]) -> str:
    """A table for the server's points and one for the whole process's."""
    server, whole = [], []
    turned = any("turn_s" in p for p in results["points"])
    for p in results["points"]:
        place = "files" if p["on_disk"] else "memory"
        if "failed" in p:
            continue
        if p["kind"] == "server":
            limit = 1.5 * p["megabytes"] + 537 if p["on_disk"] else None
            verdict = "" if limit is None else f"{limit:.0f}: {'met' if p['peak_mb'] <= limit else 'missed'}"
            turn = [f"{p['turn_s']:.3f}" if "turn_s" in p else ""] if turned else []
            server.append(
                [p["mixer"], str(p["hospitals"]), f"{p['megabytes']:g}", place, f"{p['seconds_a_round']:.3f}", *turn,
                 f"{p['gb_per_second']:.2f}", f"{p['disk_write_gb_s']:.2f}", f"{p['peak_mb']:.0f}", verdict]
            )  # fmt: skip
        else:
            whole.append(
                [str(p["hospitals"]), str(p["rounds"]), str(p["hidden"]), place, f"{p['seconds_a_round']:.4f}",
                 f"{p['first_third_s']:.4f}", f"{p['last_third_s']:.4f}", f"{p['rss_third_mb']:.0f}",
                 f"{p['rss_end_mb']:.0f}", f"{p['peak_mb']:.0f}"]
            )  # fmt: skip
    slopes = "; ".join(f"{name}: {value:g}" for name, value in results["slopes"].items())
    more = ["s between answers and messages"] if turned else []
    table = "The server's own work in a round:\n\n" + markdown(
        ["mixing", "hospitals", "model, MB", "models lie in", "s a round", *more, "GB/s of models",
         "plain write, GB/s", "peak memory, MB", "1.5 models + 512 MiB"], server
    )  # fmt: skip
    if not whole:
        return table
    return (
        table
        + "\n\nA whole federation in one process (`simulate`):\n\n"
        + markdown(
            ["hospitals", "rounds", "hidden units", "models lie in", "s a round", "first third", "last third",
             "MB after a third", "MB at the end", "peak, MB"], whole
        )
        + f"\n\nExponent of the time's growth (1: proportional): {slopes}."
    )  # fmt: skip


def _server_point(
    hospitals: int,
    megabytes: float,
    on_disk: bool,
    mixer: str = "SoftPull",
    rounds: int = 3,
    busy: float = 0.0,
) -> dict[str, Any]:
    return {
        "kind": "server",
        "hospitals": hospitals,
        "megabytes": megabytes,
        "rounds": rounds,
        "mixer": mixer,
        "on_disk": on_disk,
        "busy": busy,
    }


def _points(large: bool) -> list[dict[str, Any]]:
    server = _server_point

    def whole(hospitals: int, rounds: int, hidden: int = 0, on_disk: bool = False) -> dict[str, Any]:
        return {"kind": "simulate", "hospitals": hospitals, "rounds": rounds, "hidden": hidden, "on_disk": on_disk}

    small = [
        *(server(hospitals, 4.0, False) for hospitals in (4, 20, 100, 200)),
        *(server(20, megabytes, True) for megabytes in (0.4, 4.0, 40.0)),
        server(20, 40.0, False),
        *(server(100, 4.0, False, mixer) for mixer in MIXERS if mixer != "SoftPull"),
        *(whole(hospitals, 6) for hospitals in (4, 20, 100, 200)),
        *(whole(hospitals, 4, 50_000, on_disk) for hospitals in (4, 20, 100) for on_disk in (False, True)),
        whole(4, 300),
    ]
    return [*small, server(20, 200.0, True, rounds=2), server(4, 1000.0, True, rounds=2)] if large else small


def command(
    folder: Annotated[Path, typer.Option(help="Folder on the disk that models are to lie on.")] = Path("/tmp"),
    large: Annotated[
        bool, typer.Option(help="Also 20 models of 200 MB and 4 of 1 GB, which take 12 GB of disk.")
    ] = False,
    few: Annotated[bool, typer.Option(help="Two small points only.")] = False,
    mixer: Annotated[
        list[str] | None,
        typer.Option(help=f"Only the server's work with this mixing, in files or --memory: {', '.join(MIXERS)}."),
    ] = None,
    hospitals: Annotated[int, typer.Option(help="With --mixer: hospitals.")] = 20,
    megabytes: Annotated[float, typer.Option(help="With --mixer: size of a model.")] = 200.0,
    memory: Annotated[bool, typer.Option("--memory", help="With --mixer: models lie in memory.")] = False,
    busy: Annotated[float, typer.Option(help="With --mixer: seconds that the hospitals train in a round.")] = 0.0,
    out: OutOption = None,
) -> None:
    """Time and memory against the number of hospitals, the size of models and the number of rounds."""
    facts = machine()
    if unknown := [name for name in mixer or () if name not in MIXERS]:
        raise MedPFLError(f"--mixer: expected {', '.join(MIXERS)}, got '{unknown[0]}'")
    points = _points(large)
    if mixer:
        points = [_server_point(hospitals, megabytes, not memory, name, 3, busy) for name in mixer]
    results = measure([points[4], points[12]] if few else points, folder)
    write_json(out, "scale", facts, results)
    say(table_of(results))


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_point(json.loads(sys.argv[1]))))
