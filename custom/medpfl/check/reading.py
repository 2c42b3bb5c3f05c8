# SPDX-License-Identifier: Apache-2.0
"""Read a declared dataset once, all of it, and count."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.check.findings import problems_of, warnings_of
from medpfl.check.inspection import Channel, Inspection, Shown, Split, Twins
from medpfl.check.summary import Summary, summarise
from medpfl.core.errors import DataError
from medpfl.data.contract import Case, Dataset
from medpfl.data.declared import Problems
from medpfl.data.samples import in_parallel
from medpfl.data.subgroups import Described, groupings

SAMPLED = 200_000  # values of a channel that are kept for percentiles and histograms, about
PICTURES = {"map": 6, "class": 2}  # in a split; in a split and class

Progress = Callable[[int, int], None]
"""Called with the number of cases read and the number of all cases."""


def inspect(name: str, dataset: Dataset, progress: Progress = lambda done, all_: None) -> Inspection:
    """Read every case of a dataset once, a few at a time, and count; nothing is raised for what is wrong with data.

    Threads, not processes: decompression and numpy release the interpreter, and two threads read NIfTI files as fast
    as two forked processes (measured), without importing everything anew in each.
    """
    inspection = Inspection(name, dataset.kind, dataset.class_names())
    problems = Problems(keep=True)
    try:
        listing = dataset.cases(problems)
        inspection.columns = dataset.shown_columns(listing)
        if isinstance(dataset, Described):
            groupings(dataset)
    except DataError as error:
        inspection.problems = [*problems.found, str(error)]
        return inspection
    cases = [(split, case) for split, listed in listing.items() for case in listed]
    for split, listed in listing.items():
        inspection.splits[split].listed = len(listed)
        inspection.splits[split].groups = len({case.group for case in listed})
        inspection.owners.update(case.group for case in listed if dataset.split.group)
    sampled = max(1, min(4096, SAMPLED // max(1, len(cases))))

    def read(entry: tuple[str, Case]) -> Summary | str:
        try:
            return summarise(dataset, entry[1], len(inspection.class_names), sampled)
        except DataError as error:
            return str(error) if entry[1].where in str(error) else f"{error} (listed as {entry[1].where})"

    gathering = _Gathering(inspection)
    for done, ((split, case), summary) in enumerate(zip(cases, in_parallel(read, cases), strict=True), start=1):
        if isinstance(summary, str):
            problems.add(summary)
        else:
            gathering.add(split, case, summary)
        progress(done, len(cases))
    inspection.problems = [*problems.found, *problems_of(inspection)]
    inspection.warnings = warnings_of(inspection)
    return inspection


def _held(label: int | float | tuple[float, ...] | NDArray[np.int64]) -> NDArray[Any]:
    """Voxels of each class, a one at the case's class or labels, or the number (or time and event) to predict."""
    if isinstance(label, np.ndarray):
        return label
    if isinstance(label, tuple):
        return np.array([0 if value != value else value for value in label])
    return np.bincount([label]) if isinstance(label, int) else np.array([label])


class _Gathering:
    """Adds cases to an inspection, one after the other."""

    def __init__(self, inspection: Inspection):
        self._to = inspection
        self._seen: dict[bytes, tuple[str, Case, bytes]] = {}

    def add(self, split: str, case: Case, summary: Summary) -> None:
        counts, width = self._to.splits[split], len(self._to.class_names)
        maps = isinstance(summary.label, np.ndarray)
        held = _held(summary.label)
        counts.cases += 1
        self._to.deepest = max(self._to.deepest, summary.deepest)
        counts.classes = counts.classes or [0] * width
        counts.voxels = counts.voxels or [0] * (width if maps else 0)
        if isinstance(summary.label, tuple) and not width:
            counts.events = (counts.events or 0) + int(summary.label[1])  # a time, and whether the event came
        for value in np.flatnonzero(held).tolist() if width else ():
            counts.classes[value] += 1
            if maps:
                counts.voxels[value] += int(held[value])
        if maps and not held[1:].any():
            counts.empty.append(case.name)
        if len(summary.shape) > 1:
            self._add_values(counts, case, summary)
        label = self._to.class_names[summary.label] if isinstance(summary.label, int) else ""
        alike = sum(shown.split == split and shown.label == label for shown in self._to.pictures)
        if summary.picture and alike < PICTURES["map" if maps else "class"]:
            self._to.pictures.append(Shown(summary.picture, split, case.name, label))
        if len(summary.shape) > 1 and np.array_equal(summary.low, summary.high):
            self._to.constant.append(case)  # such images are all alike, and reported as constant only
        else:
            first_split, first, its_label = self._seen.setdefault(summary.digest, (split, case, held.tobytes()))
            if first is not case:
                self._to.twins.append(Twins(first, first_split, case, split, its_label == held.tobytes()))

    def _add_values(self, counts: Split, case: Case, summary: Summary) -> None:
        self._to.shapes[summary.shape] += 1
        self._to.first_with.setdefault(summary.shape[0], case)
        if not summary.placed:
            self._to.unplaced.append(case)
        if summary.spacing:
            self._to.spacings[tuple(float(f"{length:.3g}") for length in summary.spacing)] += 1
        while len(counts.channels) < summary.shape[0]:
            counts.channels.append(Channel())
        for place in range(summary.shape[0]):
            counts.channels[place].add(summary, place)
