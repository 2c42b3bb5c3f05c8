# SPDX-License-Identifier: Apache-2.0
"""A hospital's rows in splits, class by class; that no row is in two; how many rows each class has."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError


def cut_by_class(
    rows: Sequence[int], labels: NDArray[np.int64], fractions: Mapping[str, float], seed: int
) -> dict[str, list[int]]:
    """A client's rows in splits, each class by the same fractions (as near as whole rows allow).

    Args:
        fractions: split to its share; they sum to 1.

    Raises:
        DataError: a split would be empty.
    """
    rng = np.random.default_rng(seed)
    borders = np.cumsum(list(fractions.values()))[:-1]
    found: dict[str, list[int]] = {split: [] for split in fractions}
    mine = np.asarray(rows, dtype=np.int64)
    carried = np.zeros(len(borders))  # what rounding took from a split is given back with the next class
    for value in np.unique(labels[mine]):
        of_class = rng.permutation(mine[labels[mine] == value])
        wanted = borders * len(of_class) + carried
        places = np.maximum.accumulate(np.clip(np.round(wanted), 0, len(of_class))).astype(np.int64)
        carried = wanted - places
        for split, taken in zip(found, np.split(of_class, places), strict=True):
            found[split].extend(taken.tolist())
    for split, part in found.items():
        if not part:
            raise DataError(f"{len(mine)} rows leave the {split} split empty")
    return {split: sorted(part) for split, part in found.items()}


def check_disjoint(splits: Mapping[str, Mapping[str, Sequence[int]]]) -> None:
    """No row is in two splits, of one hospital or of two.

    Raises:
        DataError: naming the row and both places.
    """
    owner: dict[int, str] = {}
    for client, parts in splits.items():
        for split, rows in parts.items():
            for row in rows:
                if row in owner:
                    raise DataError(f"row {row} is in {owner[row]} and in {client}'s {split} split")
                owner[row] = f"{client}'s {split} split"


def label_counts(rows: Sequence[int], labels: NDArray[np.int64], classes: int) -> list[int]:
    """How many of the rows each class has."""
    return [int(count) for count in np.bincount(labels[np.asarray(rows, dtype=np.int64)], minlength=classes)]
