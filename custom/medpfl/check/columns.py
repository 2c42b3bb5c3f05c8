# SPDX-License-Identifier: Apache-2.0
"""A table, column by column: what is declared, what is missing, what was found."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from medpfl.data.contract import Listing
from medpfl.data.table.declare import Table

Role = Literal["number", "categories", "label", "group", "split"]


@dataclass(frozen=True)
class Column:
    """One used column.

    Attributes:
        role: what the site file declares it as.
        rows: rows of the files, whether or not they can be used.
        missing: rows whose cell means "not known".
        texts: cells that are no number, of a column of numbers; how often each text occurs, of any other.
        values: numbers of each split's rows (empty for other columns).
    """

    name: str
    role: Role
    rows: int
    missing: int
    texts: Counter[str]
    values: dict[str, NDArray[np.float64]] = field(default_factory=dict)

    def numbers(self) -> NDArray[np.float64]:
        """All numbers, whatever their split."""
        return np.concatenate(list(self.values.values())) if self.values else np.zeros(0)


def columns_of(table: Table, listing: Listing) -> list[Column]:
    """Every used column of a table whose rows were listed."""
    cells = table.cells()
    rule = table.split
    roles: dict[str, Role] = {
        name: "number" if kind == "number" else "categories" for name, kind in table.features.items()
    }
    roles |= {name: "number" if name in table.answer_numbers else "label" for name in table.answers}
    others: list[tuple[str | None, Role]] = [(rule.group, "group"), (rule.column, "split")]
    for column, role in others:
        if column:
            roles.setdefault(column, role)
    places = {split: [case.where for case in cases] for split, cases in listing.items()}
    columns = []
    for name, role in roles.items():
        known = cells[name].dropna()
        values: dict[str, NDArray[np.float64]] = {}
        if role == "number":
            numbers = pd.to_numeric(cells[name], errors="coerce")
            known = known[numbers.loc[known.index].isna()]
            values = {split: _finite(numbers.loc[where]) for split, where in places.items()}
        columns.append(Column(name, role, len(cells), int(cells[name].isna().sum()), Counter(known.tolist()), values))
    return columns


def _finite(numbers: "pd.Series[float]") -> NDArray[np.float64]:
    values = np.asarray(numbers, np.float64)
    return values[np.isfinite(values)]
