# SPDX-License-Identifier: Apache-2.0
"""results.json: everything that the tables, the report and a later reader need, from the runs that are finished."""

import dataclasses
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

import medpfl
from medpfl.compare.entries import Entry
from medpfl.compare.file import FEDAVG, FINE_TUNED, LOCAL, POOLED, swept_name
from medpfl.compare.plan import Plan
from medpfl.compare.results import (
    Bins,
    FailedRun,
    Gain,
    HospitalRow,
    Made,
    MetricStat,
    Mixing,
    ModelRow,
    Reach,
    Results,
    Row,
    RunRow,
    Selection,
    SplitRow,
    Stat,
    SuperRow,
    Sweep,
    SweepPoint,
    TrainedRun,
    UnseenRow,
    UnseenRun,
    Versions,
    Worst,
)  # fmt: skip
from medpfl.compare.runner import finished, read_run
from medpfl.compare.runs import Run
from medpfl.compare.statistics import paired_gain, smallest_p
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.deployed.evaluate import write_text
from medpfl.results.compact import compact
from medpfl.results.differences import QUANTILES
from medpfl.results.files import json_of
from medpfl.results.schema import Scores
from medpfl.rounds.messages import digest_of

RESULTS = "results.json"
Pair = tuple[int | None, int]
"""Split and seed: methods are compared under the same one."""
E = TypeVar("E", TrainedRun, UnseenRun)


@dataclass
class _Runs:
    """What a row's runs gave, one entry a split and seed in every list.

    Attributes:
        parts: the row's model in each run.
        best, last: scores of the hospitals, NaN where there is none.
        curves: of those runs that have one.
    """

    pairs: list[Pair] = field(default_factory=list)
    entries: list[Entry] = field(default_factory=list)
    runs: list[TrainedRun] = field(default_factory=list)
    parts: list[ModelRow] = field(default_factory=list)
    best: list[list[float]] = field(default_factory=list)
    last: list[list[float]] = field(default_factory=list)

    @property
    def curves(self) -> list[list[float]]:
        return [part.curve for part in self.parts if part.curve]


def collect(plan: Plan, results: Path, failures: dict[str, str]) -> Results:
    """Gather the finished runs and write results.json.

    Raises:
        ConfigError: runs of one seed did not start from the same weights.
        MedPFLError: no run is finished, or a file cannot be read or written.
    """
    everything = [(run, _read(results, run)) for run in plan.runs if finished(results, run)]
    found = [(run, each) for run, each in everything if isinstance(each, TrainedRun)]
    left_out = [each for _, each in everything if isinstance(each, UnseenRun)]
    if not found:
        raise MedPFLError(f"no run of comparison '{plan.file.name}' is finished; there is nothing to compare")
    check_initial_weights([each for _, each in everything])
    score = plan.task.score
    rows = _rows(found, plan, score)
    target = plan.file.target
    local = rows.get(LOCAL)
    if target is None and local and local.curves:
        target = float(np.mean([max(curve) for curve in local.curves]))
    pairs = len(plan.file.seeds) * len(plan.splits)
    content = Results(
        comparison=plan.file.name,
        file=plan.file,
        score=score,
        hospitals=plan.hospitals,
        splits=[SplitRow(**dataclasses.asdict(split)) for split in plan.splits],
        seeds=plan.file.seeds,
        pairs=pairs,
        versions=Versions(
            medpfl=medpfl.__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            machine=platform.machine(),
        ),
        written=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
        test=f"two-sided exact sign-flip permutation test, paired by {paired_by(plan)}",
        smallest_p=smallest_p(pairs),
        target=target,
        tuning=plan.found or None,
        rows=[_summary(name, row, local, target, plan) for name, row in rows.items()],
        sweeps=_sweeps(plan),
        unseen=_unseen(left_out, plan),
        failures=_failures(plan, results, failures),
        runs=[_told(run, each) for run, each in everything],
    )
    write_text(results / RESULTS, compact(json_of(content)))
    return content


def _told(run: Run, each: TrainedRun | UnseenRun) -> RunRow:
    return RunRow(
        method=each.method,
        split=each.split,
        seed=each.seed,
        without=each.without,
        digest=run.digest,
        initial=each.initial,
        events=each.events if isinstance(each, TrainedRun) else None,
    )


def _sweeps(plan: Plan) -> list[Sweep]:
    """Every sweep's method, argument and points: the value, and the name under which it is compared."""
    return [
        Sweep(
            method=name,
            argument=argument,
            points=[SweepPoint(value=value, name=swept_name(name, argument, value)) for value in values],
        )
        for name, entry in plan.file.methods.items()
        for argument, values in entry.sweep.items()
    ]


def paired_by(plan: Plan) -> str:
    return "split and seed" if len(plan.splits) > 1 else "seed"


def _failures(plan: Plan, results: Path, failures: dict[str, str]) -> list[FailedRun]:
    """What is missing: runs, and methods for which nothing could be chosen."""
    missing = [run for run in plan.runs if not finished(results, run)]
    for search, found in zip(plan.searches, plan.found, strict=True):
        if found.chosen is None:
            open_runs = [run for runs in search.runs for run in runs if not finished(results, run)]
            missing += open_runs
            if not open_runs:
                missing.append(search.runs[0][0])
                failures = {**failures, search.runs[0][0].digest: "no candidate of its search could be trained"}
    return [FailedRun(run=run.title, reason=failures.get(run.digest, "not done")) for run in missing]


def _read(results: Path, run: Run) -> TrainedRun | UnseenRun:
    if run.without is not None:
        return _named(read_run(results, run, UnseenRun), run)
    return _named(read_run(results, run, TrainedRun), run)


def _named(found: E, run: Run) -> E:
    """A run under this plan's names: the same may have been run as another method's, or with a split's other name."""
    rows = {label.replace(found.method, run.name, 1): row for label, row in found.rows.items()}
    return found.model_copy(update={"method": run.name, "split": run.split, "rows": rows})


def check_initial_weights(runs: Sequence[TrainedRun | UnseenRun]) -> None:
    """Refuse a comparison whose methods started from different weights.

    Raises:
        ConfigError: naming the seed and the two methods.
    """
    first: dict[int, TrainedRun | UnseenRun] = {}
    for run in runs:
        other = first.setdefault(run.seed, run)
        if run.initial.digest != other.initial.digest:
            raise ConfigError(
                f"unfair: with seed {run.seed}, {run.method} started from other initial weights than {other.method}"
            )


def _rows(found: list[tuple[Run, TrainedRun]], plan: Plan, score: str) -> dict[str, _Runs]:
    """Label to what its runs gave."""
    rows: dict[str, _Runs] = {}
    for run, each in found:
        for label, part in each.rows.items():
            row = rows.setdefault(label, _Runs())
            row.pairs.append((run.split, run.seed))
            row.entries.append(run.entry)
            row.runs.append(each)
            row.parts.append(part)
            row.best.append(_scores(part.best, plan, score))
            row.last.append(_scores(part.last, plan, score))
    return {name: rows[name] for name in in_order(rows)}


def _scores(tested: Mapping[str, Scores], plan: Plan, score: str) -> list[float]:
    values = [tested.get(site, {}).get(score) for site in plan.hospitals]
    return [np.nan if value is None else value for value in values]


def in_order(labels: Iterable[str]) -> list[str]:
    """References first."""
    labels = list(labels)
    order = [LOCAL, FEDAVG, FINE_TUNED, POOLED]
    return [*(name for name in order if name in labels), *(name for name in labels if name not in order)]


def _summary(name: str, row: _Runs, local: _Runs | None, target: float | None, plan: Plan) -> Row:
    """One row of the leaderboard with all that belongs to it."""
    sites = plan.hospitals
    best, last = np.array(row.best), np.array(row.last)
    gain, gains = None, dict.fromkeys(sites) if local is None or name == LOCAL else {}
    if local is not None and name != LOCAL:
        shared = [pair for pair in row.pairs if pair in local.pairs]
        mine = best[[row.pairs.index(pair) for pair in shared]]
        alone = np.array(local.best)[[local.pairs.index(pair) for pair in shared]]
        gain = _gain(mine.mean(axis=1), alone.mean(axis=1))
        gains = {site: _gain(mine[:, k], alone[:, k]) for k, site in enumerate(sites)}
    hospitals = {
        site: HospitalRow(best=_stat(best[:, k]), last=_stat(last[:, k]), gain=gains[site])
        for k, site in enumerate(sites)
    }
    first = row.runs[0]
    seconds = _stat(np.array([run.seconds for run in row.runs]))
    made = {digest_of(entry.spec()): entry for entry in row.entries}
    curves = row.curves
    return Row(
        name=name,
        made=[_how(entry) for entry in made.values()],
        own_networks=first.initial.own,
        pairs=row.pairs,
        best=_stat(best.mean(axis=1)),
        last=_stat(last.mean(axis=1)),
        best_rounds=[part.best_round for part in row.parts],
        metrics=_metrics([part.best for part in row.parts], sites),
        together=_metrics([part.together for part in row.parts], sites),
        gain=gain,
        hospitals=hospitals,
        worst=_worst(hospitals),
        curve=[round(float(value), 6) for value in np.mean(curves, axis=0)] if curves else [],
        curves=curves,
        bytes=first.bytes,
        ratio=first.ratio,
        sdwd=_differences([run.sdwd for run in row.runs]),
        seconds=seconds,
        reach=_reach(curves, target, sum(first.bytes.values()), seconds.mean),
        cross=_cross(row.parts, sites),
        calibration=_calibration(row.parts, sites),
        selection=_selection(row.parts, sites),
        mixing=Mixing(split=first.split, seed=first.seed, slots=first.mixing),
    )


def _worst(hospitals: Mapping[str, HospitalRow]) -> Worst | None:
    means = {site: found.best.mean for site, found in hospitals.items() if found.best.mean is not None}
    worst = min(means, key=lambda site: means[site], default=None)
    return None if worst is None else Worst(hospital=worst, score=means[worst])


def _differences(found: list[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Slot to the mean over the runs of each quantile of the SDWD.

    A run whose hospitals end with one model does not name the slot: nothing differs there.
    """
    same = [0.0] * len(QUANTILES)
    slots = sorted({slot for each in found for slot in each})
    return {slot: np.mean([each.get(slot, same) for each in found], axis=0).tolist() for slot in slots}


def _how(entry: Entry) -> Made:
    slots = {slot: repr(mixer) for slot, mixer in entry.mixers.items()}
    return Made(method=repr(entry.method), slots=slots, codecs=repr(entry.codecs) if entry.codecs else None)


def _unseen(found: list[UnseenRun], plan: Plan) -> list[UnseenRow]:
    """What the others' models reach at a hospital that took no part, by label; empty where none was left out."""
    scores: dict[str, dict[str, dict[Pair, float | None]]] = {}
    for each in found:
        for label, row in each.rows.items():
            place = scores.setdefault(label, {}).setdefault(str(each.without), {})
            place[each.split, each.seed] = row.score
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
        rows.append(UnseenRow(name=label, mean=_stat(np.array(means)) if complete else None, hospitals=table))
    return rows


def _stat(values: NDArray[np.float64]) -> Stat:
    """Mean and sample deviation over the seeds; None where a value is missing."""
    known = [None if np.isnan(value) else round(float(value), 6) for value in values]
    whole = np.array([value for value in known if value is not None])
    return Stat(
        mean=float(whole.mean()) if len(whole) == len(known) else None,
        sd=float(whole.std(ddof=1)) if len(whole) == len(known) > 1 else None,
        values=known,
    )


def _metrics(found: list[dict[str, Scores]], sites: list[str]) -> dict[str, MetricStat]:
    """Every metric of the best round's test, mean over the hospitals' models and model by model.

    Args:
        found: of each run, the test of each hospital's model.
    """
    names = sorted({name for tested in found for metrics in tested.values() for name in metrics})
    values = {
        name: np.array([[tested.get(site, {}).get(name) for site in sites] for tested in found], dtype=float)
        for name in names
    }
    return {
        name: MetricStat(
            **dict(_stat(value.mean(axis=1))),
            hospitals={site: _stat(value[:, place]) for place, site in enumerate(sites)},
        )
        for name, value in values.items()
    }


def _gain(scores: NDArray[np.float64], reference: NDArray[np.float64]) -> Gain | None:
    if not (np.isfinite(scores) & np.isfinite(reference)).any():
        return None
    return paired_gain(scores.tolist(), reference.tolist())


def _reach(curves: list[list[float]], target: float | None, traffic: int, seconds: float | None) -> Reach | None:
    """First round whose mean validation score is at least ``target``: median over the runs that reached it, with what
    one hospital had sent and received and how long it had worked by then."""
    if target is None or not curves:
        return None
    rounds = [next((i for i, value in enumerate(curve, 1) if value >= target - 1e-9), None) for curve in curves]
    reached = [value for value in rounds if value is not None]
    median = float(np.median(reached)) if reached else None
    return Reach(
        rounds=rounds,
        median_round=median,
        reached=len(reached),
        bytes_per_hospital=None if median is None else round(median * traffic),
        seconds=None if median is None or seconds is None else round(median * seconds, 3),
    )


def _cross(found: list[ModelRow], sites: list[str]) -> list[list[float | None]]:
    """Row: whose model; column: whose test data; mean over the seeds."""
    values = np.array([[[part.cross[a][b] for b in sites] for a in sites] for part in found], dtype=float)
    mean = values.mean(axis=0)
    return [[None if np.isnan(value) else round(float(value), 6) for value in line] for line in mean]


def _calibration(found: list[ModelRow], sites: list[str]) -> dict[str, Bins] | None:
    """Expected calibration error and Brier score by hospital, mean over the runs, and the bins of all runs together;
    None where they are not defined."""
    table = {site: [bins for part in found if (bins := part.calibration[site]) is not None] for site in sites}
    if any(len(each) < len(found) for each in table.values()):
        return None
    return {
        site: Bins(
            ece=float(np.mean([each.ece for each in known])),
            brier=float(np.mean([each.brier for each in known])),
            bins=np.sum([each.bins for each in known], axis=0).round(6).tolist(),
        )
        for site, known in table.items()
    }


def _selection(found: list[ModelRow], sites: list[str]) -> Selection | None:
    """Of a super model: the gammas that validation chose, and of each hospital's test cases the share that each model
    served, all runs together; None for other models."""
    rows = [part for part in found if isinstance(part, SuperRow)]
    if len(rows) < len(found):
        return None
    served = {}
    for site in sites:
        counts = {name: sum(part.served[site][name] for part in rows) for name in rows[0].served[site]}
        served[site] = {name: round(count / sum(counts.values()), 6) for name, count in counts.items()}
    return Selection(gammas=[part.gamma for part in rows], served=served)
