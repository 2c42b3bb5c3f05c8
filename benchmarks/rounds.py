# SPDX-License-Identifier: Apache-2.0
"""``benchmarks rounds``: what a round costs without training, this package's controller beside FLARE's stock FedAvg.

Both jobs run one after the other on one POC federation, with a payload of one size. A round's time is the difference
of two time stamps in the server's log, so it holds everything: sending, receiving, mixing, checkpoint, log. Our rounds
also evaluate the mixed model at the hospital and keep its state on disk; both save the models at the server. The first
round counts as start-up, from the submission on. Bytes are those that FLARE itself counts in a hospital's job process.
"""

import contextlib
import itertools
import json
import re
import tempfile
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import psutil
import typer
import yaml

from benchmarks.common import OutOption, machine, markdown, resident, write_json
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError
from medpfl.flare.poc import Federation
from medpfl.job.names import CONTROLLER, EXECUTOR

OURS, STOCK = "medpfl", "stock FedAvg"
EMPTY = "benchmarks.empty.Empty"
TARGET = 0.1  # of the stock recipe's time
FEATURES = 10
ROWS = 60
JOB_TIMEOUT = 600.0  # seconds
_STAMP = r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}).* - "
# One line a round: ours when the round is mixed and saved, the stock one when the last hospital's result is in.
_ROUND_LINES = {
    OURS: re.compile(_STAMP + r"round \d+/\d+: mixed "),
    STOCK: re.compile(_STAMP + r"Aggregated (\d+)/\2 results"),
}


def measure(
    sites: int,
    rounds: int,
    values: int,
    progress: Callable[[str], None],
    layers: int = 1,
    alone: bool = False,
    slowest: float = 0.0,
) -> dict[str, Any]:
    """Seconds of each round of both jobs, and the medians without the first rounds.

    Args:
        sites: hospitals.
        rounds: rounds of each job; the first is left out.
        values: float32 values of the model, about (rounded to whole hidden units).
        layers: hidden layers of one width, among which our model's values are spread; the stock model is one array.
        alone: our job only, where the machine has no room for the stock one.
        slowest: seconds that one hospital of our job takes in every round, while the others wait.
    """
    for name, value, least in (
        ("sites", sites, 1),
        ("rounds", rounds, 3),
        ("values", values, 100),
        ("layers", layers, 1),
    ):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    names = [f"hospital-{index + 1}" for index in range(sites)]
    # Weights and biases of FEATURES -> hidden -> ... -> hidden -> 1, the width from the quadratic equation.
    inner, outer = layers - 1, layers + FEATURES + 1
    hidden = (
        (values - 1) / outer if inner == 0 else ((outer**2 + 4 * inner * (values - 1)) ** 0.5 - outer) / (2 * inner)
    )
    width = max(1, round(hidden))
    values = inner * width**2 + outer * width + 1
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        folder = Path(scratch)
        _write_sites(folder / "sites", names)
        jobs = {
            OURS: _our_job(folder / "empty_rounds", sites, rounds, [width] * layers, slowest),
        }
        if not alone:
            jobs[STOCK] = _stock_job(folder, sites, rounds, values)
        with Federation(folder / "sites", names, classes=[EMPTY]) as federation:
            found = {}
            for name, job in jobs.items():
                found[name] = timed(federation, job, name, rounds)
                progress(f"{name}: median {np.median(found[name]['seconds']):.3f} s a round")
    seconds = {name: each.pop("seconds") for name, each in found.items()}
    medians = {name: round(float(np.median(found)), 4) for name, found in seconds.items()}
    return {
        "sites": sites,
        "rounds": rounds,
        "layers": layers,
        "slowest": slowest,
        "payload_bytes": 4 * values,
        "seconds": seconds,
        "median_seconds": medians,
        "jobs": found,
        "ratio": None if alone else round(medians[OURS] / medians[STOCK], 4),
        "target": round(TARGET, 4),
    }


def _write_sites(folder: Path, names: list[str]) -> None:
    """A small generated table at every hospital."""
    folder.mkdir()
    for index, name in enumerate(names):
        rng = np.random.default_rng(index)
        columns = [*(f"x{i}" for i in range(FEATURES)), "y"]
        table = np.column_stack([rng.normal(size=(ROWS, FEATURES)).round(3), np.arange(ROWS) % 2])
        lines = [",".join(f"{cell:g}" for cell in row) for row in table]
        (folder / f"{name}.csv").write_text("\n".join([",".join(columns), *lines]) + "\n", encoding="utf-8")
        dataset = {
            "kind": "table",
            "files": [f"{name}.csv"],
            "features": dict.fromkeys(columns[:-1], "number"),
            "label": {"column": "y", "classes": {"no": [0], "yes": [1]}},
        }
        text = yaml.safe_dump({"site": name, "datasets": {"empty": dataset}}, sort_keys=False)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def _our_job(folder: Path, sites: int, rounds: int, hidden: list[int], slowest: float) -> Path:
    controller = {"path": CONTROLLER, "args": {"rounds": rounds, "references": [], "finetune": 0}}
    task = {"path": "medpfl.tasks.tabular.Tabular", "args": {"dataset": "empty", "hidden": hidden}}
    executor = {"path": EXECUTOR, "args": {"method": {"path": EMPTY, "args": {"slowest": slowest}}, "task": task}}
    files = {
        "meta.json": {
            "name": folder.name,
            "min_clients": sites,
            "resource_spec": {},
            "deploy_map": {"app": ["@ALL"]},
        },
        "app/config/config_fed_server.json": {
            "format_version": 2,
            "server": {"heart_beat_timeout": 600, "task_request_interval": 0.1},
            "workflows": [{"id": "controller", **controller}],
            "components": [{"id": "model", "path": "medpfl.core.mixers.SoftPull", "args": {"lam": 0.5}}],
        },
        "app/config/config_fed_client.json": {
            "format_version": 2,
            "executors": [{"tasks": ["*"], "executor": executor}],
            "components": [],
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    return folder


def _stock_job(folder: Path, sites: int, rounds: int, values: int) -> Path:
    from nvflare.app_common.np.recipes.fedavg import NumpyFedAvgRecipe

    start = folder / "stock.npy"  # in the job's JSON the server would read millions of numbers for minutes
    np.save(start, np.zeros(values, np.float32))
    recipe = NumpyFedAvgRecipe(
        name="stock_fedavg",
        initial_ckpt=str(start.resolve()),
        min_clients=sites,
        num_rounds=rounds,
        train_script=str(Path(__file__).with_name("stock_client.py")),
    )
    recipe.export(str(folder / "stock"))
    return folder / "stock" / "stock_fedavg"


def timed(federation: Federation, job: Path, name: str, rounds: int) -> dict[str, Any]:
    """One job: seconds of rounds 2 to n (the distances of the rounds' lines in the server's log, read while it is
    there), of the start and of the whole, peak memory of its processes, and bytes.

    Raises:
        MedPFLError: the job failed or took too long.
    """
    text, peaks = "", dict.fromkeys(("server", *federation.sites), 0.0)
    used: list[tuple[int, dict[str, float]]] = []  # rounds that were over, and seconds of each party's processes
    submitted, started = datetime.now(), time.monotonic()
    job_id = federation.submit(job)
    log = federation.run_folder("server", job_id) / "log.txt"

    def look() -> None:
        nonlocal text
        if log.is_file():
            text = log.read_text(encoding="utf-8", errors="replace")
        over = sum(_ROUND_LINES[name].match(line) is not None for line in text.splitlines())
        seconds: dict[str, float] = {}
        for site, processes in federation.job_processes(job_id).items():
            for process in processes:
                with contextlib.suppress(OSError, psutil.NoSuchProcess):  # it has ended meanwhile
                    peaks[site] = max(peaks[site], resident("VmHWM", process))
                    spent = psutil.Process(process).cpu_times()
                    seconds[site] = seconds.get(site, 0.0) + spent.user + spent.system
        if 0 < over < rounds and len(seconds) == len(peaks):
            used.append((over, seconds))

    federation.follow(job_id, f"the job of {name}", JOB_TIMEOUT, look)
    whole = time.monotonic() - started
    stamps = [found[1] for line in text.splitlines() if (found := _ROUND_LINES[name].match(line))]
    if len(stamps) != rounds:
        raise MedPFLError(f"the server's log of {name} tells of {len(stamps)} rounds, expected {rounds}")
    times = [datetime.strptime(stamp, "%Y-%m-%d %H:%M:%S,%f") for stamp in stamps]
    moved = [_moved(federation.run_folder(site, job_id)) for site in federation.sites]
    return {
        "seconds": [round((after - before).total_seconds(), 3) for before, after in itertools.pairwise(times)],
        "start_seconds": round((times[0] - submitted).total_seconds(), 2),
        "job_seconds": round(whole, 2),
        "processor_s_a_round": _processor(used),
        "peak_mb": {site: round(peak, 1) for site, peak in peaks.items()},
        "mb_a_round": {way: round(max(each[way] for each in moved) / rounds, 3) for way in moved[0]},
    }


def _processor(used: list[tuple[int, dict[str, float]]]) -> dict[str, float]:
    """Processor seconds of a round at the server and, on average, at a hospital, between the first look and the last;
    empty where the rounds were over between two looks."""
    if len(used) < 2 or used[0][0] == used[-1][0]:
        return {}
    (before, first), (after, last) = used[0], used[-1]
    each = {site: (last[site] - first[site]) / (after - before) for site in first}
    server = each.pop("server")
    return {"server": round(server, 4), "hospital": round(sum(each.values()) / len(each), 4)}


def _moved(run_folder: Path) -> dict[str, float]:
    """MB that a hospital's job process sent and received, by FLARE's own statistics, which it leaves at its end."""
    pools = json.loads((run_folder / "stats_pool_summary.json").read_text(encoding="utf-8"))
    found = {}
    for way in ("sent", "received"):
        kinds = pools[f"{way}_msg_sizes"]["pool"]["cat_data"].values()
        found[way] = sum(size["total"] for sizes in kinds for size in sizes if size) * 1024**2 / 1e6
    return found


def table_of(results: dict[str, Any]) -> str:
    """Medians, ranges and the ratio against the target."""
    rows = []
    for name, seconds in results["seconds"].items():
        rows.append(
            [
                name,
                f"{results['median_seconds'][name]:.3f}",
                f"{min(seconds):.3f} to {max(seconds):.3f}",
                str(len(seconds)),
            ]
        )
    told = all(job.get("processor_s_a_round") for job in results["jobs"].values())
    computing = ("server", "hospital") if told else ()
    costs = [
        [
            name,
            f"{job['start_seconds']:.1f}",
            f"{job['job_seconds']:.1f}",
            f"{job['peak_mb']['server']:.0f}",
            f"{max(peak for site, peak in job['peak_mb'].items() if site != 'server'):.0f}",
            *(f"{job['processor_s_a_round'][who]:.3f}" for who in computing),
            f"{job['mb_a_round']['sent']:.2f}",
            f"{job['mb_a_round']['received']:.2f}",
        ]
        for name, job in results["jobs"].items()
    ]
    verdict = ""
    if (ratio := results["ratio"]) is not None:
        met = "met" if ratio <= results["target"] else "missed"
        target = f"target: at most one tenth ({results['target']:.3f})"
        verdict = f"\n\nRatio: {ratio:.3f} (1 to {1 / ratio:.1f}); {target}: {met}."
    return (
        f"{results['sites']} hospitals (POC, one machine), payload {results['payload_bytes'] / 1e6:.2f} MB a hospital "
        "and direction, no training:\n\n"
        + markdown(["controller", "seconds a round (median)", "range", "rounds"], rows)
        + "\n\n"
        + markdown(
            [
                "controller",
                "submitted to end of round 1, s",
                "whole job, s",
                "server's peak, MB",
                "a hospital's peak, MB",
                *(f"processor s a round, {who}" for who in computing),
                "a hospital sends, MB a round",
                "receives",
            ],
            costs,
        )
        + verdict
    )


def command(
    sites: Annotated[int, typer.Option(help="Number of hospitals.")] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds of each job; the first is not counted.")] = 15,
    values: Annotated[int, typer.Option(help="float32 values of the model, about.")] = 100_000,
    layers: Annotated[int, typer.Option(help="Hidden layers of our model, all of one width.")] = 1,
    alone: Annotated[bool, typer.Option("--alone", help="Only our job: the stock one takes too much memory.")] = False,
    slowest: Annotated[float, typer.Option(help="Seconds that one hospital of our job takes in a round.")] = 0.0,
    out: OutOption = None,
) -> None:
    """A round without training in POC: this package's controller beside FLARE's stock FedAvg recipe."""
    facts = machine()
    results = measure(sites, rounds, values, say, layers, alone, slowest)
    write_json(out, "rounds", facts, results)
    say(table_of(results))
