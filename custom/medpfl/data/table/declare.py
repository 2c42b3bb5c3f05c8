# SPDX-License-Identifier: Apache-2.0
"""Tables: numeric and categorical columns, missing cells, splits."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from medpfl.core.errors import DataError
from medpfl.data.cells import PLACE, Cells, kept_form, read_cells, shown_names, to_numbers
from medpfl.data.declared import (
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
from medpfl.data.splits import check_listing, choose


def _feature(value: Any) -> Any:
    """What a feature is declared as; one sentence where pydantic would give one per member of the union."""
    if value == "number":
        return value
    if not isinstance(value, list) or len(value) < 2:
        raise ValueError("expected 'number' or a list of at least 2 categories")
    distinct(value)
    return value


Feature = Annotated[Literal["number"] | list[str | int | float], BeforeValidator(_feature)]
Features = Mapping[str, Any]
"""Column to ``number`` or the list of its categories."""


class Table(Cells, Dataset):
    """One row a patient (or visit), read from CSV, TSV or Parquet files.

    ``features`` maps a column to ``number`` or to the list of its categories (coded one-hot without the first).
    ``missing_rows``: what to do with rows that lack a used value: ``refuse`` them, ``drop`` them, or ``impute``
    features by the training part's median (numbers) and most frequent category; a label, group or split is never
    imputed, so rows that lack one are refused then.
    """

    kind: Literal["table"]
    files: list[str] = Field(min_length=1)
    missing_rows: Literal["drop", "refuse", "impute"] = "refuse"
    features: dict[str, Feature] = Field(min_length=1)
    label: LabelColumn
    split: SplitRule = SplitRule(stratify=True)
    _read: "TableData | None" = PrivateAttr(default=None)

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
        """One row: F values as numbers, categories one-hot, before imputing and standardising (NaN: missing)."""
        data = self._data(Problems())
        return Item(data.raw[case.row], int(data.classes[case.row]))

    def load(self) -> "TableData":
        """Read, check, code, impute and standardise all rows.

        Raises:
            DataError: with the file, the line and the column, expected and got.
        """
        return read_table(self)  # afresh: a data check may have kept the rows without problems only

    def cells(self) -> pd.DataFrame:
        """The used columns as text, NaN where missing, by the rows' names; also rows that are then dropped."""
        return _read_files(self, Problems(keep=True)).set_index(_ROW)

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
        classes: N class indices.
        splits: indices of each split.
        rows: N names of the rows ("file:line"), for messages and prediction files.
        groups: N groups, a row's name where none are declared.
        columns: F feature names.
        class_names: names of the classes.
        preparation: how new rows are read and prepared alike; see ``new_rows``.
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
    label = dataset.label
    classes = _lookup(frame, label.column, list(label.classes.values()), bad, problems)
    columns, raw = _coded(dataset.features, frame, bad, problems)
    frame, classes, raw = frame[~bad].reset_index(drop=True), classes[~bad], raw[~bad]
    if frame.empty:
        raise DataError(f"{source}: no row can be used")
    rows = frame[_ROW].tolist()
    groups = frame[dataset.split.group].tolist() if dataset.split.group else None
    named = frame[dataset.split.column].tolist() if dataset.split.column else None
    splits = choose(dataset.split, rows, problems, source=source, groups=groups, classes=classes.tolist(), named=named)
    owners = groups or rows
    check_listing(_listing(rows, owners, splits), source, problems)
    imputed = {}
    if dataset.missing_rows == "impute":
        imputed = _typical(dataset.features, frame.iloc[splits["train"]], source, problems)
    values = _filled(dataset.features, raw, imputed)
    train = values[splits["train"]]
    mean = train.mean(axis=0) if len(train) else np.zeros(values.shape[1])
    deviation = train.std(axis=0, ddof=1) if len(train) > 1 else np.zeros(train.shape[1])
    # A column that is constant in the training part carries nothing; dividing by its zero would blow the others up.
    scale = np.where(deviation > 0, deviation, 1.0)
    preparation = {
        "cells": Cells.model_validate(dataset.model_dump(include=set(Cells.model_fields))).model_dump(),
        "features": dict(dataset.features),
        "label": label.column,
        "imputed": imputed,
        "mean": mean.tolist(),
        "scale": scale.tolist(),
    }
    names = list(label.classes)
    return TableData(raw, (values - mean) / scale, classes, splits, rows, owners, columns, names, preparation)


def new_rows(path: Path, preparation: Mapping[str, Any]) -> tuple[list[str], NDArray[np.float64]]:
    """Rows of a file that no site file declares, prepared as the training rows were: names, and N x F values.

    Other columns, the label among them, may be there or not.

    Args:
        preparation: ``TableData.preparation`` of the training data.

    Raises:
        DataError: with the file, the line and the column, expected and got.
    """
    form = kept_form(preparation, path)
    features, imputed = preparation["features"], preparation["imputed"]
    pieces = read_cells(path, path.name, form, Problems(), list(features), _numeric(features), preparation["label"])
    frame = pd.concat(list(pieces), ignore_index=True)
    frame[_ROW] = [f"{path.name}:{place}" for place in frame[PLACE]]
    for column in features:
        missing = frame[_ROW][frame[column].isna()].tolist()
        if missing and column not in imputed:
            raise DataError(
                f"{missing[0]}: column '{column}' is missing; the model was trained on rows "
                "without missing values, so it has no value to put there"
            )
    _, raw = _coded(features, frame, np.zeros(len(frame), dtype=bool), Problems())
    values = _filled(features, raw, imputed)
    return frame[_ROW].tolist(), (values - np.array(preparation["mean"])) / np.array(preparation["scale"])


_ROW = "\n\n"  # the frame's own column beside PLACE: file and line


def _listing(rows: list[str], groups: list[str], splits: dict[str, list[int]]) -> Listing:
    return {split: [RowCase(rows[i], groups[i], rows[i], i) for i in splits[split]] for split in SPLITS}


def _numeric(features: Features) -> list[str]:
    return [column for column, kind in features.items() if kind == "number"]


def _read_files(dataset: Table, problems: Problems) -> pd.DataFrame:
    given = _given(dataset)
    numbers = set(_numeric(dataset.features)) - set(given)
    frames = []
    for name, shown in zip(dataset.files, shown_names(dataset.files), strict=True):
        path = Path(dataset._folder, name)
        for frame in read_cells(path, shown, dataset, problems, [*dataset.features, *given], numbers):
            frame[_ROW] = [f"{shown}:{place}" for place in frame[PLACE]]
            frames.append(frame)
    return pd.concat(frames, ignore_index=True)


def _given(dataset: Table) -> list[str]:
    """The columns that are never imputed."""
    return [column for column in (dataset.label.column, dataset.split.group, dataset.split.column) if column]


def _known(dataset: Table, frame: pd.DataFrame, problems: Problems) -> pd.DataFrame:
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
        rows = frame[_ROW].tolist()
        for row in np.flatnonzero(unknown).tolist():
            column = used[int(missing[row].argmax())]
            problems.add(f"{rows[row]}: column '{column}' is missing ({int(unknown.sum())} rows lack a value); {mend}")
    return frame.iloc[np.flatnonzero(~unknown)].reset_index(drop=True)


def _coded(
    features: Features, frame: pd.DataFrame, bad: NDArray[np.bool_], problems: Problems
) -> tuple[list[str], NDArray[np.float64]]:
    """Names and N x F values, NaN where a cell is missing; rows with a problem are marked in ``bad``."""
    names: list[str] = []
    parts: list[NDArray[np.float64]] = []
    for column, kind in features.items():
        if kind == "number":
            names.append(column)
            parts.append(_numbers(frame, column, bad, problems))
            continue
        positions = _lookup(frame, column, [[category] for category in kind], bad, problems)
        for position, category in enumerate(kind[1:], start=1):
            names.append(f"{column}={category}")
            parts.append(np.where(positions < 0, np.nan, positions == position))
    return names, np.stack(parts, axis=1)


def _numbers(frame: pd.DataFrame, column: str, bad: NDArray[np.bool_], problems: Problems) -> NDArray[np.float64]:
    numbers = to_numbers(frame, column)
    for row in np.flatnonzero(~np.isfinite(numbers) & frame[column].notna().to_numpy()).tolist():
        bad[row] = True
        problems.add(
            f"{frame[_ROW].iloc[row]}: column '{column}': expected a number, got '{frame[column].iloc[row]}'"
            " (list it under 'missing' if it means not known)"
        )
    return numbers


def _lookup(
    frame: pd.DataFrame, column: str, values: list[list[str | int | float]], bad: NDArray[np.bool_], problems: Problems
) -> NDArray[np.int64]:
    """Position of each cell in ``values``, -1 where it is missing; "3", "3.0" and 3 are the same value."""
    positions = {canonical(value): position for position, group in enumerate(values) for value in group}
    known = frame[column].notna().to_numpy()
    cells = frame[column].tolist()
    places = [positions.get(canonical(cell), -1) if there else -1 for cell, there in zip(cells, known, strict=True)]
    found = np.array(places, dtype=np.int64)
    declared = ", ".join(str(value) for group in values for value in group)
    for row in np.flatnonzero((found < 0) & known).tolist():
        bad[row] = True
        problems.add(
            f"{frame[_ROW].iloc[row]}: column '{column}': '{cells[row]}' is not among the declared values ({declared})"
        )
    return found


def _typical(features: Features, train: pd.DataFrame, source: str, problems: Problems) -> dict[str, str | int | float]:
    """Each feature's median, or its most frequent category (the first declared of equals), among the known cells."""
    found: dict[str, str | int | float] = {}
    for column, kind in features.items():
        known = train[train[column].notna()]
        if known.empty:
            problems.add(f"{source}: column '{column}' has no value in the training part, so nothing can be imputed")
        elif kind == "number":
            found[column] = float(np.median(to_numbers(known, column)))
        else:
            values = [canonical(cell) for cell in known[column]]
            found[column] = max(kind, key=lambda category: values.count(canonical(category)))
    return found


def _filled(features: Features, raw: NDArray[np.float64], imputed: Mapping[str, Any]) -> NDArray[np.float64]:
    """``raw`` with the imputed values where it is NaN."""
    fill: list[float] = []
    for column, kind in features.items():
        value = imputed.get(column, np.nan)
        fill += [value] if kind == "number" else [float(category == value) for category in kind[1:]]
    return np.where(np.isnan(raw), np.array(fill), raw)
