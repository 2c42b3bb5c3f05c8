# SPDX-License-Identifier: Apache-2.0
"""The first row of a leaderboard, and which others are level with it."""

from collections.abc import Sequence

from medpfl.compare.arranging import by_mean
from medpfl.compare.file import POOLED
from medpfl.compare.results import Results, Row
from medpfl.tasks.metrics.measure import Measure


def first_row(rows: Sequence[Row], measure: Measure) -> Row | None:
    """The one with the best mean that hospitals can have, which a model of all their data in one place is not; None
    where no row has a mean."""
    return next((row for row in by_mean(rows, measure) if row.name != POOLED and row.best.mean is not None), None)


def level_text(content: Results) -> str:
    """Which rows are level with the first, in a sentence or two; "" where no interval is known."""
    rows = [row for row in by_mean(content.rows, content.measure) if row.name != POOLED]
    first = first_row(content.rows, content.measure)
    known = {row.name: row.to_first.interval[1] for row in rows if row.to_first and row.to_first.interval}
    if first is None or not known:
        return ""
    level = ", ".join(name for name, high in known.items() if high >= 0)
    behind = ", ".join(name for name, high in known.items() if high < 0)
    return f"Level with {first.name}, the first row: {level or 'none'}." + (
        f" Surely behind: {behind}." if behind else ""
    )
