# SPDX-License-Identifier: Apache-2.0
"""What is known of a declared dataset once all of it was read."""

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from medpfl.check.pictures import Picture
from medpfl.check.summary import Summary
from medpfl.data.columns import Column
from medpfl.data.contract import Case
from medpfl.data.declared import SPLITS


@dataclass
class Channel:
    """Values of one channel (or column) in one split; percentiles come from a sample of them."""

    known: int = 0
    missing: int = 0
    low: float = np.inf
    high: float = -np.inf
    total: float = 0.0
    samples: list[NDArray[np.float32]] = field(default_factory=list)

    def add(self, summary: Summary, place: int) -> None:
        self.known += int(summary.known[place])
        self.missing += int(summary.missing[place])
        self.low = float(np.fmin(self.low, summary.low[place]))
        self.high = float(np.fmax(self.high, summary.high[place]))
        self.total += float(summary.total[place])
        self.samples.append(summary.sample[place])

    @property
    def mean(self) -> float:
        return self.total / self.known if self.known else np.nan

    def sample(self) -> NDArray[np.float32]:
        return np.concatenate(self.samples) if self.samples else np.zeros(0, np.float32)


@dataclass
class Split:
    """Counts of one split.

    Attributes:
        cases: cases that could be read.
        groups: different groups (patients) among all listed cases.
        classes: cases of each class, or that hold it.
        events: cases whose event came; None where none is to be predicted.
        voxels: of each class, for label maps.
        empty: names of label maps that hold the first class only.
        channels: one entry a channel; none for tables, whose columns are told apart.
    """

    listed: int = 0
    cases: int = 0
    groups: int = 0
    classes: list[int] = field(default_factory=list)
    events: int | None = None
    voxels: list[int] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    channels: list[Channel] = field(default_factory=list)


@dataclass(frozen=True)
class Shown:
    """A case's picture with its split, name and class ("" for label maps)."""

    picture: Picture
    split: str
    name: str
    label: str


@dataclass(frozen=True)
class Twins:
    """Two cases with the same content, each with its split."""

    first: Case
    first_split: str
    second: Case
    second_split: str
    same_label: bool


@dataclass
class Inspection:
    """What was found in a dataset. Problems would make a job fail or its result wrong; warnings are worth a look.

    ``first_with``: the first case of each number of channels. ``deepest``: see ``Summary``, of all cases. ``owners``:
    how many cases each declared group has; none where none are declared. ``unplaced``: see ``Item.placed``.
    """

    name: str
    kind: str
    class_names: list[str] = field(default_factory=list)
    splits: dict[str, Split] = field(default_factory=lambda: {split: Split() for split in SPLITS})
    shapes: Counter[tuple[int, ...]] = field(default_factory=Counter)
    first_with: dict[int, Case] = field(default_factory=dict)
    spacings: Counter[tuple[float, ...]] = field(default_factory=Counter)
    columns: list[Column] = field(default_factory=list)
    pictures: list[Shown] = field(default_factory=list)
    twins: list[Twins] = field(default_factory=list)
    constant: list[Case] = field(default_factory=list)
    unplaced: list[Case] = field(default_factory=list)
    deepest: int = 0
    owners: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def events(self) -> bool:
        """Whether times until an event are to be predicted."""
        return any(split.events is not None for split in self.splits.values())
