# SPDX-License-Identifier: Apache-2.0
"""Tables: numeric and categorical columns, missing cells, splits."""

import difflib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PrivateAttr, field_validator, model_validator

from medpfl.core.errors import DataError
from medpfl.data.cells import PLACE, Cells, joined, read_cells, shown_names
from medpfl.data.columns import Column, Role, columns_of
from medpfl.data.contract import Case, Dataset, Item, Listing
from medpfl.data.declared import SPLITS, Problems, SplitRule, canonical
from medpfl.data.numbers import not_known
from medpfl.data.outcome import KEYS, Answer, Answered, Value, strata
from medpfl.data.owners import Owners, of_tables
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.samples import Samples, SiteData, to_tensor
from medpfl.data.splits import Groups, check_listing, choose
from medpfl.data.subgroups import Described
from medpfl.data.table.coding import ROW, Feature, coded, filled, lookup, numbers_of, numeric, typical
from medpfl.data.table.new import TablePreparation
from medpfl.data.target import Target

if TYPE_CHECKING:
    import pandas as pd


class Table(Answered, Cells, Described, Dataset):
    """One row a patient (or visit), read from CSV, TSV or Parquet files.

    ``features`` maps a column to ``number`` or to the list of its categories (coded one-hot without the first).
    ``missing_rows``: what to do with rows that lack a used value: ``refuse`` them, ``drop`` them, or ``impute``
    features by the training part's median (numbers) and most frequent category; a label, group or split is never
    imputed, so rows that lack one are refused then. ``units``: of columns of numbers, for hospitals to compare.
    """

    form: ClassVar[str] = "rows"
    targets: ClassVar[tuple[Target, ...]] = (Target.CLASS, Target.VALUE, Target.LABELS, Target.SURVIVAL)
    preparation: ClassVar[type[Preparation]] = TablePreparation
    agreed: ClassVar[tuple[str, ...]] = ("features", "units", "value")

    kind: Literal["table"]
    files: list[str] = Field(min_length=1)
    missing_rows: Literal["drop", "refuse", "impute"] = "refuse"
    features: dict[str, Feature] = Field(min_length=1)
    units: dict[str, str] = Field(default={})
    split: SplitRule = SplitRule(stratify=True)
    _read: "TableData | None" = PrivateAttr(default=None)

    @field_validator("files")
    @classmethod
    def _no_file_twice(cls, files: list[str]) -> list[str]:
        places = [os.path.normpath(file) for file in files]
        for file, place in zip(files, places, strict=True):
            if places.count(place) > 1:
                raise ValueError(f"the file '{file}' is listed twice; every one of its rows would count twice")
        return files

    @model_validator(mode="after")
    def _consistent(self) -> "Table":
        self.split.need_group()
        for column in self.answers:
            if column in self.features:
                raise ValueError(f"the column to predict, '{column}', is also a feature")
        numbers = [*numeric(self.features), *self.answer_numbers]
        for column in self.units:
            if column not in numbers:
                close = difflib.get_close_matches(column, numbers, 1)
                hint = f"; did you mean '{close[0]}'?" if close else ""
                raise ValueError(f"'units' names '{column}', which is no column of numbers that is used{hint}")
        split = [self.split.group, self.split.column, *self.split.folds]
        self.check_codes([*self.features, *self.answers, *self.described_by, *(one for one in split if one)])
        missing = not_known(self.missing, self.decimal == ",")
        for column, values in self._declared_values().items():
            meant = {canonical(value) for value in self.codes.get(column, {}).values()}  # which no file holds
            if both := [one for one in values if missing(str(one)) and canonical(one) not in meant]:
                raise ValueError(
                    f"'missing' has {both[0]!r}, so it means not known, and it is a declared value of '{column}', too; "
                    "leave it out of one of the two (cells that are '', '?' or 'NA' are missing if nothing is said)"
                )
        if not (self.label or self.survival) and "split" in self.model_fields_set and self.split.stratify:
            raise ValueError("'stratify' needs 'label' or 'survival'; numbers have no class to stratify by")
        return self

    def _declared_values(self) -> dict[str, list[Value]]:
        """Column to the values that it may hold, of those that do not hold numbers."""
        found: dict[str, list[Value]] = {name: kind for name, kind in self.features.items() if kind != "number"}
        if self.label:
            found[self.label.column] = [one for values in self.label.classes.values() for one in values]
        if self.several:
            found |= {column: [*self.several.yes, *self.several.no] for column in self.several.used()}
        if self.survival:
            found[self.survival.event] = [*self.survival.yes, *self.survival.no]
        return found

    def cases(self, problems: Problems) -> Listing:
        data = self._data(problems)
        return _listing(data.rows, data.groups, data.splits)

    def shown_columns(self, listing: Listing) -> list[Column]:
        roles: dict[str, Role] = {
            name: "number" if kind == "number" else "categories" for name, kind in self.features.items()
        }
        roles |= {name: "number" if name in self.answer_numbers else "label" for name in self.answers}
        others: list[tuple[str | None, Role]] = [(self.split.group, "group"), (self.split.column, "split")]
        for column, role in others:
            if column:
                roles.setdefault(column, role)
        return columns_of(self.cells(), roles, listing)

    def described(self) -> dict[str, dict[str, str]]:
        found: dict[str, dict[str, str]] = {column: {} for column in self.described_by}
        for name, shown in zip(self.files, shown_names(self.files), strict=True):
            for frame in read_cells(Path(self._folder, name), shown, self, Problems(keep=True), self.described_by):
                rows = [f"{shown}:{place}" for place in frame[PLACE]]
                for column, told in found.items():
                    told.update(zip(rows, frame[column].fillna(""), strict=True))
        return found

    def owners(self) -> Owners:
        return of_tables([self._folder / file for file in self.files], self)

    def read(self, case: "RowCase") -> Item:
        """One row: F values as numbers, categories one-hot, before imputing and standardising (NaN: missing)."""
        data = self._data(Problems())
        answer = data.targets[case.row].tolist()
        return Item(data.raw[case.row], tuple(answer) if isinstance(answer, list) else answer)

    def load(self, spec: Spec) -> SiteData:
        """All rows coded, imputed and standardised.

        Raises:
            DataError: with the file, the line and the column, expected and got; or the dataset declares no such target.
        """
        if spec.target is not self.target:
            key = KEYS[spec.target]
            sentence = f"the job's task learns {spec.target.told}: it needs a table with '{key}', which is not declared"
            raise DataError(f"{self._folder / self.files[0]}: {sentence}", public=sentence)
        data = read_table(self)  # afresh: a data check may have kept the rows without problems only
        splits = {split: _samples(data, rows) for split, rows in data.splits.items()}
        return SiteData(splits, data.class_names, data.preparation)

    def cells(self) -> "pd.DataFrame":
        """The used columns as text, NaN where missing, by the rows' names; also rows that are then dropped."""
        return _read_files(self, Problems(keep=True)).set_index(ROW)

    def _data(self, problems: Problems) -> "TableData":
        if self._read is None:
            self._read = read_table(self, problems)
        return self._read


@dataclass(frozen=True)
class RowCase(Case):
    """One row. ``row``: its index in ``TableData``."""

    row: int


@dataclass(frozen=True)
class TableData:
    """A table as numbers.

    Attributes:
        raw: N x F float64 as coded; NaN where a value is missing.
        features: the same, imputed, and standardised with the training part's mean and standard deviation.
        targets: N class indices (int64) or numbers (float64), or N x ... labels or times with events (float64).
        splits: indices of each split.
        rows: N names of the rows ("file:line"), for messages and prediction files.
        groups: N groups, a row's name where none are declared.
        columns: F feature names.
        class_names: names of the classes; none where a number is predicted.
        preparation: how new rows are read and prepared alike; see ``new_rows``.
    """

    raw: NDArray[np.float64]
    features: NDArray[np.float64]
    targets: NDArray[Any]
    target: Target
    splits: dict[str, list[int]]
    rows: list[str]
    groups: list[str]
    columns: list[str]
    class_names: list[str]
    preparation: TablePreparation


def _samples(data: TableData, rows: list[int]) -> Samples:
    import torch

    return Samples(
        to_tensor(data.features[rows], torch.float32),
        to_tensor(data.targets[rows], torch.int64 if data.target is Target.CLASS else torch.float32),
        np.arange(len(rows)),
        [data.rows[index] for index in rows],
        len(data.class_names),
        owners=[data.groups[index] for index in rows],
    )


def read_table(dataset: Table, problems: Problems | None = None) -> TableData:
    """Read, check, code, impute and standardise a declared table; rows with problems are left out where they are kept.

    Raises:
        DataError: with the file, the line and the column, expected and got.
    """
    problems = problems or Problems()
    source = ", ".join(dataset.files)
    frame = _known(dataset, _read_files(dataset, problems), problems)
    if frame.empty:
        raise DataError(f"{source}: no row is left once rows with missing values are dropped")
    bad = np.zeros(len(frame), dtype=bool)
    answers = _answers(dataset, frame, bad, problems)
    columns, raw = coded(dataset.features, frame, bad, problems)
    answers = [answer for answer, wrong in zip(answers, bad.tolist(), strict=True) if not wrong]
    if bad.any():
        frame, raw = frame[~bad].reset_index(drop=True), raw[~bad]
    if frame.empty:
        raise DataError(f"{source}: no row can be used")
    rows = frame[ROW].tolist()
    named_by = Groups()
    groups = list(map(named_by.named, frame[dataset.split.group])) if dataset.split.group else None
    named = frame[dataset.split.column].tolist() if dataset.split.column else None
    classes = strata(answers, dataset.target)
    splits = choose(dataset.split, rows, problems, source=source, groups=groups, classes=classes, named=named)
    owners = groups or rows
    check_listing(_listing(rows, owners, splits), source, problems)
    imputed = {}
    if dataset.missing_rows == "impute":
        imputed = typical(dataset.features, frame.iloc[splits["train"]], source, problems)
    values = filled(dataset.features, raw, imputed)
    train = values[splits["train"]]
    mean = train.mean(axis=0) if len(train) else np.zeros(values.shape[1])
    deviation = train.std(axis=0, ddof=1) if len(train) > 1 else np.zeros(train.shape[1])
    # A column that is constant in the training part carries nothing; dividing by its zero would blow the others up. Of
    # equal fractions such as 0.1 the deviation is no zero but 1e-17, because their mean is rounded.
    constant = (train == train[:1]).all(axis=0)
    scale = np.where((deviation > 0) & ~constant, deviation, 1.0)
    preparation = TablePreparation(
        cells=Cells.model_validate(dataset.model_dump(include=set(Cells.model_fields))),
        features=dataset.features,
        units=dataset.units,
        label=dataset.answers[0],
        answers=dataset.answers if len(dataset.answers) > 1 else [],
        imputed=imputed,
        mean=mean.tolist(),
        scale=scale.tolist(),
    )
    names = dataset.class_names()
    coded_rows = (values - mean) / scale
    targets = np.array(answers)
    return TableData(raw, coded_rows, targets, dataset.target, splits, rows, owners, columns, names, preparation)


def _answers(dataset: Table, frame: "pd.DataFrame", bad: NDArray[np.bool_], problems: Problems) -> list[Answer]:
    """Of each row; of a row with a problem, which is marked in ``bad``, anything."""
    if dataset.label:
        found: list[Answer] = lookup(
            frame, dataset.label.column, list(dataset.label.classes.values()), bad, problems
        ).tolist()
        return found
    if dataset.value:
        return [*numbers_of(frame, dataset.value, bad, problems).tolist()]
    assert dataset.outcome
    answers: list[Answer] = []
    columns = dataset.answers
    for row, cells in enumerate(frame[columns].itertuples(index=False, name=None)):
        try:
            answers.append(dataset.outcome.read(dict(zip(columns, cells, strict=True))))
        except ValueError as error:
            bad[row] = True
            problems.add(f"{frame[ROW].iloc[row]}: {error}")
            answers.append(0)
    return answers


def _listing(rows: list[str], groups: list[str], splits: dict[str, list[int]]) -> Listing:
    return {split: [RowCase(rows[i], groups[i], rows[i], i) for i in splits[split]] for split in SPLITS}


def _read_files(dataset: Table, problems: Problems) -> "pd.DataFrame":
    given = _given(dataset)
    numbers = (set(numeric(dataset.features)) - set(given)) | set(dataset.answer_numbers)
    frames = []
    for name, shown in zip(dataset.files, shown_names(dataset.files), strict=True):
        path = Path(dataset._folder, name)
        for frame in read_cells(path, shown, dataset, problems, [*dataset.features, *dataset.answers, *given], numbers):
            frame[ROW] = [f"{shown}:{place}" for place in frame[PLACE]]
            frames.append(frame)
    return joined(frames)


def _given(dataset: Table) -> list[str]:
    """The columns that are never imputed."""
    answers = [] if dataset.several else dataset.answers  # whether a case has a label may be unknown
    return [column for column in (*answers, dataset.split.group, dataset.split.column) if column]


def _known(dataset: Table, frame: "pd.DataFrame", problems: Problems) -> "pd.DataFrame":
    """The rows that lack no value that cannot be imputed; the others are told of, or dropped if that is declared."""
    impute = dataset.missing_rows == "impute"
    used = list(dict.fromkeys([*([] if impute else dataset.features), *_given(dataset)]))
    missing = frame[used].isna().to_numpy()
    unknown = missing.any(axis=1)
    if unknown.any() and dataset.missing_rows != "drop":
        mend = (
            "a label, group or split is never imputed, so remove such rows"
            if impute
            else "declare 'missing_rows: drop' to leave such rows out, or 'impute'"
        )
        rows = frame[ROW].tolist()
        for row in np.flatnonzero(unknown).tolist():
            column = used[int(missing[row].argmax())]
            problems.add(
                f"{rows[row]}: column '{column}' is missing (rows that lack a value: {int(unknown.sum())}); {mend}"
            )
    return frame.iloc[np.flatnonzero(~unknown)].reset_index(drop=True) if unknown.any() else frame
