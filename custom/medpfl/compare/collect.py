# SPDX-License-Identifier: Apache-2.0
"""results.json: everything that the tables, the report and a later reader need, from the runs that are finished."""

import dataclasses
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

import medpfl
from medpfl.compare.entries import Entry
from medpfl.compare.file import FEDAVG, FINE_TUNED, LOCAL, POOLED, swept_name
from medpfl.compare.plan import Plan
from medpfl.compare.runner import finished, read_run
from medpfl.compare.runs import Run
from medpfl.compare.statistics import paired_gain, smallest_p
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.deployed.evaluate import write_text
from medpfl.deployed.network import QUANTILES
from medpfl.results.compact import compact
from medpfl.rounds.messages import digest_of

RESULTS = "results.json"
Pair = tuple[int | None, int]
"""Split and seed: methods are compared under the same one."""


def collect(plan: Plan, results: Path, failures: dict[str, str]) -> dict[str, Any]:
    """Gather the finished runs and write results.json.

    Raises:
        ConfigError: runs of one seed did not start from the same weights.
        MedPFLError: no run is finished, or a file cannot be read or written.
    """
    everything = [(run, _named(read_run(results, run), run)) for run in plan.runs if finished(results, run)]
    found = [(run, each) for run, each in everything if run.without is None]
    if not found:
        raise MedPFLError(f"no run of comparison '{plan.file.name}' is finished; there is nothing to compare")
    check_initial_weights([each for _, each in everything])
    score = plan.task.score
    rows = _rows(found, plan, score)
    target = plan.file.target
    local = rows.get(LOCAL)
    if target is None and local and local["curves"]:
        target = float(np.mean([max(curve) for curve in local["curves"]]))
    pairs = len(plan.file.seeds) * len(plan.splits)
    content = {
        "comparison": plan.file.name,
        "file": plan.file.model_dump(mode="json", exclude_none=True),
        "score": score,
        "hospitals": plan.hospitals,
        "splits": [dataclasses.asdict(split) for split in plan.splits],
        "seeds": plan.file.seeds,
        "pairs": pairs,
        "versions": {
            "medpfl": medpfl.__version__,
            "torch": str(torch.__version__),
            "python": platform.python_version(),
            "machine": platform.machine(),
        },
        "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
        "test": f"two-sided exact sign-flip permutation test, paired by {paired_by(plan)}",
        "smallest_p": smallest_p(pairs),
        "target": target,
        "tuning": plan.found or None,
        "rows": [_summary(name, row, local, target, plan) for name, row in rows.items()],
        "sweeps": _sweeps(plan),
        "unseen": _unseen([each for run, each in everything if run.without], plan),
        "failures": _failures(plan, results, failures),
        "runs": [
            {key: each.get(key) for key in ("method", "split", "seed", "without", "digest", "initial", "events")}
            for _, each in everything
        ],
    }
    write_text(results / RESULTS, compact(content))
    return content


def _sweeps(plan: Plan) -> list[dict[str, Any]]:
    """Every sweep's method, argument and points: the value, and the name under which it is compared."""
    return [
        {
            "method": name,
            "argument": argument,
            "points": [{"value": value, "name": swept_name(name, argument, value)} for value in values],
        }
        for name, entry in plan.file.methods.items()
        for argument, values in entry.sweep.items()
    ]


def paired_by(plan: Plan) -> str:
    return "split and seed" if len(plan.splits) > 1 else "seed"


def _failures(plan: Plan, results: Path, failures: dict[str, str]) -> list[dict[str, Any]]:
    """What is missing: runs, and methods for which nothing could be chosen."""
    missing = [run for run in plan.runs if not finished(results, run)]
    for search, found in zip(plan.searches, plan.found, strict=True):
        if found["chosen"] is None:
            open_runs = [run for runs in search.runs for run in runs if not finished(results, run)]
            missing += open_runs
            if not open_runs:
                missing.append(search.runs[0][0])
                failures = {**failures, search.runs[0][0].digest: "no candidate of its search could be trained"}
    return [{"run": run.title, "reason": failures.get(run.digest, "not done")} for run in missing]


def _named(found: dict[str, Any], run: Run) -> dict[str, Any]:
    """A run under this plan's names: the same may have been run as another method's, or with a split's other name."""
    rows = {label.replace(found["method"], run.name, 1): row for label, row in found["rows"].items()}
    return {**found, "method": run.name, "split": run.split, "rows": rows, "digest": run.digest}


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


def _rows(found: list[tuple[Run, dict[str, Any]]], plan: Plan, score: str) -> dict[str, dict[str, Any]]:
    """Label to what its runs gave, one entry a split and seed."""
    rows: dict[str, dict[str, Any]] = {}
    for run, each in found:
        for label, part in each["rows"].items():
            row = rows.setdefault(label, {"pairs": [], "runs": [], "curves": [], "scores": {}})
            row["pairs"].append((run.split, run.seed))
            row["runs"].append((run, each, part))
            if part["curve"]:
                row["curves"].append(part["curve"])
            for choice in ("best", "last"):
                values = [part[choice].get(site, {}).get(score) for site in plan.hospitals]
                row["scores"].setdefault(choice, []).append([np.nan if v is None else v for v in values])
    return {name: rows[name] for name in in_order(rows)}


def in_order(labels: Iterable[str]) -> list[str]:
    """References first."""
    labels = list(labels)
    order = [LOCAL, FEDAVG, FINE_TUNED, POOLED]
    return [*(name for name in order if name in labels), *(name for name in labels if name not in order)]


def _summary(
    name: str, row: dict[str, Any], local: dict[str, Any] | None, target: float | None, plan: Plan
) -> dict[str, Any]:
    """One row of the leaderboard with all that belongs to it."""
    sites = plan.hospitals
    best, last = np.array(row["scores"]["best"]), np.array(row["scores"]["last"])
    hospitals: dict[str, dict[str, Any]] = {
        site: {"best": _stat(best[:, k]), "last": _stat(last[:, k]), "gain": None} for k, site in enumerate(sites)
    }
    gain = None
    if local is not None and name != LOCAL:
        shared = [pair for pair in row["pairs"] if pair in local["pairs"]]
        mine = best[[row["pairs"].index(pair) for pair in shared]]
        alone = np.array(local["scores"]["best"])[[local["pairs"].index(pair) for pair in shared]]
        gain = _gain(mine.mean(axis=1), alone.mean(axis=1))
        for k, site in enumerate(sites):
            hospitals[site]["gain"] = _gain(mine[:, k], alone[:, k])
    means = {site: hospitals[site]["best"]["mean"] for site in sites if hospitals[site]["best"]["mean"] is not None}
    worst = min(means, key=lambda site: means[site]) if means else None
    runs = [each for _, each, _ in row["runs"]]
    found = [part for _, _, part in row["runs"]]
    seconds = _stat(np.array([run["seconds"] for run in runs]))
    made = {digest_of(run.entry.spec()): run.entry for run, _, _ in row["runs"]}
    return {
        "name": name,
        "made": [_how(entry) for entry in made.values()],
        "own_networks": runs[0]["initial"]["own"],
        "pairs": row["pairs"],
        "best": _stat(best.mean(axis=1)),
        "last": _stat(last.mean(axis=1)),
        "best_rounds": [part["best_round"] for part in found],
        "metrics": _metrics(found, sites, "best"),
        "together": _metrics(found, sites, "together"),
        "gain": gain,
        "hospitals": hospitals,
        "worst": {"hospital": worst, "score": means[worst]} if worst else None,
        "curve": np.round(np.mean(row["curves"], axis=0), 6).tolist() if row["curves"] else [],
        "curves": row["curves"],
        "bytes": runs[0]["bytes"],
        "ratio": runs[0].get("ratio"),
        "sdwd": _differences([run["sdwd"] for run in runs]),
        "seconds": seconds,
        "reach": _reach(row["curves"], target, sum(runs[0]["bytes"].values()), seconds["mean"]),
        "cross": _cross(found, sites),
        "calibration": _calibration(found, sites),
        "selection": _selection(found, sites),
        "mixing": {"split": runs[0]["split"], "seed": runs[0]["seed"], "slots": runs[0]["mixing"]},
    }


def _differences(found: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Slot to the mean over the runs of each quantile of the SDWD.

    A run whose hospitals end with one model does not name the slot: nothing differs there.
    """
    same = [0.0] * len(QUANTILES)
    slots = sorted({slot for each in found for slot in each})
    return {slot: np.mean([each.get(slot, same) for each in found], axis=0).tolist() for slot in slots}


def _how(entry: Entry) -> dict[str, Any]:
    codecs = {"codecs": repr(entry.codecs)} if entry.codecs else {}
    return {
        "method": repr(entry.method), "slots": {slot: repr(mixer) for slot, mixer in entry.mixers.items()}, **codecs
    }  # fmt: skip


def _unseen(found: list[dict[str, Any]], plan: Plan) -> list[dict[str, Any]]:
    """What the others' models reach at a hospital that took no part, by label; empty where none was left out."""
    scores: dict[str, dict[str, dict[Pair, float | None]]] = {}
    for each in found:
        for label, row in each["rows"].items():
            place = scores.setdefault(label, {}).setdefault(each["without"], {})
            place[each["split"], each["seed"]] = row["score"]
    rows = []
    for label in in_order(scores):
        sites = scores[label]
        table = {
            site: _stat(np.array([np.nan if v is None else v for v in values.values()]))
            for site, values in sites.items()
        }
        whole = [pair for pair in sites[next(iter(sites))] if all(pair in values for values in sites.values())]
        means = [np.mean([np.nan if (v := sites[site][pair]) is None else v for site in sites]) for pair in whole]
        complete = len(sites) == len(plan.hospitals) and means
        rows.append({"name": label, "mean": _stat(np.array(means)) if complete else None, "hospitals": table})
    return rows


def _stat(values: np.ndarray) -> dict[str, Any]:
    """Mean and sample deviation over the seeds; None where a value is missing."""
    known = [None if np.isnan(value) else round(float(value), 6) for value in values]
    whole = np.array([value for value in known if value is not None])
    return {
        "mean": float(whole.mean()) if len(whole) == len(known) else None,
        "sd": float(whole.std(ddof=1)) if len(whole) == len(known) > 1 else None,
        "values": known,
    }


def _metrics(found: list[dict[str, Any]], sites: list[str], tested: str) -> dict[str, Any]:
    """Every metric of the best round's test, mean over the hospitals' models and model by model: each on its own
    hospital's cases ("best"), or on all hospitals' ("together")."""
    names = sorted({name for part in found for metrics in part[tested].values() for name in metrics})
    values = {
        name: np.array([[part[tested].get(site, {}).get(name) for site in sites] for part in found], dtype=float)
        for name in names
    }
    return {
        name: {
            **_stat(value.mean(axis=1)),
            "hospitals": {site: _stat(value[:, place]) for place, site in enumerate(sites)},
        }
        for name, value in values.items()
    }


def _gain(scores: np.ndarray, reference: np.ndarray) -> dict[str, Any] | None:
    if not (np.isfinite(scores) & np.isfinite(reference)).any():
        return None
    return dataclasses.asdict(paired_gain(scores.tolist(), reference.tolist()))


def _reach(
    curves: list[list[float]], target: float | None, traffic: int, seconds: float | None
) -> dict[str, Any] | None:
    """First round whose mean validation score is at least ``target``: median over the runs that reached it, with what
    one hospital had sent and received and how long it had worked by then."""
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
        "seconds": None if median is None or seconds is None else round(median * seconds, 3),
    }


def _cross(found: list[dict[str, Any]], sites: list[str]) -> list[list[float | None]]:
    """Row: whose model; column: whose test data; mean over the seeds."""
    values = np.array([[[part["cross"][a][b] for b in sites] for a in sites] for part in found], dtype=float)
    mean = values.mean(axis=0)
    return [[None if np.isnan(value) else round(float(value), 6) for value in line] for line in mean]


def _calibration(found: list[dict[str, Any]], sites: list[str]) -> dict[str, Any] | None:
    """Expected calibration error and Brier score by hospital, mean over the runs, and the bins of all runs together
    (number, how often right, sum of the probabilities); None where they are not defined."""
    if any(part["calibration"][site] is None for part in found for site in sites):
        return None
    return {
        site: {
            **{kind: float(np.mean([part["calibration"][site][kind] for part in found])) for kind in ("ece", "brier")},
            "bins": np.sum([part["calibration"][site]["bins"] for part in found], axis=0).round(6).tolist(),
        }
        for site in sites
    }


def _selection(found: list[dict[str, Any]], sites: list[str]) -> dict[str, Any] | None:
    """Of a super model: the gammas that validation chose, and of each hospital's test cases the share that each model
    served, all runs together; None for other models."""
    if any("served" not in part for part in found):
        return None
    served = {}
    for site in sites:
        counts = {name: sum(part["served"][site][name] for part in found) for name in found[0]["served"][site]}
        served[site] = {name: round(count / sum(counts.values()), 6) for name, count in counts.items()}
    return {"gammas": [part["gamma"] for part in found], "served": served}
