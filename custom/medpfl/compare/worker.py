# SPDX-License-Identifier: Apache-2.0
"""One run in a process of its own: ``python -m medpfl.compare.worker FOLDER``, with FOLDER/order.json.

The run works in ``<digest>.part`` and the folder gets its final name when everything is written: what is called
``<digest>`` is finished. A run that was killed goes on after its last finished round.
"""

import fcntl
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from medpfl.compare.plan import FEDAVG, FINE_TUNED, LOCAL, Entry, initial_weights, job_of, rebuild, split_digest
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.evaluate.deployed import load_deployed
from medpfl.evaluate.models import write_text
from medpfl.evaluate.predict import evaluate_on
from medpfl.evaluate.tables import read_summary
from medpfl.methods.base import Build
from medpfl.rounds.messages import number
from medpfl.rounds.simulate import simulate
from medpfl.sites.samples import SiteData
from medpfl.sites.site_file import load_site_file
from medpfl.tasks.base import Task

ORDER, RESULT, FAILURE = "order.json", "run.json", "failure.txt"
PROGRESS = "results/metrics.jsonl"


def work(folder: Path, run: Callable[[dict[str, Any], Path], dict[str, Any]]) -> None:
    """Do the run that ``folder``/order.json describes, and give the folder its final name.

    Args:
        run: does it, given the order and the folder; returns what run.json holds.

    Raises:
        MedPFLError: as the hospitals, the server and the fairness checks raise them.
    """
    with open(folder / ".lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a worker that outlived its parent is waited for
        if folder.exists():
            order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
            result = run(order, folder)
            shutil.rmtree(folder / "home" / "server", ignore_errors=True)
            for state in folder.glob("home/*/*/state"):
                shutil.rmtree(state)
            (folder / FAILURE).unlink(missing_ok=True)
            write_text(folder / RESULT, json.dumps(result, indent=1))
            final = folder.with_name(folder.name.removesuffix(".part"))
            shutil.rmtree(final, ignore_errors=True)
            os.replace(folder, final)


def run(order: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Train, choose by validation, test; returns what run.json holds."""
    entry, task = rebuild(order)
    files = {site: Path(path) for site, path in order["site_files"].items()}
    data = {site: task.load(load_site_file(path, site)) for site, path in files.items()}
    for site, found in data.items():
        if split_digest(found) != order["splits"][site]:
            raise ConfigError(f"{site}'s data or split changed while the comparison was running; start it again")
    roster = tuple(sorted(files))
    initial = initial_weights(entry, Build(task, data[roster[0]], roster, order["seed"]))
    job = job_of(entry, task, order["rounds"], order["seed"], order["finetune"], len(files))
    if not order["trained"]:
        simulate(job, files, folder / "results", folder / "home")
    return {
        "method": order["name"],
        "seed": order["seed"],
        "initial": initial,
        "rows": _rows(entry, task, folder, data),
        "bytes": _bytes(folder),
        "seconds": _seconds(folder),
        "mixing": _mixing(folder),
        "events": read_summary(folder / "results")["events"],
    }


def _rows(entry: Entry, task: Task, folder: Path, data: dict[str, SiteData]) -> dict[str, Any]:
    """One row a deployed model: its scores, its learning curve, calibration, and its test on every hospital's data."""
    summary = read_summary(folder / "results")
    rows: dict[str, Any] = {}
    for model in dict.fromkeys(line["model"] for line in summary["test"]):
        tested: dict[str, dict[str, Any]] = {}
        for line in summary["test"]:
            if line["model"] == model:
                tested.setdefault(line["choice"], {})[line["site"]] = line["metrics"]
        best = summary["best"].get(model)
        cross, calibration = {}, {}
        for site in data:
            deployed = load_deployed(folder / "home" / site / "compared" / "models" / f"{model}-best.safetensors")
            cross[site] = {
                other: number(evaluate_on(deployed, theirs, "test").metrics[task.score])
                for other, theirs in data.items()
            }
            found = deployed.meta.history.calibration if deployed.meta.history else None
            calibration[site] = {"ece": found.ece, "brier": found.brier} if found else None
        rows[_label(entry.name, model, summary["personalised"])] = {
            "model": model,
            "best_round": best["round"] if best else None,
            "best": tested.get("best", {}),
            "last": tested.get("last", {}),
            "curve": _curve(folder, model, task.score),
            "cross": cross,
            "calibration": calibration,
        }
    return rows


def _label(name: str, model: str, personalised: str) -> str:
    if name == FEDAVG:
        return FINE_TUNED if model == "fedavg_finetuned" else FEDAVG
    return name if name == LOCAL or model == personalised else f"{name} ({model})"


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / PROGRESS).read_text(encoding="utf-8").splitlines()]


def _curve(folder: Path, model: str, score: str) -> list[float]:
    """Mean validation score of the hospitals after each round."""
    found = {
        line["round"]: line["metrics"][score]
        for line in _lines(folder)
        if line["site"] == "mean" and line["split"] == "validation" and line["model"] == model
    }
    return [found[round_number] for round_number in sorted(found)]


def _bytes(folder: Path) -> dict[str, int]:
    """Bytes that one hospital is sent and sends in a round (the largest, where they differ)."""
    traffic = json.loads((folder / "results" / "bytes.json").read_text(encoding="utf-8"))
    return {
        way: max((line["encoded"] for line in traffic if line["direction"] == way), default=0)
        for way in ("to_site", "from_site")
    }


def _seconds(folder: Path) -> float:
    """Median seconds that one hospital worked in a round, without the first round where there are others."""
    lines = [line for line in _lines(folder) if line["split"] == "train"]
    last = max(line["round"] for line in lines)
    return float(np.median([line["seconds"] for line in lines if line["round"] > 1 or last == 1]))


def _mixing(folder: Path) -> dict[str, Any]:
    """The last round's matrix of every slot that has one."""
    with np.load(folder / "results" / "mixing.npz") as stored:
        names = sorted(name for name in stored.files if name != "roster")
        last = {name.rsplit("/", 1)[0]: name for name in names}
        return {slot: np.round(stored[name], 6).tolist() for slot, name in last.items()}


def main(folder: Path, run: Callable[[dict[str, Any], Path], dict[str, Any]] = run) -> int:
    """Exit code 1 and a sentence in failure.txt where the run could not be done."""
    try:
        work(folder, run)
    except MedPFLError as error:
        write_text(folder / FAILURE, str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
