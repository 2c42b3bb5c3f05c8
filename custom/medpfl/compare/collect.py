# SPDX-License-Identifier: Apache-2.0
"""results.json: everything that the tables, the report and a later reader need, from the runs that are finished."""

import dataclasses
import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import medpfl
from medpfl.compare.plan import FEDAVG, FINE_TUNED, LOCAL, Plan, Run
from medpfl.compare.runner import finished, read_run
from medpfl.compare.statistics import paired_gain, smallest_p
from medpfl.component import build
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.evaluate.models import write_text
from medpfl.tasks.base import Task

RESULTS = "results.json"


def collect(plan: Plan, results: Path, failures: dict[str, str]) -> dict[str, Any]:
    """Gather the finished runs and write results.json.

    Raises:
        ConfigError: runs of one seed did not start from the same weights.
        MedPFLError: no run is finished, or a file cannot be read or written.
    """
    found = [_named(read_run(results, run), run) for run in plan.runs if finished(results, run)]
    if not found:
        raise MedPFLError(f"no run of comparison '{plan.file.name}' is finished; there is nothing to compare")
    check_initial_weights(found)
    score = _score_of(plan)
    rows = _rows(found, plan, score)
    target = plan.file.target
    local = rows.get(LOCAL)
    if target is None and local and local["curves"]:
        target = float(np.mean([max(curve) for curve in local["curves"]]))
    content = {
        "comparison": plan.file.name,
        "file": plan.file.model_dump(mode="json", exclude_none=True),
        "score": score,
        "hospitals": list(plan.sizes),
        "sizes": plan.sizes,
        "splits": plan.splits,
        "labels": plan.labels,
        "seeds": plan.file.seeds,
        "versions": {
            "medpfl": medpfl.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
        "test": "two-sided exact sign-flip permutation test, paired by seed",
        "smallest_p": smallest_p(len(plan.file.seeds)),
        "target": target,
        "rows": [_summary(name, row, local, target, plan) for name, row in rows.items()],
        "failures": [
            {"method": run.name, "seed": run.seed, "reason": failures.get(run.digest, "not done")}
            for run in plan.runs
            if not finished(results, run)
        ],
        "runs": [{key: run[key] for key in ("method", "seed", "digest", "initial", "events")} for run in found],
    }
    write_text(results / RESULTS, json.dumps(content, indent=1))
    return content


def _named(found: dict[str, Any], run: Run) -> dict[str, Any]:
    """A run under this plan's name for its method: the same may have been run under another one."""
    rows = {label.replace(found["method"], run.name, 1): row for label, row in found["rows"].items()}
    return {**found, "method": run.name, "rows": rows, "digest": run.digest}


def _score_of(plan: Plan) -> str:
    return str(build(plan.file.task.model_dump(), Task, "task").score)


def check_initial_weights(runs: Sequence[dict[str, Any]]) -> None:
    """Refuse a comparison whose methods started from different weights.

    Raises:
        ConfigError: naming the seed and the two methods.
    """
    first: dict[int, dict[str, Any]] = {}
    for run in runs:
        other = first.setdefault(run["seed"], run)
        if run["initial"]["digest"] != other["initial"]["digest"]:
            raise ConfigError(
                f"unfair: with seed {run['seed']}, {run['method']} started from other initial weights than "
                f"{other['method']}"
            )


def _rows(runs: list[dict[str, Any]], plan: Plan, score: str) -> dict[str, dict[str, Any]]:
    """Label to what its runs gave, seed by seed."""
    rows: dict[str, dict[str, Any]] = {}
    for run in runs:
        for label, found in run["rows"].items():
            row = rows.setdefault(label, {"method": run["method"], "seeds": [], "runs": [], "curves": [], "scores": {}})
            row["seeds"].append(run["seed"])
            row["runs"].append((run, found))
            if found["curve"]:
                row["curves"].append(found["curve"])
            for choice in ("best", "last"):
                values = [found[choice].get(site, {}).get(score) for site in plan.sizes]
                row["scores"].setdefault(choice, []).append([np.nan if v is None else v for v in values])
    order = [LOCAL, FEDAVG, FINE_TUNED]
    return {name: rows[name] for name in [*(n for n in order if n in rows), *(n for n in rows if n not in order)]}


def _summary(
    name: str, row: dict[str, Any], local: dict[str, Any] | None, target: float | None, plan: Plan
) -> dict[str, Any]:
    """One row of the leaderboard with all that belongs to it."""
    sites = list(plan.sizes)
    best, last = np.array(row["scores"]["best"]), np.array(row["scores"]["last"])
    hospitals: dict[str, dict[str, Any]] = {
        site: {"best": _stat(best[:, k]), "last": _stat(last[:, k]), "gain": None} for k, site in enumerate(sites)
    }
    gain = None
    if local is not None and name != LOCAL:
        shared = [seed for seed in row["seeds"] if seed in local["seeds"]]
        mine = best[[row["seeds"].index(seed) for seed in shared]]
        alone = np.array(local["scores"]["best"])[[local["seeds"].index(seed) for seed in shared]]
        gain = _gain(mine.mean(axis=1), alone.mean(axis=1))
        for k, site in enumerate(sites):
            hospitals[site]["gain"] = _gain(mine[:, k], alone[:, k])
    means = {site: hospitals[site]["best"]["mean"] for site in sites if hospitals[site]["best"]["mean"] is not None}
    worst = min(means, key=lambda site: means[site]) if means else None
    runs = [run for run, _ in row["runs"]]
    found = [part for _, part in row["runs"]]
    entry = next(entry for entry in plan.entries if entry.name == row["method"])
    traffic = sum(runs[0]["bytes"].values())
    return {
        "name": name,
        "method": repr(entry.method),
        "slots": {slot: repr(mixer) for slot, mixer in entry.mixers.items()},
        "own_networks": runs[0]["initial"]["own"],
        "seeds": row["seeds"],
        "best": _stat(best.mean(axis=1)),
        "last": _stat(last.mean(axis=1)),
        "best_rounds": [part["best_round"] for part in found],
        "metrics": _metrics(found, sites),
        "gain": gain,
        "hospitals": hospitals,
        "worst": {"hospital": worst, "score": means[worst]} if worst else None,
        "curve": np.round(np.mean(row["curves"], axis=0), 6).tolist() if row["curves"] else [],
        "curves": row["curves"],
        "bytes": runs[0]["bytes"],
        "seconds": _stat(np.array([run["seconds"] for run in runs])),
        "reach": _reach(row["curves"], target, traffic),
        "cross": _cross(found, sites),
        "calibration": _calibration(found, sites),
        "mixing": {"seed": runs[0]["seed"], "slots": runs[0]["mixing"]},
    }


def _stat(values: np.ndarray) -> dict[str, Any]:
    """Mean and sample deviation over the seeds; None where a value is missing."""
    known = [None if np.isnan(value) else round(float(value), 6) for value in values]
    whole = np.array([value for value in known if value is not None])
    return {
        "mean": float(whole.mean()) if len(whole) == len(known) else None,
        "sd": float(whole.std(ddof=1)) if len(whole) == len(known) > 1 else None,
        "values": known,
    }


def _metrics(found: list[dict[str, Any]], sites: list[str]) -> dict[str, Any]:
    """Every metric of the best round's test, mean of the hospitals."""
    names = sorted({name for part in found for tested in part["best"].values() for name in tested})
    values = {
        name: np.array([[part["best"].get(site, {}).get(name) for site in sites] for part in found], dtype=float)
        for name in names
    }
    return {name: _stat(value.mean(axis=1)) for name, value in values.items()}


def _gain(scores: np.ndarray, reference: np.ndarray) -> dict[str, Any] | None:
    if not (np.isfinite(scores) & np.isfinite(reference)).any():
        return None
    return dataclasses.asdict(paired_gain(scores.tolist(), reference.tolist()))


def _reach(curves: list[list[float]], target: float | None, traffic: int) -> dict[str, Any] | None:
    """First round whose mean validation score is at least ``target``: median over the seeds that reached it."""
    if target is None or not curves:
        return None
    rounds = [next((i for i, value in enumerate(curve, 1) if value >= target - 1e-9), None) for curve in curves]
    reached = [value for value in rounds if value is not None]
    median = float(np.median(reached)) if reached else None
    return {
        "rounds": rounds,
        "median_round": median,
        "reached": len(reached),
        "bytes_per_hospital": None if median is None else round(median * traffic),
    }


def _cross(found: list[dict[str, Any]], sites: list[str]) -> list[list[float | None]]:
    """Row: whose model; column: whose test data; mean over the seeds."""
    values = np.array([[[part["cross"][a][b] for b in sites] for a in sites] for part in found], dtype=float)
    mean = values.mean(axis=0)
    return [[None if np.isnan(value) else round(float(value), 6) for value in line] for line in mean]


def _calibration(found: list[dict[str, Any]], sites: list[str]) -> dict[str, Any] | None:
    """Expected calibration error and Brier score by hospital, mean over the seeds; None where it is not defined."""
    if any(part["calibration"][site] is None for part in found for site in sites):
        return None
    return {
        site: {kind: float(np.mean([part["calibration"][site][kind] for part in found])) for kind in ("ece", "brier")}
        for site in sites
    }
