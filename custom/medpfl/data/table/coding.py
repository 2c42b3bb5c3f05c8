# SPDX-License-Identifier: Apache-2.0
"""Cells of a table as numbers: categories one-hot, missing values imputed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator

from medpfl.data.cells import to_numbers
from medpfl.data.declared import Problems, canonical, distinct
from medpfl.data.numbers import LARGEST, MISSING, no_number

if TYPE_CHECKING:
    import pandas as pd

ROW = "\n\n"
"""The frames' own column beside ``PLACE``: file and line."""


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


def numeric(features: Features) -> list[str]:
    """The columns of numbers."""
    return [column for column, kind in features.items() if kind == "number"]


def coded(
    features: Features, frame: "pd.DataFrame", bad: NDArray[np.bool_], problems: Problems
) -> tuple[list[str], NDArray[np.float64]]:
    """Names and N x F values, NaN where a cell is missing; rows with a problem are marked in ``bad``."""
    names: list[str] = []
    parts: list[NDArray[np.float64]] = []
    for column, kind in features.items():
        if kind == "number":
            names.append(column)
            parts.append(numbers_of(frame, column, bad, problems))
            continue
        positions = lookup(frame, column, [[category] for category in kind], bad, problems)
        for position, category in enumerate(kind[1:], start=1):
            names.append(f"{column}={category}")
            parts.append(np.where(positions < 0, np.nan, positions == position))
    return names, np.stack(parts, axis=1)


def numbers_of(frame: "pd.DataFrame", column: str, bad: NDArray[np.bool_], problems: Problems) -> NDArray[np.float64]:
    """A column of numbers, NaN where a cell is missing; rows whose cell is no number are marked in ``bad``."""
    numbers = to_numbers(frame, column)
    for row in np.flatnonzero(~(np.abs(numbers) <= LARGEST) & frame[column].notna().to_numpy()).tolist():
        bad[row] = True
        problems.add(f"{frame[ROW].iloc[row]}: column '{column}': {no_number(frame[column].iloc[row], MISSING)}")
    return numbers


def lookup(
    frame: "pd.DataFrame",
    column: str,
    values: list[list[str | int | float]],
    bad: NDArray[np.bool_],
    problems: Problems,
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
            f"{frame[ROW].iloc[row]}: column '{column}': '{cells[row]}' is not among the declared values ({declared})"
        )
    return found


def typical(features: Features, train: "pd.DataFrame", source: str, problems: Problems) -> dict[str, str | int | float]:
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


def filled(features: Features, raw: NDArray[np.float64], imputed: Mapping[str, Any]) -> NDArray[np.float64]:
    """``raw`` with the imputed values where it is NaN."""
    fill: list[float] = []
    for column, kind in features.items():
        value = imputed.get(column, np.nan)
        fill += [value] if kind == "number" else [float(category == value) for category in kind[1:]]
    return np.where(np.isnan(raw), np.array(fill), raw)
