# SPDX-License-Identifier: Apache-2.0
"""Read a table a site file declares: numeric and categorical columns, missing cells, splits."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.sites.site_file import Table
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
    used = [*dataset.features, dataset.label.column]
    unknown = frame[used].isna().any(axis=1)
    if unknown.any() and dataset.missing_rows == "refuse":
        row = int(np.flatnonzero(unknown.to_numpy())[0])
        column = next(c for c in used if pd.isna(frame.at[row, c]))
        raise DataError(
            f"{frame.at[row, '_row']}: column '{column}' is missing ({int(unknown.sum())} rows lack a value); "
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
    return TableData(values, classes, splits, frame["_row"].tolist(), columns, list(dataset.label.classes))


def _read_file(dataset: Table, name: str) -> pd.DataFrame:
    path = Path(dataset._folder, name)
    try:
        frame = pd.read_csv(
            path,
            sep=dataset.separator,
            header=None if dataset.columns else 0,
            dtype=str,
            keep_default_na=False,
            skipinitialspace=True,
            index_col=False,
        )
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (pd.errors.ParserError, pd.errors.EmptyDataError, UnicodeDecodeError, OSError) as error:
        raise DataError(f"{path}: cannot be read as a table: {str(error).strip()}") from error
    if dataset.columns:
        if len(frame.columns) != len(dataset.columns):
            raise DataError(f"{path}: expected {len(dataset.columns)} columns, got {len(frame.columns)}")
        frame.columns = pd.Index(dataset.columns)
    else:
        frame.columns = frame.columns.str.strip()
    wanted = [*dataset.features, dataset.label.column, *([dataset.split.group] if dataset.split.group else [])]
    for column in wanted:
        if column not in frame.columns:
            raise DataError(f"{path}: column '{column}' is missing; the file has: {', '.join(frame.columns)}")
    frame = frame[list(dict.fromkeys(wanted))].apply(lambda cells: cells.str.strip())
    frame = frame.mask(frame.isin(dataset.missing))
    first_line = 1 if dataset.columns else 2
    frame["_row"] = [f"{path.name}:{line}" for line in range(first_line, first_line + len(frame))]
    return frame


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
            f"{frame.at[row, '_row']}: column '{column}': expected a number, got '{frame.at[row, column]}'"
            " (list it under 'missing' if it means not known)"
        )
    return numbers


def _lookup(frame: pd.DataFrame, column: str, values: list[list[str | float]]) -> NDArray[np.int64]:
    """Position of each cell in ``values``; "3", "3.0" and 3 are the same value."""
    positions = {_canonical(value): position for position, group in enumerate(values) for value in group}
    found = np.array([positions.get(_canonical(cell), -1) for cell in frame[column]], dtype=np.int64)
    bad = np.flatnonzero(found < 0)
    if len(bad):
        row = int(bad[0])
        declared = ", ".join(str(value) for group in values for value in group)
        raise DataError(
            f"{frame.at[row, '_row']}: column '{column}': '{frame.at[row, column]}' is not among the declared values "
            f"({declared})"
        )
    return found


def _canonical(value: str | float) -> str:
    try:
        return repr(float(value))
    except ValueError:
        return str(value)
