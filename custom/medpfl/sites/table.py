# SPDX-License-Identifier: Apache-2.0
"""Read a table a site file declares: numeric and categorical columns, missing cells, splits."""

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.sites.site_file import Table, canonical
from medpfl.sites.splits import split_indices


@dataclass(frozen=True)
class TableData:
    """A table as numbers.

    Attributes:
        features: N x F float64, standardised with the training part's mean and standard deviation.
        classes: N class indices.
        splits: indices of each split.
        rows: N names of the rows ("file:line"), for messages and prediction files.
        columns: F feature names.
        class_names: names of the classes.
    """

    features: NDArray[np.float64]
    classes: NDArray[np.int64]
    splits: dict[str, list[int]]
    rows: list[str]
    columns: list[str]
    class_names: list[str]


def read_table(dataset: Table) -> TableData:
    """Read, check, code and standardise a declared table.

    Raises:
        DataError: with the file, the line and the column, expected and got.
    """
    frame = pd.concat([_read_file(dataset, name) for name in dataset.files], ignore_index=True)
    used = _used(dataset)
    unknown = frame[used].isna().any(axis=1)
    if unknown.any() and dataset.missing_rows == "refuse":
        row = int(np.flatnonzero(unknown.to_numpy())[0])
        column = next(c for c in used if pd.isna(frame.at[row, c]))
        raise DataError(
            f"{frame.at[row, _ROW]}: column '{column}' is missing ({int(unknown.sum())} rows lack a value); "
            "declare 'missing_rows: drop' to leave such rows out"
        )
    frame = frame[~unknown].reset_index(drop=True)
    if frame.empty:
        raise DataError(f"{', '.join(dataset.files)}: no row is left once rows with missing values are dropped")
    classes = _classes(dataset, frame)
    columns, values = _features(dataset, frame)
    groups = None
    if dataset.split.group is not None:
        groups = frame[dataset.split.group].astype(str).tolist()
    try:
        splits = split_indices(dataset.split, len(frame), groups=groups, classes=classes.tolist())
    except DataError as error:
        raise DataError(f"{', '.join(dataset.files)}: {error}") from error
    train = values[splits["train"]]
    deviation = train.std(axis=0, ddof=1) if len(train) > 1 else np.zeros(train.shape[1])
    # A column that is constant in the training part carries nothing; dividing by its zero would blow the others up.
    values = (values - train.mean(axis=0)) / np.where(deviation > 0, deviation, 1.0)
    return TableData(values, classes, splits, frame[_ROW].tolist(), columns, list(dataset.label.classes))


def _read_file(dataset: Table, name: str) -> pd.DataFrame:
    """The used columns as text, NaN where missing, and ``_ROW``, the place of each row."""
    path = Path(dataset._folder, name)
    lines = _read_lines(path, dataset.separator)
    columns = dataset.columns or (lines.pop(0)[1] if lines else [])
    if not lines:
        raise DataError(f"{path}: it has no rows")
    for line, cells in lines:
        # pandas would cut longer rows and fill shorter ones: a comma as decimal sign would shift columns unseen.
        if len(cells) != len(columns):
            raise DataError(f"{path}:{line}: expected {len(columns)} columns, got {len(cells)}")
    wanted = _used(dataset)
    for column in wanted:
        if columns.count(column) != 1:
            problem = "is there more than once" if column in columns else "is missing"
            raise DataError(f"{path}: column '{column}' {problem}; the file has: {', '.join(columns)}")
    positions = [columns.index(column) for column in wanted]
    frame = pd.DataFrame([[cells[i] for i in positions] for _, cells in lines], columns=wanted, dtype=str)
    frame = frame.mask(frame.isin(dataset.missing))
    frame[_ROW] = [f"{path.name}:{line}" for line, _ in lines]
    return frame


_ROW = "\n"  # the frame's own column; a name that no file's column has


def _used(dataset: Table) -> list[str]:
    """The columns that are read, each once."""
    group = [dataset.split.group] if dataset.split.group else []
    return list(dict.fromkeys([*dataset.features, dataset.label.column, *group]))


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


def _features(dataset: Table, frame: pd.DataFrame) -> tuple[list[str], NDArray[np.float64]]:
    names: list[str] = []
    parts: list[NDArray[np.float64]] = []
    for column, kind in dataset.features.items():
        if kind == "number":
            names.append(column)
            parts.append(_numbers(frame, column))
            continue
        positions = _lookup(frame, column, [[category] for category in kind])
        for position, category in enumerate(kind[1:], start=1):
            names.append(f"{column}={category}")
            parts.append((positions == position).astype(np.float64))
    return names, np.stack(parts, axis=1)


def _classes(dataset: Table, frame: pd.DataFrame) -> NDArray[np.int64]:
    return _lookup(frame, dataset.label.column, list(dataset.label.classes.values()))


def _numbers(frame: pd.DataFrame, column: str) -> NDArray[np.float64]:
    numbers = pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64)
    bad = np.flatnonzero(~np.isfinite(numbers))
    if len(bad):
        row = int(bad[0])
        raise DataError(
            f"{frame.at[row, _ROW]}: column '{column}': expected a number, got '{frame.at[row, column]}'"
            " (list it under 'missing' if it means not known)"
        )
    return numbers


def _lookup(frame: pd.DataFrame, column: str, values: list[list[str | int | float]]) -> NDArray[np.int64]:
    """Position of each cell in ``values``; "3", "3.0" and 3 are the same value."""
    positions = {canonical(value): position for position, group in enumerate(values) for value in group}
    found = np.array([positions.get(canonical(cell), -1) for cell in frame[column]], dtype=np.int64)
    bad = np.flatnonzero(found < 0)
    if len(bad):
        row = int(bad[0])
        declared = ", ".join(str(value) for group in values for value in group)
        raise DataError(
            f"{frame.at[row, _ROW]}: column '{column}': '{frame.at[row, column]}' is not among the declared values "
            f"({declared})"
        )
    return found
