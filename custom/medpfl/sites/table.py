# SPDX-License-Identifier: Apache-2.0
"""Tables: numeric and categorical columns, missing cells, splits."""

import csv
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PrivateAttr, field_validator, model_validator

from medpfl.core.errors import DataError
from medpfl.sites.declared import (
    SPLITS,
    Case,
    Dataset,
    Item,
    LabelColumn,
    Listing,
    Problems,
    SplitRule,
    canonical,
    distinct,
)
from medpfl.sites.splits import check_listing, choose


def _feature(value: Any) -> Any:
    """What a feature is declared as; one sentence where pydantic would give one per member of the union."""
    if value == "number":
        return value
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError("expected 'number' or a list of at least 2 categories")
    distinct(value)
    return value


Feature = Annotated[Literal["number"] | list[str | int | float], BeforeValidator(_feature)]


class Table(Dataset):
    """One row a patient (or visit), read from CSV-like files.

    ``features`` maps a column to ``number`` or to the list of its categories (coded one-hot without the first).
    ``missing``: cell texts that mean "not known"; ``missing_rows``: what to do with rows that lack a used value.
    """

    kind: Literal["table"]
    files: list[str] = Field(min_length=1)
    separator: str = Field(default=",", min_length=1, max_length=1)
    columns: list[str] | None = None
    missing: list[str] = Field(default=["", "?", "NA"])
    missing_rows: Literal["drop", "refuse"] = "refuse"
    features: dict[str, Feature] = Field(min_length=1)
    label: LabelColumn
    split: SplitRule = SplitRule(stratify=True)
    _read: "TableData | None" = PrivateAttr(default=None)

    @field_validator("separator")
    @classmethod
    def _separates(cls, separator: str) -> str:
        if separator in '\0\r\n"':
            raise ValueError("expected a comma, semicolon, tab or the like")
        return separator

    @field_validator("columns")
    @classmethod
    def _named_once(cls, columns: list[str] | None) -> list[str] | None:
        for column in columns or []:
            if columns and columns.count(column) > 1:
                raise ValueError(f"the column '{column}' is listed twice")
        return columns

    @model_validator(mode="after")
    def _label_is_no_feature(self) -> "Table":
        if self.label.column in self.features:
            raise ValueError(f"the column to predict, '{self.label.column}', is also a feature")
        return self

    def class_names(self) -> list[str]:
        return list(self.label.classes)

    def cases(self, problems: Problems) -> Listing:
        data = self._data(problems)
        return _listing(data.rows, data.groups, data.splits)

    def read(self, case: "RowCase") -> Item:
        """One row: F values as numbers, categories one-hot, before standardisation."""
        data = self._data(Problems())
        return Item(data.raw[case.row], int(data.classes[case.row]))

    def load(self) -> "TableData":
        """Read, check, code and standardise all rows.

        Raises:
            DataError: with the file, the line and the column, expected and got.
        """
        return self._data(Problems())

    def cells(self) -> pd.DataFrame:
        """The used columns as text, NaN where missing, by the rows' names; also rows that are then dropped."""
        frames = [_read_file(self, name, Problems(keep=True)) for name in self.files]
        return pd.concat(frames, ignore_index=True).set_index(_ROW)

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
        raw: N x F float64 as coded.
        features: the same, standardised with the training part's mean and standard deviation.
        classes: N class indices.
        splits: indices of each split.
        rows: N names of the rows ("file:line"), for messages and prediction files.
        groups: N groups, a row's name where none are declared.
        columns: F feature names.
        class_names: names of the classes.
        preparation: the training part's statistics.
    """

    raw: NDArray[np.float64]
    features: NDArray[np.float64]
    classes: NDArray[np.int64]
    splits: dict[str, list[int]]
    rows: list[str]
    groups: list[str]
    columns: list[str]
    class_names: list[str]
    preparation: dict[str, Any]


def read_table(dataset: Table, problems: Problems | None = None) -> TableData:
    """Read, check, code and standardise a declared table; rows with problems are left out where they are kept.

    Raises:
        DataError: with the file, the line and the column, expected and got.
    """
    problems = problems or Problems()
    source = ", ".join(dataset.files)
    frame = pd.concat([_read_file(dataset, name, problems) for name in dataset.files], ignore_index=True)
    used = _used(dataset)
    unknown = frame[used].isna().any(axis=1)
    if unknown.any() and dataset.missing_rows == "refuse":
        for row in np.flatnonzero(unknown.to_numpy()).tolist():
            column = next(c for c in used if pd.isna(frame.at[row, c]))
            problems.add(
                f"{frame.at[row, _ROW]}: column '{column}' is missing ({int(unknown.sum())} rows lack a value); "
                "declare 'missing_rows: drop' to leave such rows out"
            )
    frame = frame[~unknown].reset_index(drop=True)
    if frame.empty:
        raise DataError(f"{source}: no row is left once rows with missing values are dropped")
    classes = _lookup(frame, dataset.label.column, list(dataset.label.classes.values()), problems)
    columns, values = _features(dataset, frame, problems)
    good = (classes >= 0) & np.isfinite(values).all(axis=1)
    frame, classes, values = frame[good].reset_index(drop=True), classes[good], values[good]
    if frame.empty:
        raise DataError(f"{source}: no row can be used")
    rows = frame[_ROW].tolist()
    groups = frame[dataset.split.group].tolist() if dataset.split.group else None
    named = frame[dataset.split.column].tolist() if dataset.split.column else None
    splits = choose(dataset.split, rows, problems, source=source, groups=groups, classes=classes.tolist(), named=named)
    owners = groups or rows
    check_listing(_listing(rows, owners, splits), source, problems)
    train = values[splits["train"]]
    mean = train.mean(axis=0) if len(train) else np.zeros(values.shape[1])
    deviation = train.std(axis=0, ddof=1) if len(train) > 1 else np.zeros(train.shape[1])
    # A column that is constant in the training part carries nothing; dividing by its zero would blow the others up.
    scale = np.where(deviation > 0, deviation, 1.0)
    preparation = {"columns": columns, "mean": mean.tolist(), "scale": scale.tolist()}
    names = list(dataset.label.classes)
    return TableData(values, (values - mean) / scale, classes, splits, rows, owners, columns, names, preparation)


def _listing(rows: list[str], groups: list[str], splits: dict[str, list[int]]) -> Listing:
    return {split: [RowCase(rows[i], groups[i], rows[i], i) for i in splits[split]] for split in SPLITS}


def _read_file(dataset: Table, name: str, problems: Problems) -> pd.DataFrame:
    """The used columns as text, NaN where missing, and ``_ROW``, the place of each row."""
    path = Path(dataset._folder, name)
    lines = _read_lines(path, dataset.separator)
    columns = dataset.columns or (lines.pop(0)[1] if lines else [])
    if not lines:
        raise DataError(f"{path}: it has no rows")
    for line, cells in lines:
        # pandas would cut longer rows and fill shorter ones: a comma as decimal sign would shift columns unseen.
        if len(cells) != len(columns):
            problems.add(f"{path}:{line}: expected {len(columns)} columns, got {len(cells)}")
    lines = [(line, cells) for line, cells in lines if len(cells) == len(columns)]
    wanted = _used(dataset)
    for column in wanted:
        if columns.count(column) != 1:
            problem = "is there more than once" if column in columns else "is missing"
            raise DataError(f"{path}: column '{column}' {problem}; the file has: {', '.join(columns)}")
    positions = [columns.index(column) for column in wanted]
    frame = pd.DataFrame([[cells[i] for i in positions] for _, cells in lines], columns=wanted, dtype=str)
    frame = frame.mask(frame.isin(dataset.missing))
    alike = [other for other in dataset.files if Path(other).name == path.name]
    shown = path.name if len(alike) == 1 else name
    frame[_ROW] = [f"{shown}:{line}" for line, _ in lines]
    return frame


_ROW = "\n"  # the frame's own column; a name that no file's column has


def _used(dataset: Table) -> list[str]:
    """The columns that are read, each once."""
    others = [column for column in (dataset.split.group, dataset.split.column) if column]
    return list(dict.fromkeys([*dataset.features, dataset.label.column, *others]))


def _read_lines(path: Path, separator: str) -> list[tuple[int, list[str]]]:
    """Line number and stripped cells of every line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, skipinitialspace=separator != " ")
            rows = ((reader.line_num, [cell.strip() for cell in cells]) for cells in reader)
            return [(line, cells) for line, cells in rows if cells not in ([], [""])]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: it is not a text file in UTF-8: {error}") from error
    except (csv.Error, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}") from error


def _features(dataset: Table, frame: pd.DataFrame, problems: Problems) -> tuple[list[str], NDArray[np.float64]]:
    """Names and N x F values; NaN in a row with a problem."""
    names: list[str] = []
    parts: list[NDArray[np.float64]] = []
    for column, kind in dataset.features.items():
        if kind == "number":
            names.append(column)
            parts.append(_numbers(frame, column, problems))
            continue
        positions = _lookup(frame, column, [[category] for category in kind], problems)
        for position, category in enumerate(kind[1:], start=1):
            names.append(f"{column}={category}")
            parts.append(np.where(positions < 0, np.nan, positions == position))
    return names, np.stack(parts, axis=1)


def _numbers(frame: pd.DataFrame, column: str, problems: Problems) -> NDArray[np.float64]:
    numbers = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
    for row in np.flatnonzero(~np.isfinite(numbers)).tolist():
        problems.add(
            f"{frame.at[row, _ROW]}: column '{column}': expected a number, got '{frame.at[row, column]}'"
            " (list it under 'missing' if it means not known)"
        )
    return numbers


def _lookup(
    frame: pd.DataFrame, column: str, values: list[list[str | int | float]], problems: Problems
) -> NDArray[np.int64]:
    """Position of each cell in ``values``, -1 where it is not there; "3", "3.0" and 3 are the same value."""
    positions = {canonical(value): position for position, group in enumerate(values) for value in group}
    found = np.array([positions.get(canonical(cell), -1) for cell in frame[column]], dtype=np.int64)
    declared = ", ".join(str(value) for group in values for value in group)
    for row in np.flatnonzero(found < 0).tolist():
        problems.add(
            f"{frame.at[row, _ROW]}: column '{column}': '{frame.at[row, column]}' is not among the declared values "
            f"({declared})"
        )
    return found
