# SPDX-License-Identifier: Apache-2.0
"""How the rows of a comparison's page can be arranged: equal ones together, and each order that a reader may choose."""

import math
from collections.abc import Callable, Sequence

from medpfl.compare.results import Gain, Results, Row
from medpfl.tasks.metrics.measure import Measure

Orders = list[tuple[str, list[Row]]]
"""What the rows are sorted by, and the rows."""


def ranked(content: Results) -> list[Row]:
    """The rows, best mean first."""
    return by_mean(content.rows, content.measure)


def by_mean(rows: Sequence[Row], measure: Measure) -> list[Row]:
    """Likewise, of rows alone."""
    return _sorted(rows, lambda row: measure.rank(row.best.mean))


def collapsed(rows: Sequence[Row]) -> tuple[list[Row], dict[str, list[str]]]:
    """The rows of which no earlier one has the same numbers in every run, and the names of the others by the one that
    stands for them. Two methods' models can be one, such as FedAvg's and the global model of a method that also trains
    it."""
    first: list[Row] = []
    others: dict[str, list[str]] = {}
    for row in rows:
        same = next((one for one in first if _numbers(one) == _numbers(row)), None)
        if same is None:
            first.append(row)
        else:
            others.setdefault(same.name, []).append(row.name)
    return first, others


def _numbers(row: Row) -> tuple[object, ...]:
    return row.pairs, row.best, row.last, row.metrics, row.together, row.hospitals, row.cross, row.curves


def of_leaderboard(rows: Sequence[Row], content: Results) -> Orders:
    """By the score, the gain, the hospital that is worst off, and the name."""
    rank = content.measure.rank
    found = [
        ("best round", list(rows)),
        ("gain over Local", _sorted(rows, lambda row: _by_gain(row.gain))),
        ("worst-off hospital", _sorted(rows, lambda row: rank(row.worst.score if row.worst else None))),
        ("name", sorted(rows, key=lambda row: row.name.casefold())),
    ]
    return found if any(row.gain for row in rows) else [found[0], *found[2:]]


def of_hospitals(rows: Sequence[Row], content: Results) -> Orders:
    """By the mean of the hospitals' scores, and by each hospital's."""
    rank = content.measure.rank
    each = [
        (site, _sorted(rows, lambda row, site=site: rank(row.hospitals[site].best.mean)))  # type: ignore[misc]
        for site in content.hospitals
    ]
    return [("mean", list(rows)), *each]


def of_gains(rows: Sequence[Row], content: Results) -> Orders:
    """Those with a gain, by the mean of the hospitals' gains, and by each hospital's."""
    known = [row for row in rows if row.gain]
    each = [
        (site, _sorted(known, lambda row, site=site: _by_gain(row.hospitals[site].gain)))  # type: ignore[misc]
        for site in content.hospitals
    ]
    return [("mean", _sorted(known, lambda row: _by_gain(row.gain))), *each]


def _sorted(rows: Sequence[Row], key: Callable[[Row], float]) -> list[Row]:
    """Smallest key first; equal ones stay as they come. Means of the same cases, added in another order, differ
    in the last bits, and these say nothing: keys are equal that agree in six digits."""
    return sorted(rows, key=lambda row: float(f"{key(row):.6g}"))


def _by_gain(gain: Gain | None) -> float:
    return math.inf if gain is None else -gain.mean
