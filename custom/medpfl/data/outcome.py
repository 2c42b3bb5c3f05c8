# SPDX-License-Identifier: Apache-2.0
"""What the answer to a case is read from: a column of classes, several columns of labels, a number, or a time and
whether an event ended it. All kinds of datasets that read answers from columns (or arrays) declare them alike."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field, field_validator, model_validator

from medpfl.data.declared import LabelColumn, Strict, canonical, distinct, no_truths
from medpfl.data.numbers import LARGEST, no_number
from medpfl.data.target import Target

if TYPE_CHECKING:
    from torch import Tensor

Value = str | int | float
Answer = int | float | tuple[float, ...]
"""A class's index; a number; of each label 1, 0 or NaN (not known); or a time and whether the event came (1 or 0)."""


KEYS = {Target.CLASS: "label", Target.LABELS: "several", Target.VALUE: "value", Target.SURVIVAL: "survival"}
"""Target to the key of the site file that declares it."""


class Outcome(Strict):
    """Where an answer stands, and how it is coded there."""

    target: ClassVar[Target]
    yes: list[Value] = Field(default=[1], min_length=1)
    no: list[Value] = Field(default=[0], min_length=1)

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, content: Any) -> Any:
        """YAML reads the keys yes and no as truth values where they are not in quotation marks."""
        if not isinstance(content, dict):
            return content
        written = [("no", "yes")[key] if isinstance(key, bool) else key for key in content]
        for key in written:
            if written.count(key) > 1:
                raise ValueError(f"the key '{key}' is there twice")
        return dict(zip(written, content.values(), strict=True))

    @field_validator("yes", "no", "unknown", mode="before", check_fields=False)
    @classmethod
    def _no_truths(cls, values: Any) -> Any:
        """Before they become numbers, which a table that says yes and no does not hold."""
        no_truths(values if isinstance(values, list) else ())
        return values

    @model_validator(mode="after")
    def _two_answers(self) -> Outcome:
        distinct([*self.yes, *self.no, *self.unsure()])
        return self

    def unsure(self) -> list[Value]:
        """Values that mean neither."""
        return []

    @abstractmethod
    def names(self) -> list[str]:
        """Names of the labels; none where there are no classes."""

    @abstractmethod
    def used(self) -> list[str]:
        """The columns."""

    @abstractmethod
    def read(self, cells: Mapping[str, Any]) -> Answer:
        """The answer of one case.

        Raises:
            ValueError: a sentence that names the column, expected and got.
        """

    def _yes(self, column: str, cell: Any) -> float:
        """1, 0, or NaN where the cell says that it is not known."""
        text = canonical(cell)
        for values, meant in ((self.yes, 1.0), (self.no, 0.0), (self.unsure(), math.nan)):
            if text in map(canonical, values):
                return meant
        declared = ", ".join(map(str, (*self.yes, *self.no, *self.unsure())))
        raise ValueError(f"column '{column}': '{cell}' is not among the declared values ({declared})")


class Several(Outcome):
    """Several labels, each of which a case may have or not. ``columns``: label to its column; ``yes`` and ``no``: what
    stands in them; ``unknown``: what means, as an empty cell does, that nobody looked or could tell."""

    target: ClassVar[Target] = Target.LABELS
    columns: dict[str, str] = Field(min_length=2)
    unknown: list[Value] = Field(default=[])

    @field_validator("columns")
    @classmethod
    def _one_column_a_label(cls, columns: dict[str, str]) -> dict[str, str]:
        read = list(columns.values())
        for column in read:
            if read.count(column) > 1:
                raise ValueError(f"the column '{column}' is named for two labels, which would always be equal")
        return columns

    def unsure(self) -> list[Value]:
        return self.unknown

    def names(self) -> list[str]:
        return list(self.columns)

    def used(self) -> list[str]:
        return list(self.columns.values())

    def read(self, cells: Mapping[str, Any]) -> tuple[float, ...]:
        return tuple(math.nan if empty(cells[one]) else self._yes(one, cells[one]) for one in self.columns.values())


class Survival(Outcome):
    """``time``: the column with the time until the event, or until the patient was last seen without it, in any unit;
    ``event``: the column that says by ``yes`` and ``no`` whether the event came."""

    target: ClassVar[Target] = Target.SURVIVAL
    time: str
    event: str

    def names(self) -> list[str]:
        return []

    def used(self) -> list[str]:
        return [self.time, self.event]

    def read(self, cells: Mapping[str, Any]) -> tuple[float, float]:
        for column in self.used():
            if empty(cells[column]):
                raise ValueError(f"column '{column}' is missing")
        time = number(self.time, cells[self.time])
        if time < 0:
            raise ValueError(f"column '{self.time}': expected a time of at least 0, got {time:g}")
        return time, self._yes(self.event, cells[self.event])


class Answered(Strict):
    """What is to be predicted, of a dataset whose cases have one answer: one of the four.

    ``label``: a column with classes; ``several``: columns with labels; ``value``: a column with a number, taken as it
    is; ``survival``: a column with times and one with events.
    """

    label: LabelColumn | None = None
    several: Several | None = None
    value: str | None = None
    survival: Survival | None = None

    @model_validator(mode="after")
    def _one_answer(self) -> Answered:
        one_of(label=self.label, several=self.several, value=self.value, survival=self.survival)
        return self

    @property
    def outcome(self) -> Outcome | None:
        """What is to be predicted, where it is neither a class nor a number."""
        return self.several or self.survival

    @property
    def answers(self) -> list[str]:
        """The columns (or arrays) to predict."""
        if self.outcome:
            return self.outcome.used()
        return [self.label.column if self.label else str(self.value)]

    @property
    def answer_numbers(self) -> list[str]:
        """Those of them that hold numbers."""
        return [column for column in (self.value, self.survival.time if self.survival else None) if column]

    @property
    def target(self) -> Target:
        """What they hold."""
        if self.outcome:
            return self.outcome.target
        return Target.CLASS if self.label else Target.VALUE

    def class_names(self) -> list[str]:
        """Names of the classes or labels in their order; none where the answer is a number or a time."""
        return list(self.label.classes) if self.label else self.outcome.names() if self.outcome else []


def empty(cell: Any) -> bool:
    """Whether a cell says nothing: empty text, None or NaN."""
    return cell is None or (isinstance(cell, str) and not cell.strip()) or cell != cell


def number(column: str, cell: Any) -> float:
    """A cell as a number that single precision holds.

    Raises:
        ValueError: it is none.
    """
    try:
        found = math.nan if isinstance(cell, str) and "_" in cell else float(cell)  # not 15 of 1_5
    except (TypeError, ValueError):
        found = math.nan
    if not abs(found) <= LARGEST:
        raise ValueError(f"column '{column}': {no_number(cell)}")
    return found


def one_of(**declared: object | None) -> None:
    """Raises ValueError unless exactly one of the keys is declared."""
    given = [key for key, value in declared.items() if value is not None]
    if len(given) != 1:
        *first, last = (f"'{key}'" for key in declared)
        got = " and ".join(f"'{key}'" for key in given) or "none of them"
        raise ValueError(f"expected one of {', '.join(first)} or {last} (what is to be predicted), got {got}")


def read_answer(
    cells: Mapping[str, Any], label: LabelColumn | None, value: str | None, outcome: Outcome | None
) -> Answer:
    """The answer of one case, of whichever is declared.

    Raises:
        ValueError: a sentence that names the column, expected and got.
    """
    if outcome is not None:
        return outcome.read(cells)
    if value is not None:
        return number(value, cells[value])
    assert label is not None
    found = label.index().get(canonical(cells[label.column]))
    if found is None:
        raise ValueError(
            f"column '{label.column}': '{cells[label.column]}' is not among the declared values ({label.declared()})"
        )
    return found


def tensor_of(answers: Sequence[Answer], target: Target) -> Tensor:
    """The answers of a split as ``Target`` has them."""
    import torch

    return torch.tensor(answers, dtype=torch.int64 if target is Target.CLASS else torch.float32)


def strata(answers: Sequence[Answer], target: Target) -> list[int] | None:
    """By what cases are stratified: their class, or whether the event came; None where there is nothing of the kind."""
    if target is Target.CLASS:
        return [one for one in answers if isinstance(one, int)]
    if target is Target.SURVIVAL:
        return [int(one[1]) for one in answers if isinstance(one, tuple)]
    return None
