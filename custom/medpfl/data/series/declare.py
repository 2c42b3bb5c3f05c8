# SPDX-License-Identifier: Apache-2.0
"""Time series: recordings cut into windows that never cross a recording, a subject, a split or a change of label."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr, model_validator

from medpfl.core.errors import DataError
from medpfl.data.cells import Cells, shown_names
from medpfl.data.contract import Case, Dataset, Item, Listing
from medpfl.data.declared import SPLITS, Problems
from medpfl.data.outcome import KEYS, Answer, Answered, tensor_of
from medpfl.data.owners import Owners, of_names, of_recordings
from medpfl.data.patterns import Patterns, find_files, placeholders
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.rows import Rows
from medpfl.data.samples import Budget, Samples, SiteData, Store, empty_like
from medpfl.data.series.labels import labels_of
from medpfl.data.series.recordings import (
    Recording,
    SeriesPreparation,
    interpolated,
    missing_samples,
    read_arrays,
    read_recording,
    windows,
)
from medpfl.data.series.rules import SeriesLabel, SeriesSplit, Window
from medpfl.data.splits import Groups, check_listing, choose
from medpfl.data.target import Target

_SOUND = (".wav", ".mp3", ".flac", ".ogg", ".edf")


class Series(Answered, Cells, Dataset):
    """Time series of two forms.

    With ``channels``, each file is a recording with a row per time step (CSV, TSV or Parquet). With ``inputs``, files
    are .npz archives: ``inputs`` names an array n x channels x length, each of whose n entries is a recording, and
    ``label.column``, ``split.group`` and ``split.column`` name arrays of n values. In either, a placeholder of
    ``files`` is a column, too: ``"{patient}/*.csv"`` has the column ``patient``.

    Windows are cut from runs: consecutive steps of a recording with one label, one group and one split. ``group``
    defaults to the recording. ``missing_samples``: ``refuse`` them, or ``interpolate`` them linearly within the run.
    ``rate``: time steps a second, for hospitals to compare. What is to be predicted is one of ``label``, ``several``,
    ``value`` and ``survival`` as in tables; where it changes, a run ends.
    """

    form: ClassVar[str] = "windows"
    targets: ClassVar[tuple[Target, ...]] = (Target.CLASS, Target.LABELS, Target.VALUE, Target.SURVIVAL)
    preparation: ClassVar[type[Preparation]] = SeriesPreparation
    agreed: ClassVar[tuple[str, ...]] = ("channels", "rate", "window.length")

    kind: Literal["series"]
    files: Patterns
    missing: list[str] = Field(default=["", "?", "NA", "NaN", "nan"])
    channels: list[str] | None = Field(default=None, min_length=1)
    inputs: str | None = None
    label: SeriesLabel | None = None
    window: Window | None = None
    missing_samples: Literal["refuse", "interpolate"] = "refuse"
    rate: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    split: SeriesSplit = SeriesSplit()
    _made: "_Plan | None" = PrivateAttr(default=None)

    @model_validator(mode="after")
    def _one_form(self) -> "Series":
        if self.split.time and self.label is None:
            raise ValueError("'split.time' cuts each class in time, so it needs 'label'")
        if (self.channels is None) == (self.inputs is None):
            raise ValueError("expected either 'channels' (columns of table files) or 'inputs' (an array of .npz files)")
        for file in self.files:
            if Path(file).suffix.lower() in _SOUND:
                raise ValueError(f"sound files are not read; save the samples as .npz or as a table, got '{file}'")
            if (Path(file).suffix.lower() == ".npz") != (self.inputs is not None):
                form = "'inputs' needs .npz files" if self.inputs else "'channels' needs table files, 'inputs' .npz"
                raise ValueError(f"{form}, got '{file}'")
        if self.inputs is not None:
            for key in ("separator", "decimal", "columns", "missing", "rename", "codes"):
                if key in self.model_fields_set:
                    raise ValueError(f"'{key}' is for table files; leave it out")
            if self.split.time:
                raise ValueError("'split.time' needs recordings in table files; arrays have no order in time")
        elif self.window is None:
            raise ValueError("'window' is missing; expected {length: ..., step: ...} in time steps")
        named = [*(self.channels or []), *_marks(self)]
        self.check_codes(set(named) - placeholders(self.files))  # what stands in a path is taken as it is
        for name in named:
            if named.count(name) > 1:
                raise ValueError(f"the column '{name}' is named twice among channels, label, group and split")
        return self

    def cases(self, problems: Problems) -> Listing:
        """All windows. Raises DataError if a file cannot be read at all, whatever ``problems`` keeps."""
        return self._plan(problems).listing()

    def owners(self) -> Owners:
        """None where the recordings are cut by time, which knows no group."""
        if self.split.time:
            return
        yield from of_names(self._folder, self.files)
        if self.channels:
            found = find_files(self._folder, self.files, Problems(keep=True))
            yield from of_recordings([file.path for file in found], self)

    def read(self, case: "WindowCase") -> Item:
        """One window: C x length as in the file, NaN where a sample is missing."""
        plan = self._plan(Problems())
        values = plan.steps[case.first : case.first + plan.length]
        return Item(values.numpy().T.copy(), case.label)

    def load(self, spec: Spec) -> SiteData:
        """All windows, N x C x length, each channel with mean 0 and deviation 1 over the training runs.

        Raises:
            DataError: with the file, the line and the column, expected and got.
        """
        import torch

        if spec.target is not self.target:
            key = KEYS[spec.target]
            sentence = f"the job's task learns {spec.target.told}: it needs series with '{key}', which is not declared"
            raise DataError(f"{self._folder / self.files[0]}: {sentence}", public=sentence)
        plan = _planned(self, Problems())  # afresh: a data check may have kept what has no problem only
        mean, scale = plan.statistics()
        listing = plan.listing()
        splits: dict[str, Samples] = {}
        for split, runs in plan.runs.items():
            if not runs:
                splits[split] = empty_like(splits["train"])
                continue
            inputs, targets = Store(plan.budget), Store(plan.budget)
            for run in runs:
                made = windows(((plan.values(run) - mean) / scale).astype(np.float32), plan.length, plan.step)
                inputs.append(torch.from_numpy(made))
                targets.append(tensor_of([run.label] * len(made), self.target))
            names, owners = ([getattr(case, key) for case in listing[split]] for key in ("name", "group"))
            classes, case_of = len(self.class_names()), np.arange(len(names))
            splits[split] = Samples(inputs.finish(), targets.finish(), case_of, names, classes, owners=owners)
        preparation = SeriesPreparation(
            cells=Cells.model_validate(self.model_dump(include=set(Cells.model_fields))),
            channels=self.channels,
            inputs=self.inputs,
            label=self.answers[0],
            answers=self.answers if len(self.answers) > 1 else [],
            missing_samples=self.missing_samples,
            length=plan.length,
            step=plan.step,
            rate=self.rate,
            mean=mean.tolist(),
            scale=scale.tolist(),
        )
        return SiteData(splits, self.class_names(), preparation)

    def _plan(self, problems: Problems) -> "_Plan":
        if self._made is None:
            self._made = _planned(self, problems)
        return self._made


@dataclass(frozen=True)
class WindowCase(Case):
    """One window. ``first``: its first step among all steps of the dataset; ``label``: its answer."""

    first: int
    label: Answer


@dataclass(frozen=True)
class _Run:
    """Steps ``first`` ... ``first + count - 1`` of the dataset: of one recording, label, group and named split."""

    recording: str
    group: str
    named: str
    label: Answer
    first: int
    count: int


@dataclass(frozen=True)
class _Plan:
    """All steps (T x C float32, NaN where missing), and the runs of each split that hold a window."""

    steps: Rows
    places: NDArray[np.int64]
    runs: dict[str, list[_Run]]
    length: int
    step: int
    whole: bool
    """Each recording is one window."""
    budget: Budget

    def where(self, run: _Run, start: int, count: int) -> str:
        first = run.first + start
        if self.whole:
            return run.recording
        return f"{run.recording}:{self.places[first]}-{self.places[first + count - 1]}"

    def listing(self) -> Listing:
        return {split: [case for run in runs for case in self._cases(run)] for split, runs in self.runs.items()}

    def _cases(self, run: _Run) -> Iterator[WindowCase]:
        for start in range(0, run.count - self.length + 1, self.step):
            name = self.where(run, start, self.length)
            yield WindowCase(name, run.group, name, run.first + start, run.label)

    def values(self, run: _Run) -> NDArray[np.float32]:
        """T x C of a run, interpolated: a run is within one split, so nothing comes from another."""
        return interpolated(self.steps[run.first : run.first + run.count].numpy())

    def statistics(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Mean and deviation of each channel over all steps of the training runs, each step once."""
        runs = self.runs["train"]
        count = sum(run.count for run in runs)
        mean = np.sum([self.values(run).sum(axis=0, dtype=np.float64) for run in runs], axis=0) / count
        square = np.sum([((self.values(run) - mean) ** 2).sum(axis=0) for run in runs], axis=0) / count
        return mean, np.where(square > 0, np.sqrt(square), 1.0)  # a constant channel becomes 0


def _marks(dataset: Series) -> list[str]:
    others = (dataset.split.group, dataset.split.column)
    return [*dataset.answers, *(column for column in others if column)]


def _planned(dataset: Series, problems: Problems) -> _Plan:
    import torch

    budget = Budget(dataset._storage, dataset._folder)
    store = Store(budget)
    places: list[NDArray[np.int64]] = []
    runs: list[_Run] = []
    groups = Groups()
    length = dataset.window.length if dataset.window else 0
    channels: int | None = None
    for recording in _recordings(dataset, problems):
        channels = channels or recording.values.shape[1]
        length = length or len(recording.values)
        if recording.values.shape[1] != channels:
            got = recording.values.shape[1]
            raise DataError(f"{recording.name}: expected {channels} channels as in the others, got {got}")
        if not dataset.window and len(recording.values) != length:
            problems.add(
                f"{recording.name}: expected {length} time steps as in the others, got {len(recording.values)}; "
                "declare a 'window' to cut windows of one length"
            )
            continue
        found = _runs(dataset, recording, len(store), groups, problems)
        longest = max((run.count for run in found), default=0)
        if found and longest < length:
            problems.add(
                f"{recording.name}: it is too short for a window of {length} time steps; the longest run of one label "
                f"has {longest}"
            )
        runs += [run for run in found if run.count >= length]
        store.append(torch.from_numpy(recording.values))
        places.append(recording.places)
    source = ", ".join(dataset.files)
    step = (dataset.window.step if dataset.window else None) or length
    by_split = _split(dataset, runs, source, problems)
    by_split = {split: [run for run in mine if run.count >= length] for split, mine in by_split.items()}
    everywhere = np.concatenate(places) if places else np.empty(0, dtype=np.int64)
    plan = _Plan(store.finish(), everywhere, by_split, length, step, dataset.window is None, budget)
    for mine in by_split.values():
        mine[:] = [run for run in mine if _complete(dataset, plan, run, problems)]
    check_listing(plan.listing(), source, problems, apart=not dataset.split.time)
    return plan


def _recordings(dataset: Series, problems: Problems) -> Iterator[Recording]:
    found = find_files(dataset._folder, dataset.files, Problems())  # without a file nothing else can be said
    for file, shown in zip(found, shown_names([file.name for file in found]), strict=True):
        marks = [mark for mark in _marks(dataset) if mark not in file.fields]
        if dataset.inputs is not None:
            recordings = read_arrays(file.path, shown, dataset.inputs, marks, problems)
        else:
            channels, numbers = dataset.channels or [], dataset.answer_numbers
            recordings = iter([read_recording(file.path, shown, dataset, channels, marks, problems, answers=numbers)])
        for recording in recordings:
            yield recording.marked(file.fields)


def _runs(dataset: Series, recording: Recording, offset: int, groups: Groups, problems: Problems) -> list[_Run]:
    """The recording's runs in time order; steps with a problem are in none."""
    import pandas as pd

    labels, answers = labels_of(recording, dataset.label, dataset.value, dataset.outcome, problems)
    labels[recording.bad] = -1
    if dataset.missing_samples == "refuse":
        for sentence in missing_samples(recording, labels >= 0):
            problems.add(f"{sentence}; declare 'missing_samples: interpolate' to fill such gaps")
        labels[np.isnan(recording.values).any(axis=1)] = -1
    changes = [labels]
    texts = {}
    for column in (dataset.split.group, dataset.split.column):
        if column:
            codes, texts[column] = pd.factorize(recording.marks[column])
            blank = [code for code, text in enumerate(texts[column]) if not str(text).strip()]
            codes[np.isin(codes, blank)] = -1  # of arrays and of paths; or all who are not known were one patient
            unknown = np.flatnonzero((codes < 0) & (labels >= 0))
            if len(unknown):
                problems.add(f"{recording.at(int(unknown[0]))}: '{column}' is missing ({len(unknown)} time steps)")
            labels[codes < 0] = -1
            changes.append(codes)
    marks = np.stack(changes, axis=1)
    borders = np.flatnonzero((marks[1:] != marks[:-1]).any(axis=1)) + 1
    runs = []
    for first, end in zip([0, *borders.tolist()], [*borders.tolist(), len(labels)], strict=True):
        if end > first and labels[first] >= 0:
            text = {column: str(recording.marks[column][first]) for column in texts}
            group = groups.named(text[dataset.split.group]) if dataset.split.group else recording.name
            named = text.get(dataset.split.column or "", "")
            runs.append(_Run(recording.name, group, named, answers[labels[first]], offset + first, end - first))
    return runs


def _split(dataset: Series, runs: list[_Run], source: str, problems: Problems) -> dict[str, list[_Run]]:
    rule = dataset.split
    if rule.time:
        return _cut_in_time(runs, rule.fractions)
    groups = [run.group for run in runs]
    drawn = not (rule.column or rule.file)
    if drawn and len(set(groups)) < len(rule.fractions) and (runs or not problems.found):
        mend = "; 'split: {time: true}' cuts by time instead" if dataset.label and not dataset.inputs else ""
        problems.add(
            f"{source}: {len(set(groups))} recordings or groups cannot be cut into {len(rule.fractions)} splits "
            f"({', '.join(rule.fractions)}){mend}"
        )
        return {split: [] for split in SPLITS}
    places, named = [run.recording for run in runs], [run.named for run in runs]
    chosen = choose(rule, places, problems, source=source, groups=groups, named=named if rule.column else None)
    return {split: [runs[index] for index in chosen[split]] for split in SPLITS}


def _cut_in_time(runs: list[_Run], fractions: Mapping[Any, float]) -> dict[str, list[_Run]]:
    """Of each class the first steps for train, the next for validation, the last for test; runs at a border are cut."""
    cut: dict[str, list[_Run]] = {split: [] for split in SPLITS}
    for label in sorted({run.label for run in runs if isinstance(run.label, int)}):
        mine = [run for run in runs if run.label == label]
        wanted = [fractions.get(split, 0.0) for split in SPLITS]
        ends = np.round(np.cumsum(wanted) * sum(run.count for run in mine)).astype(int).tolist()
        passed = 0
        for run in mine:
            for split, start, end in zip(SPLITS, [0, *ends[:-1]], ends, strict=True):
                first, last = max(passed, start), min(passed + run.count, end)
                if first < last:
                    place = run.first + first - passed
                    cut[split].append(replace(run, first=place, count=last - first))
            passed += run.count
    return cut


def _complete(dataset: Series, plan: _Plan, run: _Run, problems: Problems) -> bool:
    empty = np.isnan(plan.values(run)).any(axis=0)
    for column in np.flatnonzero(empty).tolist():
        name = dataset.channels[column] if dataset.channels else str(column)
        problems.add(
            f"{plan.where(run, 0, run.count)}: channel '{name}' has no value in this run, so nothing can be "
            "interpolated"
        )
    return not empty.any()
