# SPDX-License-Identifier: Apache-2.0
"""A report's tables as CSV files that the page itself holds: values as in the results, not rounded."""

import csv
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from medpfl.core.formulas import no_formula
from medpfl.methods.panels import SharesPanel
from medpfl.results.chosen import label_of
from medpfl.results.schema import FinalLine, Summary, Traffic, TrainingSummary
from medpfl.results.tables import GAIN, PRESENCE, SCORED, ResultTable, other_tables, result_table

Cell = str | float | int | None
CERTAINTY = ("test patients", "95 % from", "95 % to", "gain over local", "gain 95 % from", "gain 95 % to")


@dataclass(frozen=True)
class Spreadsheet:
    """A table; ``name`` becomes the file's."""

    name: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    @property
    def file(self) -> str:
        """Name of the file."""
        return f"{re.sub(r'[^A-Za-z0-9]+', '-', self.name).strip('-') or 'table'}.csv"

    @property
    def text(self) -> str:
        """The file's content: numbers to the last digit, what is not known empty, and no text that a spreadsheet would
        take for a formula."""
        buffer = io.StringIO()
        writer = csv.writer(buffer)
        writer.writerows([[_cell(value) for value in row] for row in (self.head, *self.rows)])
        return buffer.getvalue()

    @property
    def link(self) -> str:
        """The content as an address that loads nothing."""
        # Excel takes a file for UTF-8 only by the mark at its beginning.
        return "data:text/csv;charset=utf-8," + quote("\ufeff" + self.text)


def _cell(value: Cell) -> Cell:
    if isinstance(value, str):
        return no_formula(value)
    return None if value is not None and not math.isfinite(value) else value


def of_results(table: ResultTable, name: str = "") -> Spreadsheet:
    """Hospitals by models, with the rows under them."""
    there = [PRESENCE] if table.presence else []

    def row(site: str, size: Cell, values: Sequence[Cell]) -> list[Cell]:
        return [site, size, *values, *([table.presence.get(site, "")] if there else [])]

    rows = [row(site, n, line) for site, n, line in zip(table.sites, table.sizes, table.values.tolist(), strict=True)]
    rows += [row(site, "", [""] * len(table.labels)) for site in table.absent]
    rows.append(row("mean", "", table.mean.tolist()))
    gains = table.gains()
    rows += [row(GAIN, "", gains)] if gains is not None else []
    for end, place in (("from", 0), ("to", 1)):
        ends = [None if band is None else band[place] for band in table.bands]
        rows += [row(f"{GAIN}, 95 % {end}", "", ends)] if any(table.bands) else []
    rows += [row(SCORED, "", table.scored)] if table.scored else []
    return Spreadsheet(f"test {table.score} {name}", ["hospital", table.heading, *table.labels, *there], rows)


def of_means(summary: Summary) -> Spreadsheet:
    """Models by metrics, means of the hospitals."""
    every = [result_table(summary), *other_tables(summary)]
    rows: list[list[Cell]] = [
        [label, *(float(table.mean[k]) for table in every)] for k, label in enumerate(every[0].labels)
    ]
    return Spreadsheet("all metrics", ["model", *(table.score for table in every)], rows)


def of_chosen(summary: TrainingSummary) -> Spreadsheet:
    """The model that each hospital takes."""
    rows = [
        [site, label_of(row.test.model), row.test.metrics.get(summary.score), *_certainty(row.test)]
        for site, row in summary.chosen.items()
    ]
    return Spreadsheet(
        "chosen models", ["hospital", "chosen", f"test {summary.label(summary.score)}", *CERTAINTY], rows
    )


def of_intervals(summary: TrainingSummary) -> Spreadsheet:
    """How sure each test score is, a row for each."""
    rows: list[list[Cell]] = [
        [line.site, label_of(line.model), line.choice, line.round, line.metrics.get(summary.score), *_certainty(line)]
        for line in summary.test
    ]
    head = ["hospital", "model", "chosen as", "round", f"test {summary.label(summary.score)}", *CERTAINTY]
    return Spreadsheet("intervals", head, rows)


def of_shares(panel: SharesPanel) -> Spreadsheet:
    """A method's table of shares."""
    columns = list(next(iter(panel.shares.values()), {}))
    return Spreadsheet(
        panel.title, ["cases of", *columns], [[site, *row.values()] for site, row in panel.shares.items()]
    )


def of_privacy(summary: TrainingSummary) -> Spreadsheet:
    """What noise has cost."""
    rows: list[list[Cell]] = [
        [site, spent.level, spent.epsilon, spent.delta, spent.releases, "yes" if spent.fixed else "no"]
        for site, spent in summary.privacy.items()
    ]
    return Spreadsheet("privacy", ["hospital", "level", "epsilon", "delta", "messages", "fixed seed"], rows)


def of_traffic(traffic: Sequence[Traffic]) -> Spreadsheet:
    """Bytes, round by round."""
    rows: list[list[Cell]] = [[line.site, line.round, line.direction, line.raw, line.encoded] for line in traffic]
    return Spreadsheet("traffic", ["hospital", "round", "direction", "bytes", "bytes encoded"], rows)


def _certainty(line: FinalLine) -> list[Cell]:
    found = line.certainty
    if found is None:
        return [None] * len(CERTAINTY)
    return [found.patients, *found.interval, found.gain, *(found.gained or (None, None))]
