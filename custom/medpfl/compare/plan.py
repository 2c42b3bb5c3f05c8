# SPDX-License-Identifier: Apache-2.0
"""The runs that follow from a comparison file: every method with every split and seed under the same conditions."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from medpfl.compare.data import Split, read_splits, reader
from medpfl.compare.entries import (
    Entry,
    build_entry,
    check_equal_work,
    check_names,
    check_roster,
    initial_weights,
    names_of,
)
from medpfl.compare.file import Comparison
from medpfl.compare.results import SearchResult
from medpfl.compare.run_results import SearchRun
from medpfl.compare.runner import finished, read_run
from medpfl.compare.runs import Run, run_of
from medpfl.compare.tuning import Search, candidates_of, judge
from medpfl.component import build, construct, import_named
from medpfl.core.errors import ConfigError
from medpfl.core.sources import look_again
from medpfl.data.target import Target
from medpfl.methods.contract import Build
from medpfl.methods.training import Training
from medpfl.rounds.held_alike import common_start, read_common
from medpfl.store import fingerprint
from medpfl.tasks.contract import Task


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison.

    Attributes:
        entries: the methods as they are compared; of a comparison with a search, what was chosen, split by split.
        searches: what is to be searched before ``runs`` are known; empty without a search.
        found: what the searches found.
        runs: the runs of the comparison itself.
        held: split and what a method uses of what hospitals hold alike, to the marks of it; read once.
    """

    file: Comparison
    task: Task
    site_files: dict[str, Path]
    made: Build
    splits: list[Split]
    entries: list[Entry] = field(default_factory=list)
    searches: list[Search] = field(default_factory=list)
    found: list[SearchResult] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    held: dict[tuple[object, ...], dict[str, dict[str, str]]] = field(default_factory=dict)

    @property
    def start(self) -> str | None:
        """SHA-256 of the start weights, if there are any."""
        return fingerprint(self.made.start.tensors) if self.made.start else None

    @property
    def hospitals(self) -> list[str]:
        return list(self.made.roster)


def make_plan(file: Comparison, site_files: dict[str, Path]) -> Plan:
    """Read the hospitals' data once a split, build every method, and list the runs, of a search first if there is one.

    Raises:
        MedPFLError: the file, a site file or the data are wrong, or the comparison would not be fair.
    """
    look_again()
    least, why = (3, "that leaves hospitals out") if file.unseen else (2, "")
    if len(site_files) < least:
        raise ConfigError(
            f"a comparison {why}{' ' if why else ''}needs at least {least} hospitals, got {len(site_files)}: "
            f"{', '.join(site_files)}"
        )
    import_named([file.task.model_dump(), *(entry.model_dump() for entry in file.methods.values())])
    task: Task = build(file.task.model_dump(), Task, "task")
    roster = tuple(sorted(site_files))
    splits, first = read_splits(task, site_files, file.splits)
    read = reader(None)
    training = construct(Training, file.training, file.name)
    start = common_start(training.start, {site: read(path, site) for site, path in site_files.items()})
    made = Build(task.at(roster[0]), first, roster, file.seeds[0], roster[0], start=start)
    if file.examples and task.spec.target is not Target.MASK:
        raise ConfigError(f"'examples' shows segmentations of images, which {type(task).__name__} does not make")
    plan = Plan(file, task, dict(site_files), made, splits)
    begun = [_search(plan, name, split) for split in splits for name in names_of(file, task)]
    check_names([search.candidates[0] for search in begun], roster)
    check_equal_work([entry for search in begun for entry in search.candidates])
    if file.tuning is None:
        by_seed = {split.seed: split for split in splits}
        return _with_runs(plan, [(search.candidates[0], by_seed[search.split]) for search in begun])
    for search in begun:
        _check_entry(search.candidates[0], plan, file.tuning.seeds)
    return dataclasses.replace(plan, searches=begun)


def widen(plan: Plan, results: Path) -> Plan | None:
    """The plan with the candidates that follow from the scores so far; None where no search has a next one: it has its
    budget, or a run of it is missing."""
    by_seed = {split.seed: split for split in plan.splits}
    searches = []
    for search, found in zip(plan.searches, _judged(plan, results), strict=True):
        whole = all(candidate.finished for candidate in found.candidates)
        scores = [candidate.mean for candidate in found.candidates]
        searches.append(_search(plan, search.name, by_seed[search.split], scores) if whole else search)
    if all(len(new.candidates) == len(old.candidates) for new, old in zip(searches, plan.searches, strict=True)):
        return None
    check_equal_work([entry for search in searches for entry in search.candidates])
    return dataclasses.replace(plan, searches=searches)


def _search(plan: Plan, name: str, split: Split, scores: Sequence[float | None] = ()) -> Search:
    """A method's search as far as it is known when the first candidates have ``scores``."""
    values = candidates_of(plan.file, name, split.seed, plan.task.measure, scores)
    entries = [build_entry(plan.file, name, plan.made, each) for each in values]
    seeds = plan.file.tuning.seeds if plan.file.tuning else []
    runs = [[_run(plan, entry, split, seed, searching=True) for seed in seeds] for entry in entries]
    return Search(name, split.seed, entries, runs)


def _judged(plan: Plan, results: Path) -> list[SearchResult]:
    def read(run: Run) -> SearchRun | None:
        return read_run(results, run, SearchRun) if finished(results, run) else None

    return [judge(search, read, plan.task.measure) for search in plan.searches]


def decide(plan: Plan, results: Path) -> Plan:
    """The plan with what the searches chose and the runs that follow; a method without a choice has none."""
    found = _judged(plan, results)
    by_seed = {split.seed: split for split in plan.splits}
    chosen = [
        (search.candidates[result.chosen], by_seed[search.split])
        for search, result in zip(plan.searches, found, strict=True)
        if result.chosen is not None
    ]
    return _with_runs(dataclasses.replace(plan, found=found), chosen)


def _with_runs(plan: Plan, chosen: list[tuple[Entry, Split]]) -> Plan:
    file = plan.file
    entries: list[Entry] = []
    for entry, _ in chosen:
        if entry not in entries:
            _check_entry(entry, plan, file.seeds)
            entries.append(entry)
    runs = [
        _run(plan, entry, split, seed, without)
        for without in (None, *(plan.made.roster if file.unseen else ()))
        for seed in file.seeds
        for entry, split in chosen
    ]
    return dataclasses.replace(plan, entries=entries, runs=runs)


def _run(plan: Plan, entry: Entry, split: Split, seed: int, without: str | None = None, searching: bool = False) -> Run:
    return run_of(plan.file, plan.task, entry, split, seed, _held(plan, entry, split), without, searching)


def _held(plan: Plan, entry: Entry, split: Split) -> dict[str, dict[str, str]]:
    """Hospital to the marks of the checkpoints and of the public data that the method uses there; empty without any."""
    methods = {site: entry.method.at(site) for site in plan.hospitals}
    used = split.seed, *(f"{each.declared_checkpoints()} {each.public_datasets()}" for each in methods.values())
    if used not in plan.held:
        read = reader(split.seed)
        found = {
            site: read_common(method, plan.task, read(plan.site_files[site], site), split.shapes[site]).marks()
            for site, method in methods.items()
        }
        plan.held[used] = {site: marks for site, marks in found.items() if marks}
    return plan.held[used]


def _check_entry(entry: Entry, plan: Plan, seeds: list[int]) -> None:
    for seed in seeds:
        initial_weights(entry, dataclasses.replace(plan.made, seed=seed))
    if plan.file.unseen:
        check_roster(entry, plan.made.roster[1:], f"'unseen': methods.{entry.name}")
