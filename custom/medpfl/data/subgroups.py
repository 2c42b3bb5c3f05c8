# SPDX-License-Identifier: Apache-2.0
"""Groups of a hospital's patients (by sex, age, scanner) by which its own page tells a model's scores apart."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import BeforeValidator, Field, field_validator, model_validator

from medpfl.core.errors import DataError
from medpfl.data.declared import Strict, canonical
from medpfl.data.numbers import as_number, in_full

MOST = 20
"""Groups of one column."""
UNKNOWN = "not known"


class Subgroup(Strict):
    """A column whose values are groups. Numbers make bands: from each of the ``edges`` on begins another one, or there
    are so many ``quantiles`` of about as many cases each."""

    column: str
    edges: list[Annotated[float, Field(allow_inf_nan=False)]] | None = Field(
        default=None, min_length=1, max_length=MOST - 1
    )
    quantiles: int | None = Field(default=None, ge=2, le=MOST)

    @model_validator(mode="after")
    def _consistent(self) -> "Subgroup":
        if self.edges is not None and self.quantiles is not None:
            raise ValueError(f"'{self.column}' has 'edges' and 'quantiles'; leave one out")
        if self.edges is not None and any(b <= a for a, b in itertools.pairwise(self.edges)):
            raise ValueError(f"the edges of '{self.column}' must ascend, got {self.edges}")
        return self


def _column(given: object) -> object:
    return {"column": given} if isinstance(given, str) else given


class Described(Strict, ABC):
    """Datasets that know more of their cases than what is learnt.

    ``subgroups``: columns by which the hospital's own page tells scores apart: a name, or {column: age, edges: [40,
    60]}, or {column: age, quantiles: 3}. Nothing of them leaves the hospital.
    """

    subgroups: list[Annotated[Subgroup, BeforeValidator(_column)]] = Field(default=[], max_length=20)

    @field_validator("subgroups")
    @classmethod
    def _each_once(cls, subgroups: list[Subgroup]) -> list[Subgroup]:
        names = [one.column for one in subgroups]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the column '{name}' is listed twice")
        return subgroups

    @property
    def described_by(self) -> list[str]:
        """The columns of ``subgroups``."""
        return [one.column for one in self.subgroups]

    @abstractmethod
    def described(self) -> dict[str, dict[str, str]]:
        """Column of ``subgroups`` to the cases' names to what it says of them; "" where it says nothing.

        Raises:
            DataError: with the file and the column; what may be meant.
        """


@dataclass(frozen=True)
class Grouping:
    """The groups of a column.

    Attributes:
        groups: in the order in which they are shown.
        of: a case's name to the number of its group; cases that are not in it are in none.
    """

    column: str
    groups: tuple[str, ...]
    of: Mapping[str, int]


def groupings(dataset: Described) -> tuple[Grouping, ...]:
    """Of all its cases.

    Raises:
        DataError: a column cannot be read, has texts where numbers make bands, or too many values.
    """
    if not dataset.subgroups:
        return ()
    found = dataset.described()
    return tuple(_grouping(each, found[each.column]) for each in dataset.subgroups)


def _grouping(declared: Subgroup, told: Mapping[str, str]) -> Grouping:
    known = {name: text for name, text in told.items() if text}
    if declared.edges is None and declared.quantiles is None:
        groups, places = _values(declared.column, known)
    else:
        groups, places = _bands(declared, known)
    missing = [name for name in told if name not in known]
    return Grouping(
        declared.column, (*groups, *[UNKNOWN][: len(missing)]), {**places, **dict.fromkeys(missing, len(groups))}
    )


def _values(column: str, known: Mapping[str, str]) -> tuple[list[str], dict[str, int]]:
    texts: dict[str, str] = {}
    for text in known.values():
        texts.setdefault(canonical(text), text)
    if len(texts) > MOST:
        raise DataError(
            f"'subgroups': column '{column}' has {len(texts)} values, expected at most {MOST}; of numbers make bands: "
            f"{{column: {column}, quantiles: 3}} or {{column: {column}, edges: [...]}}"
        )
    order = sorted(texts, key=lambda value: (_number(value) is None, _number(value) or 0.0, value))
    return [texts[value] for value in order], {name: order.index(canonical(text)) for name, text in known.items()}


def _bands(declared: Subgroup, known: Mapping[str, str]) -> tuple[list[str], dict[str, int]]:
    numbers: dict[str, float] = {}
    for name, text in known.items():
        if (number := _number(text)) is None:
            raise DataError(f"{name}: 'subgroups': column '{declared.column}' makes bands of numbers, got '{text}'")
        numbers[name] = number
    edges = declared.edges or []
    if declared.quantiles and numbers:
        shares = np.arange(1, declared.quantiles) / declared.quantiles
        edges = np.unique(np.quantile(list(numbers.values()), shares)).tolist()
    shown = [in_full(edge) if declared.edges else f"{edge:.6g}" for edge in edges]
    middle = [f"{a} to below {b}" for a, b in itertools.pairwise(shown)]
    groups = [f"below {shown[0]}", *middle, f"{shown[-1]} and above"] if shown else ["all"]
    return groups, {name: int(np.searchsorted(edges, number, side="right")) for name, number in numbers.items()}


def _number(text: str) -> float | None:
    number = as_number(text)
    return number if number is not None and np.isfinite(number) else None
