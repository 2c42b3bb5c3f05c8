# SPDX-License-Identifier: Apache-2.0
"""results.json: everything that the tables, the report and a later reader need, from the runs that are finished."""

import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch

import medpfl
from medpfl.compare import aggregate, chosen, gains
from medpfl.compare.counted import Counted, Pair
from medpfl.compare.entries import Entry
from medpfl.compare.file import FEDAVG, LOCAL, POOLED, REFERENCES, swept_name
from medpfl.compare.patients import Sheets, read_all
from medpfl.compare.plan import Plan
from medpfl.compare.results import (
    ChosenRow,
    FailedRun,
    Gain,
    HospitalRow,
    Made,
    Mixing,
    Results,
    Row,
    RunRow,
    SplitRow,
    Sweep,
    SweepPoint,
    UnseenRow,
    Versions,
)
from medpfl.compare.run_results import ModelRow, TrainedRun, UnseenRun
from medpfl.compare.runner import finished, read_run
from medpfl.compare.runs import Run
from medpfl.compare.statistics import in_words, smallest_p
from medpfl.core.digest import digest_of
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.deployed.evaluate import write_text
from medpfl.results.compact import compact
from medpfl.results.files import json_of, read_versioned
from medpfl.results.schema import Scores

RESULTS = "results.json"
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
    def curves(self) -> list[list[float | None]]:
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
        reasons = [*failures.values(), *(one.reason for one in _failures(plan, results, failures))]
        why = f": {reasons[0]}" if reasons else ""
        raise MedPFLError(f"no run of comparison '{plan.file.name}' is finished; there is nothing to compare{why}")
    check_initial_weights([each for _, each in everything])
    score = plan.task.score
    rows = _rows(found, plan, score)
    tested = [(run.split, part.best) for run, each in found for part in each.rows.values()]
    counted = Counted(tested, plan.hospitals)
    held = _held(found, plan, results, counted)
    target = plan.file.target
    local = rows.get(LOCAL)
    if target is None and local and local.curves:
        target = float(np.mean([plan.task.measure.best(v for v in curve if v is not None) for curve in local.curves]))
    pairs = len(plan.file.seeds) * len(plan.splits)
    tested_pairs = len(plan.splits) if len(plan.splits) > 1 else pairs
    told = [gains.certain(_summary(name, row, local, target, plan, counted), held) for name, row in rows.items()]
    content = Results(
        comparison=plan.file.name,
        file=plan.file,
        score=score,
        metrics=plan.task.measures,
        hospitals=plan.hospitals,
        splits=[SplitRow(seed=s.seed, digests=s.digests, sizes=s.sizes, labels=s.labels) for s in plan.splits],
        seeds=plan.file.seeds,
        pairs=pairs,
        versions=Versions(
            medpfl=medpfl.__version__,
            torch=str(torch.__version__),
            python=platform.python_version(),
            machine=platform.machine(),
        ),
        written=time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()) + " UTC",
        test=in_words(tested_pairs, paired_by(plan)),
        smallest_p=smallest_p(tested_pairs),
        target=target,
        tuning=plan.found or None,
        rows=gains.with_distances(told, rows, held, partial(counted.of, score), plan.task.measure),
        sweeps=_sweeps(plan),
        unseen=_unseen(left_out, plan),
        chosen=_chosen(found, held),
        failures=_failures(plan, results, failures),
        runs=[_told(run, each) for run, each in everything],
    )
    write_text(results / RESULTS, compact(json_of(content)))
    return content


def read_results(folder: Path) -> Results:
    """The ``results.json`` of a comparison's folder.

    Raises:
        MedPFLError: it is missing, altered or of another version.
    """
    return read_versioned(folder, RESULTS, "the folder of a comparison", lambda _: Results)


def _held(found: list[tuple[Run, TrainedRun]], plan: Plan, results: Path, counted: Counted) -> chosen.Rows | None:
    """What all models said of the hospitals' cases; None where the runs are of before, or none is Local's."""
    sheets: dict[str, dict[Pair, Sheets]] = {}
    kept = read_all([results / "runs" / run.digest for run, _ in found], plan.task)
    if kept is None:
        return None
    for (run, each), cases in zip(found, kept, strict=True):
        for label, inner in zip(each.rows, cases, strict=False):  # the super model, the last row, is not among them
            sheets.setdefault(label, {})[run.split, run.seed] = cases[inner]
    if LOCAL not in sheets:
        return None
    ratio = None
    if len(plan.splits) > 1:
        sizes = {site: [split.sizes[site] for split in plan.splits] for site in plan.hospitals}
        ratio = {
            site: float(np.mean([size["test"] / size["train"] for size in found])) for site, found in sizes.items()
        }
    counts = partial(counted.of, plan.task.score)
    return chosen.Rows(sheets, plan.hospitals, plan.task.measure, LOCAL, ratio, counts)


def _chosen(found: list[tuple[Run, TrainedRun]], held: chosen.Rows | None) -> list[ChosenRow]:
    """What hospitals would take: with each method's models beside the references, and with all."""
    if held is None:
        return []
    by_method: dict[str, list[str]] = {}
    for run, each in found:
        labels = by_method.setdefault(run.name, [])
        labels += [label for label in each.rows if label in held.sheets and label not in labels]
    with_it = [label for name in (LOCAL, FEDAVG) for label in by_method.pop(name, [])]
    by_method.pop(POOLED, None)
    every = [*with_it, *(label for labels in by_method.values() for label in labels)]
    rows = [held.choose(name, [*with_it, *labels]) for name, labels in by_method.items()]
    return [row for row in (held.choose(chosen.ALL, every), *rows) if row is not None]


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
    if len(plan.splits) < 2:
        return "seed"
    return "split and seed" if len(plan.file.seeds) == 1 else "split, of each of which the mean over its seeds counts"


def _failures(plan: Plan, results: Path, failures: dict[str, str]) -> list[FailedRun]:
    """What is missing: runs, and methods for which nothing could be chosen."""
    missing = [run for run in plan.runs if not finished(results, run)]
    for search, found in zip(plan.searches, plan.found, strict=True):
        if found.chosen is None:
            open_runs = [run for runs in search.runs for run in runs if not finished(results, run)]
            missing += open_runs
            if not open_runs:
                missing.append(search.runs[0][0])
                broken = all(candidate.reason for candidate in found.candidates)
                why = "could be trained" if broken else "has a validation score"
                failures = {**failures, search.runs[0][0].digest: f"no candidate of its search {why}"}
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
    first: dict[tuple[int, str | None], TrainedRun | UnseenRun] = {}
    for run in runs:
        # Without a hospital whose network is another one, the weights of all together are others, too.
        other = first.setdefault((run.seed, run.without), run)
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
    return [*(name for name in REFERENCES if name in labels), *(name for name in labels if name not in REFERENCES)]


def _summary(name: str, row: _Runs, local: _Runs | None, target: float | None, plan: Plan, counted: Counted) -> Row:
    """One row of the leaderboard with all that belongs to it."""
    sites = plan.hospitals
    best, last, measure = np.array(row.best), np.array(row.last), plan.task.measure
    counts = counted.of(plan.task.score, row.pairs)
    gain: Gain | None = None
    of_site: dict[str, Gain | None] = dict.fromkeys(sites)
    if local is not None and name != LOCAL:
        gain, each = gains.between(row, local, partial(counted.of, plan.task.score), measure)
        of_site = dict(zip(sites, each, strict=True))
    hospitals = {
        site: HospitalRow(best=aggregate.stat(best[:, k]), last=aggregate.stat(last[:, k]), gain=of_site[site])
        for k, site in enumerate(sites)
    }
    first = row.runs[0]
    seconds = aggregate.stat(np.array([run.seconds for run in row.runs]))
    made = {digest_of(json_of(entry.spec())): entry for entry in row.entries}
    curves = row.curves
    return Row(
        name=name,
        made=[made_of(entry) for entry in made.values()],
        own_networks=first.initial.own,
        pairs=row.pairs,
        best=aggregate.stat(aggregate.of_hospitals(best, counts)),
        last=aggregate.stat(aggregate.of_hospitals(last, counts)),
        best_rounds=[part.best_round for part in row.parts],
        metrics=aggregate.metrics([part.best for part in row.parts], sites, row.pairs, counted),
        together=aggregate.metrics([part.together for part in row.parts], sites, row.pairs, None),
        gain=gain,
        hospitals=hospitals,
        worst=aggregate.worst(hospitals, measure),
        curve=aggregate.curve(curves),
        curves=curves,
        bytes=first.bytes,
        ratio=first.ratio,
        sdwd=aggregate.mean_differences([run.sdwd for run in row.runs]),
        seconds=seconds,
        reach=aggregate.reach(curves, target, sum(first.bytes.values()), seconds.mean, measure),
        cross=aggregate.cross(row.parts, sites),
        calibration=aggregate.calibration(row.parts, sites),
        selection=aggregate.selection(row.parts, sites),
        scored=row.parts[0].scored,
        one_answer={site: count for site in sites if (count := sum(site in part.one_answer for part in row.parts))},
        privacy={
            site: max(told, key=lambda spent: spent.epsilon)
            for site in sites
            if (told := [run.privacy[site] for run in row.runs if site in run.privacy])
        },
        mixing=Mixing(split=first.split, seed=first.seed, slots=first.mixing),
    )


def made_of(entry: Entry) -> Made:
    """How an entry was made: a class of another package with its package, for several may have one of that name."""

    def shown(component: object) -> str:
        module = type(component).__module__
        return repr(component) if module.startswith(f"{medpfl.__name__}.") else f"{module}.{component!r}"

    slots = {slot: shown(mixer) for slot, mixer in entry.mixers.items()}
    return Made(method=shown(entry.method), slots=slots, codecs=repr(entry.codecs) if entry.codecs else None)


def _unseen(found: list[UnseenRun], plan: Plan) -> list[UnseenRow]:
    """What the others' models reach at a hospital that took no part, by label; empty where none was left out."""
    scores: dict[str, dict[str, dict[Pair, float | None]]] = {}
    for each in found:
        for label, row in each.rows.items():
            place = scores.setdefault(label, {}).setdefault(str(each.without), {})
            place[each.split, each.seed] = row.score
    score = plan.task.score
    tested = [(each.split, {str(each.without): {score: row.score}}) for each in found for row in each.rows.values()]
    counted = Counted(tested, plan.hospitals)
    rows = []
    for label in in_order(scores):
        sites = scores[label]
        table = {
            site: aggregate.stat(np.array([np.nan if v is None else v for v in values.values()]))
            for site, values in sites.items()
        }
        whole = [pair for pair in sites[next(iter(sites))] if all(pair in values for values in sites.values())]
        mean = None
        if whole and len(sites) == len(plan.hospitals):
            values = np.array([[sites[site][pair] for site in plan.hospitals] for pair in whole], dtype=float)
            mean = aggregate.stat(aggregate.of_hospitals(values, counted.of(score, whole)))
        rows.append(UnseenRow(name=label, mean=mean, hospitals=table))
    return rows
