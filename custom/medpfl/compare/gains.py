# SPDX-License-Identifier: Apache-2.0
"""Paired gains of a comparison's rows: over local training, and how far behind the first row each is."""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from medpfl.compare import aggregate
from medpfl.compare.chosen import Rows
from medpfl.compare.counted import Pair
from medpfl.compare.file import LOCAL
from medpfl.compare.level import first_row
from medpfl.compare.results import Gain, Row
from medpfl.tasks.metrics.measure import Measure


class Tested(Protocol):
    """What a row's runs gave: the scores of the hospitals, NaN where there is none, run by run."""

    @property
    def pairs(self) -> Sequence[Pair]: ...

    @property
    def best(self) -> Sequence[Sequence[float]]: ...


def between(
    mine: Tested, other: Tested, counted: Callable[[Sequence[Pair]], NDArray[np.bool_]], measure: Measure
) -> tuple[Gain | None, list[Gain | None]]:
    """The gain of one row over another in the runs that both have: of the hospitals' mean, and hospital by hospital.

    Args:
        counted: of runs, which hospitals count in the mean; runs x hospitals.
    """
    shared = [pair for pair in mine.pairs if pair in other.pairs]
    one, two = (np.array(row.best)[[row.pairs.index(pair) for pair in shared]] for row in (mine, other))
    counts = counted(shared)
    means = aggregate.of_hospitals(one, counts), aggregate.of_hospitals(two, counts)
    splits = [split for split, _ in shared]
    each = [aggregate.gain(one[:, k], two[:, k], counts[:, k], measure, splits) for k in range(one.shape[1])]
    return aggregate.gain(*means, aggregate.any_counts(counts), measure, splits), each


def certain(row: Row, held: Rows | None) -> Row:
    """The row with intervals of its gains over local training, where they are known."""
    if held is None or row.gain is None or not {row.name, LOCAL} <= held.sheets.keys():
        return row
    gains = {site: each.gain for site, each in row.hospitals.items() if each.gain is not None}
    gain, known = held.certain(row.name, LOCAL, row.gain, gains)
    hospitals = {
        site: each.model_copy(update={"gain": known[site]}) if site in known else each
        for site, each in row.hospitals.items()
    }
    return row.model_copy(update={"gain": gain, "hospitals": hospitals})


def with_distances(
    rows: Sequence[Row],
    tested: Mapping[str, Tested],
    held: Rows | None,
    counted: Callable[[Sequence[Pair]], NDArray[np.bool_]],
    measure: Measure,
) -> list[Row]:
    """The rows, each with how far it is from the first."""
    first = first_row(rows, measure)
    found = []
    for row in rows:
        if first is not None and row.name != first.name:
            distance, _ = between(tested[row.name], tested[first.name], counted, measure)
            if distance is not None and held is not None and {row.name, first.name} <= held.sheets.keys():
                distance, _ = held.certain(row.name, first.name, distance, {})
            row = row.model_copy(update={"to_first": distance})
        found.append(row)
    return found
