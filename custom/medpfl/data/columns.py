# SPDX-License-Identifier: Apache-2.0
"""A table, column by column: what is declared, what is missing, what was found."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from medpfl.data.numbers import like_thousands, shown

if TYPE_CHECKING:
    import pandas as pd

Role = Literal["number", "categories", "label", "group", "split"]


class Listed(Protocol):
    """A case of the contract."""

    @property
    def where(self) -> str: ...


@dataclass(frozen=True)
class Column:
    """One used column.

    Attributes:
        role: what the site file declares it as.
        rows: rows of the files, whether or not they can be used.
        missing: rows whose cell means "not known".
        texts: cells that are no number, of a column of numbers; how often each text occurs, of any other.
        values: numbers of each split's rows (empty for other columns).
        signed: of a column of numbers those whose decimal places may be digits after thousands; see ``like_thousands``.
    """

    name: str
    role: Role
    rows: int
    missing: int
    texts: Counter[str]
    values: dict[str, NDArray[np.float64]] = field(default_factory=dict)
    signed: list[str] = field(default_factory=list)

    def numbers(self) -> NDArray[np.float64]:
        """All numbers, whatever their split."""
        return np.concatenate(list(self.values.values())) if self.values else np.zeros(0)


def columns_of(
    cells: "pd.DataFrame", roles: Mapping[str, Role], listing: Mapping[str, Sequence[Listed]]
) -> list[Column]:
    """Every used column of a table whose rows were listed.

    Args:
        cells: the used columns as text, NaN where missing, by the rows' names.
        roles: column to what it is declared as, in the order in which they are shown.
        listing: split to the rows.
    """
    import pandas as pd

    places = {split: [case.where for case in cases] for split, cases in listing.items()}
    columns = []
    for name, role in roles.items():
        known = cells[name].dropna()
        values: dict[str, NDArray[np.float64]] = {}
        signed: list[str] = []
        if role == "number":
            signed = like_thousands(map(str, known))
            numbers = pd.to_numeric(cells[name], errors="coerce")
            known = known[numbers.loc[known.index].isna()]
            values = {split: _finite(numbers.loc[where]) for split, where in places.items()}
        columns.append(
            Column(
                name,
                role,
                len(cells),
                int(cells[name].isna().sum()),
                Counter(map(shown, known.tolist())),
                values,
                signed,
            )
        )
    return columns


def _finite(numbers: "pd.Series[float]") -> NDArray[np.float64]:
    values = np.asarray(numbers, np.float64)
    return values[np.isfinite(values)]
