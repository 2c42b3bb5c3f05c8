# SPDX-License-Identifier: Apache-2.0
"""A comparison's tables as CSV files that its page holds: one number a cell, to the last digit."""

from collections.abc import Iterator

from medpfl.compare.arranging import ranked
from medpfl.compare.results import Gain, Results, Row, Stat
from medpfl.results.spreadsheet import Cell, Spreadsheet

GAIN = ("gain over local", "gain 95 % from", "gain 95 % to", "p")
TO_FIRST = ("to the first", "to the first 95 % from", "to the first 95 % to", "p to the first")
EVERYWHERE = "all hospitals' cases together"


def sheets(content: Results) -> list[Spreadsheet]:
    """The leaderboard, the hospitals, the runs and the metrics, in the page's order of methods."""
    rows = ranked(content)
    tested = f"test {content.label(content.score)}, best round"
    means = [tested, "sd", "last round", "sd", *GAIN]
    return [
        Spreadsheet(
            "leaderboard",
            ["method", *means, *TO_FIRST, "worst-off hospital", "its score", "scored after"],
            [_leader(row) for row in rows],
        ),
        Spreadsheet("hospitals", ["method", "hospital", *means], [line for row in rows for line in _hospitals(row)]),
        Spreadsheet(
            "runs", ["method", "split", "seed", tested, "last round"], [line for row in rows for line in _runs(row)]
        ),
        Spreadsheet(
            "metrics", ["method", "metric", "tested on", "mean", "sd"], [line for row in rows for line in _metrics(row)]
        ),
    ]


def _leader(row: Row) -> list[Cell]:
    worst: tuple[Cell, Cell] = (row.worst.hospital, row.worst.score) if row.worst else (None, None)
    return [row.name, *_stat(row.best), *_stat(row.last), *_gain(row.gain), *_gain(row.to_first), *worst, row.scored]


def _hospitals(row: Row) -> Iterator[list[Cell]]:
    for site, found in row.hospitals.items():
        yield [row.name, site, *_stat(found.best), *_stat(found.last), *_gain(found.gain)]


def _runs(row: Row) -> Iterator[list[Cell]]:
    for (split, seed), best, last in zip(row.pairs, row.best.values, row.last.values, strict=True):
        yield [row.name, split, seed, best, last]


def _metrics(row: Row) -> Iterator[list[Cell]]:
    for name, found in row.metrics.items():
        yield [row.name, name, "own cases, mean of the hospitals", *_stat(found)]
        for site, one in found.hospitals.items():
            yield [row.name, name, site, *_stat(one)]
    for name, found in row.together.items():
        yield [row.name, name, EVERYWHERE, *_stat(found)]


def _stat(found: Stat) -> tuple[Cell, Cell]:
    return found.mean, found.sd


def _gain(found: Gain | None) -> tuple[Cell, Cell, Cell, Cell]:
    if found is None:
        return None, None, None, None
    low, high = found.interval or (None, None)
    return found.mean, low, high, found.p
