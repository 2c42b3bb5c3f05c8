# SPDX-License-Identifier: Apache-2.0
"""``benchmarks pfllib``: this package's in-process engine beside PFLlib's own code and beside the bare loop.

Same arrays, model, initial weights, batches and steps. First the weights after one round must be equal. Then the arms,
each a process of its own, take turns round by round, so that whatever else the machine does falls on all of them.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
import yaml
from numpy.typing import NDArray

from benchmarks.common import OutOption, environment, machine, markdown, write_json
from benchmarks.pfllib_arms import (
    BARE,
    CLASSES,
    CNN,
    LINEAR,
    OURS,
    SIDE,
    THEIRS,
    THEIRS_CACHED,
    Setting,
    write_for_pfllib,
)
from medpfl import store
from medpfl.cli.terminal import say
from medpfl.core.errors import MedPFLError

ARMS = (BARE, OURS, THEIRS_CACHED, THEIRS)
METHODS = ("FedAvg", "Ditto")
NETWORKS = {CNN: 1, LINEAR: 10}
"""Network to how many times as many rounds: those of the linear one, which show what a step costs besides its
computation, are short."""
TRAIN_ROWS = (1950, 1550, 1150, 800)  # of four hospitals; multiples of the batch size, because PFLlib drops the rest
TEST_ROWS = 400  # of all hospitals together, at least CLASSES each
BATCH_SIZE, LR, LAM, SEED = 10, 0.005, 1.0, 0  # PFLlib's own batch size and rate; its mu must not stay at 0
TOLERANCE = 1e-6
"""Largest absolute difference of any weight after one round."""
BARE_LIMIT = 1.1  # of the bare loop's time


def rows_of(hospitals: int) -> list[int]:
    """Training rows of every hospital: each of four is cut into equal ones, so that a round has the same steps.

    Raises:
        MedPFLError: they cannot be cut so.
    """
    parts, rest = divmod(hospitals, len(TRAIN_ROWS))
    if hospitals < 1 or rest or parts > min(TRAIN_ROWS) // BATCH_SIZE:
        most = len(TRAIN_ROWS) * (min(TRAIN_ROWS) // BATCH_SIZE)
        raise MedPFLError(f"--hospitals must be a multiple of {len(TRAIN_ROWS)} up to {most}, got {hospitals}")
    rows = []
    for whole in TRAIN_ROWS:
        batches, more = divmod(whole // BATCH_SIZE, parts)
        rows += [BATCH_SIZE * (batches + (part < more)) for part in range(parts)]
    return rows


def measure(
    pfllib: Path,
    rounds: int,
    repeats: int,
    progress: Callable[[str], None],
    hospitals: int = len(TRAIN_ROWS),
    networks: Sequence[str] = tuple(NETWORKS),
    methods: Sequence[str] = METHODS,
) -> dict[str, Any]:
    """Equality after one round, then seconds of every round of every arm.

    Args:
        pfllib: a checkout of PFLlib (it has ``system/flcore``).
        rounds: rounds of a run, >= 2; the first is not counted.
        repeats: how often the arms start anew.
        hospitals: how many share the same number of rows.
        networks: of ``NETWORKS``; ``methods``: of ``METHODS``.

    Raises:
        MedPFLError: there is no PFLlib, an arm failed, or the weights differ.
    """
    for name, value, least in (("rounds", rounds, 2), ("repeats", repeats, 1)):
        if value < least:
            raise MedPFLError(f"--{name} must be at least {least}, got {value}")
    if not (pfllib / "system" / "flcore").is_dir():
        raise MedPFLError(f"--pfllib: {pfllib} is no checkout of PFLlib: it has no folder system/flcore")
    if unknown := [network for network in networks if network not in NETWORKS]:
        raise MedPFLError(f"--network: expected {' or '.join(NETWORKS)}, got '{unknown[0]}'")
    if unknown := [method for method in methods if method not in METHODS]:
        raise MedPFLError(f"--method: expected {' or '.join(METHODS)}, got '{unknown[0]}'")
    rows = rows_of(hospitals)
    results: dict[str, Any] = {
        "pfllib": _commit(pfllib),
        "hospitals": hospitals,
        "steps_a_round": sum(rows) // BATCH_SIZE,
        "rounds": rounds,
        "repeats": repeats,
        "setting": {"train_rows": rows, "batch_size": BATCH_SIZE, "lr": LR, "lam": LAM, "seed": SEED},
        "tolerance": TOLERANCE,
        "bare_limit": BARE_LIMIT,
        "work": [],
    }
    with tempfile.TemporaryDirectory(prefix="medpfl-bench-") as scratch:
        folder = Path(scratch)
        _write_sites(folder, rows)
        path, given = str(pfllib.resolve()), str(folder)
        first = Setting(METHODS[0], CNN, 1, BATCH_SIZE, LR, LAM, SEED, path, given)
        write_for_pfllib(first)
        for network in networks:
            times = NETWORKS[network]
            for method in methods:
                setting = replace(first, method=method, architecture=network)
                differences = _differences(setting, folder)
                found = _timed(replace(setting, rounds=1 + (rounds - 1) * times), repeats, folder, progress)
                about = {"method": method, "network": network, "counted_rounds": repeats * (rounds - 1) * times}
                results["work"].append({**about, "differences": differences, **found})
    return results


def _commit(pfllib: Path) -> str | None:
    done = subprocess.run(["git", "-C", str(pfllib), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _write_sites(folder: Path, rows_each: Sequence[int]) -> None:
    """Ten classes of noisy 28 x 28 patterns at every hospital: the cost does not depend on what they show."""
    patterns = np.random.default_rng(SEED).uniform(0, 255, size=(CLASSES, SIDE, SIDE))
    tested, digits = max(CLASSES, TEST_ROWS // len(rows_each)), len(str(len(rows_each) - 1))
    for number, rows in enumerate(rows_each):
        rng = np.random.default_rng(1 + number)
        arrays: dict[str, NDArray[np.generic]] = {}
        for split, count in (("train", rows), ("test", tested)):
            labels = np.arange(count) % CLASSES
            noisy = 0.5 * patterns[labels] + 0.5 * rng.uniform(0, 255, size=(count, SIDE, SIDE))
            arrays |= {f"{split}_images": noisy.astype(np.uint8), f"{split}_labels": labels}
        site = f"site-{number:0{digits}d}"
        np.savez(folder / f"{site}.npz", **arrays)  # type: ignore[arg-type]
        dataset = {"kind": "arrays", "file": f"{site}.npz", "classes": {f"c{i}": [i] for i in range(CLASSES)}}
        text = yaml.safe_dump({"site": site, "datasets": {"digits": dataset}}, sort_keys=False)
        (folder / f"{site}.yaml").write_text(text, encoding="utf-8")


def _differences(setting: Setting, folder: Path) -> dict[str, float]:
    """Arm to the largest difference of any weight, common or personal, from the bare loop's after one round.

    Raises:
        MedPFLError: above the tolerance, with the arm and the entry: it is not the same computation.
    """
    _together((BARE, OURS, THEIRS), setting, folder)
    weights = {arm: store.read(_out(folder, arm).with_suffix(".safetensors"))[0] for arm in (BARE, OURS, THEIRS)}
    found = {}
    for arm in (OURS, THEIRS):
        if weights[arm].keys() != weights[BARE].keys():
            raise MedPFLError(f"{setting.method}: {arm} has other weights than the {BARE}")
        each = {key: float((value - weights[BARE][key]).abs().max()) for key, value in weights[arm].items()}
        worst = max(each, key=lambda key: each[key])
        if not each[worst] <= TOLERANCE:
            raise MedPFLError(
                f"{setting.method}: after one round '{worst}' of {arm} differs by {each[worst]:.2g} from the {BARE}'s, "
                f"expected at most {TOLERANCE:g}; the arms do not compute the same"
            )
        found[arm] = each[worst]
    return found


def _timed(setting: Setting, repeats: int, folder: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {arm: [] for arm in ARMS}
    for repeat in range(repeats):
        for arm, found in _together(ARMS, setting, folder).items():
            runs[arm].append(found)
        shown = ", ".join(f"{arm} {np.median(found[-1]['seconds'][1:]):.3f} s" for arm, found in runs.items())
        progress(f"{setting.method}, {setting.architecture}, {repeat + 1} of {repeats}: {shown}")
    traffic = json.loads((folder / "ours" / "results" / "bytes.json").read_text(encoding="utf-8"))
    return {
        "arms": {arm: _summary(found, runs[BARE]) for arm, found in runs.items()},
        "times_as_fast": {arm: _times_as_fast(runs[OURS], runs[arm]) for arm in (THEIRS, THEIRS_CACHED)},
        "bytes_a_round": max(line["encoded"] for line in traffic),
    }


def _summary(runs: list[dict[str, Any]], bare: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all counted rounds; the ratios are to the bare loop's turn of the same round."""
    wall, cpu = _counted(runs, "seconds"), _counted(runs, "cpu_seconds")
    return {
        "seconds": [[round(value, 4) for value in run["seconds"]] for run in runs],
        "cpu_seconds": [[round(value, 4) for value in run["cpu_seconds"]] for run in runs],
        "median_seconds": round(float(np.median(wall)), 4),
        "median_cpu_seconds": round(float(np.median(cpu)), 4),
        "ratio": round(float(np.median(wall / _counted(bare, "seconds"))), 4),
        "cpu_ratio": round(float(np.median(cpu / _counted(bare, "cpu_seconds"))), 4),
        "first_round_after": round(float(np.median([run["first"] for run in runs])), 2),
        "peak_mb": round(max(run["peak_mb"] for run in runs), 1),
    }


def _times_as_fast(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> float:
    """Median over the counted rounds of PFLlib's seconds through ours in the same round."""
    return round(float(np.median(_counted(theirs, "seconds") / _counted(ours, "seconds"))), 4)


def _counted(runs: list[dict[str, Any]], key: str) -> NDArray[np.float64]:
    return np.array([value for run in runs for value in run[key][1:]])


def _together(arms: Sequence[str], setting: Setting, folder: Path) -> dict[str, dict[str, Any]]:
    """Run the arms side by side, one thread each and only one at a time; another begins each round.

    Raises:
        MedPFLError: an arm failed, with the last line it wrote.
    """
    order = folder / "setting.json"
    order.write_text(json.dumps(asdict(setting)), encoding="utf-8")
    single = environment(OMP_NUM_THREADS="1")
    processes: dict[str, subprocess.Popen[str]] = {}

    def wait(arm: str, word: str) -> None:
        said = processes[arm].stdout
        if said is None or said.readline().strip() != word:
            lines = _log(folder, arm).read_text(encoding="utf-8", errors="replace").strip().splitlines()
            raise MedPFLError(f"{setting.method} with {arm} failed: {lines[-1] if lines else 'it said nothing'}")

    try:
        for arm in arms:
            command = [sys.executable, "-c", "from benchmarks.pfllib_arms import main; main()"]
            with open(_log(folder, arm), "w", encoding="utf-8") as log:
                processes[arm] = subprocess.Popen(
                    [*command, arm, str(order), str(_out(folder, arm))],
                    env=single, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                )  # fmt: skip
            wait(arm, "ready")
        for number in range(setting.rounds):
            first = number % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                given = processes[arm].stdin
                assert given is not None
                print("go", file=given, flush=True)
                wait(arm, "done")
        for arm, process in processes.items():
            if process.wait():
                wait(arm, "finished")  # tells why not
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return {arm: json.loads(_out(folder, arm).with_suffix(".json").read_text(encoding="utf-8")) for arm in arms}


def _out(folder: Path, arm: str) -> Path:
    return folder / f"out-{ARMS.index(arm)}"


def _log(folder: Path, arm: str) -> Path:
    return folder / f"log-{ARMS.index(arm)}.txt"


def table_of(results: dict[str, Any]) -> str:
    """A table a network and method, and whether the two targets are met."""
    parts = [
        f"{results['hospitals']} hospitals in one process, {results['steps_a_round']} steps a round of {BATCH_SIZE} "
        f"images."
    ]
    headings = ["", "s a round", "to the bare loop", "processor s a round", "to the bare loop", "round 1 done after, s"]
    for found in results["work"]:
        rows = [
            [
                arm,
                f"{arms['median_seconds']:.3f}",
                f"{arms['ratio']:.3f}",
                f"{arms['median_cpu_seconds']:.3f}",
                f"{arms['cpu_ratio']:.3f}",
                f"{arms['first_round_after']:.1f}",
                f"{arms['peak_mb']:.0f}",
            ]
            for arm, arms in found["arms"].items()
        ]
        equal = ", ".join(f"{arm} {value:.1e}" for arm, value in found["differences"].items())
        about = (
            f"{found['method']}, {found['network']}: medians of {found['counted_rounds']} rounds; "
            f"{found['bytes_a_round'] / 1e6:.2f} MB a hospital and direction; largest difference of any weight "
            f"from the bare loop's after round 1: {equal} ({results['tolerance']:g} allowed)."
        )
        table = markdown([*headings, "peak memory, MB"], rows)
        parts.append(f"{about}\n\n{table}\n\n{_verdict(found, results)}")
    return "\n\n".join(parts)


def _verdict(found: dict[str, Any], results: dict[str, Any]) -> str:
    ratio, limit, fast = found["arms"][OURS]["ratio"], results["bare_limit"], found["times_as_fast"]
    published, cached = (f"{_met(fast[arm] >= 1)} ({fast[arm]:.3f} times as fast; {_ahead(found, arm)})"
                         for arm in (THEIRS, THEIRS_CACHED))  # fmt: skip
    return (
        f"At most {limit} times the bare loop: {_met(ratio <= limit)} ({ratio:.3f}). At least as fast as PFLlib: "
        f"{published}; with its data in memory: {cached}."
    )


def _ahead(found: dict[str, Any], arm: str) -> str:
    ours, theirs = (_counted([{"seconds": run} for run in found["arms"][name]["seconds"]], "seconds")
                    for name in (OURS, arm))  # fmt: skip
    return f"faster in {(ours < theirs).sum()} of {len(ours)} rounds"


def _met(target: bool) -> str:
    return "met" if target else "missed"


def command(
    pfllib: Annotated[Path, typer.Option(help="Checkout of github.com/TsingZ0/PFLlib; it needs h5py installed.")],
    rounds: Annotated[int, typer.Option(help="Rounds of a run; the first is not counted.")] = 7,
    repeats: Annotated[int, typer.Option(help="How often the arms start anew; medians are reported.")] = 3,
    hospitals: Annotated[int, typer.Option(help="How many share the rows; a multiple of 4.")] = len(TRAIN_ROWS),
    network: Annotated[list[str] | None, typer.Option(help="Only this network of PFLlib's.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Only this method.")] = None,
    out: OutOption = None,
) -> None:
    """FedAvg and Ditto in process: this package's engine beside PFLlib's own code and the bare loop."""
    facts = machine()
    results = measure(pfllib, rounds, repeats, say, hospitals, tuple(network or NETWORKS), tuple(method or METHODS))
    write_json(out, "pfllib", facts, results)
    say(table_of(results))
