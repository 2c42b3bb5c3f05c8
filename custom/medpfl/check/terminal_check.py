# SPDX-License-Identifier: Apache-2.0
"""The data check on a terminal: a table a dataset, warnings, problems, the verdict."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from medpfl.check.check import check_data
from medpfl.check.inspection import Inspection
from medpfl.check.page import check_place, write_page
from medpfl.check.trial import size
from medpfl.data.schema import Schema
from medpfl.tasks.contract import Task

LISTED = 50  # problems (and warnings) on the terminal; the page lists all


def run(
    path: Path,
    site: str | None,
    job: tuple[str, Task] | None,
    page: Path | None,
    console: Console,
    schema: Schema | None = None,
) -> bool:
    """Check, write the page, print a summary; returns whether the check was passed.

    Raises:
        SiteFileError: the site file cannot be used.
        DataError: the page cannot be written.
    """
    place = page or (path / f"{site}.yaml" if path.is_dir() else path).with_suffix(".check.html")
    if page or place.parent.is_dir():  # else there is no site file, which is told first
        check_place(place)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bars: dict[str, TaskID] = {}

        def advance(what: str, done: int, count: int) -> None:
            if what not in bars:
                bars[what] = progress.add_task(what, total=count)
            progress.update(bars[what], completed=done, total=count)

        report = check_data(path, site, job, advance, schema)
    written = write_page(report, place)
    for inspection in report.inspections:
        console.print(_counts(inspection))
    _say(console, "Problems", report.problems, written)
    _say(console, "Warnings (worth a look)", report.warnings, written)
    if report.trial and report.trial.samples:
        trial = report.trial
        console.print(
            f"{trial.job}: {sum(report.trial.samples.values())} samples of shape {trial.shape}, "
            f"{size(trial.memory)} in memory (at most {report.memory_gb:g} GiB by storage.memory_gb), "
            f"{size(trial.scratch)} in the scratch folder; {trial.parameters} parameters",
            highlight=False, soft_wrap=True, markup=False,
        )  # fmt: skip
    console.print(report.verdict, style="bold green" if report.passed else "bold red", markup=False, soft_wrap=True)
    console.print(f"Page (it shows patients' data and stays here): {written}", soft_wrap=True, markup=False)
    return report.passed


def _counts(inspection: Inspection) -> Table:
    table = Table(title=escape(f"{inspection.name} ({inspection.kind})"), title_justify="left")
    table.add_column("split")
    events = inspection.events
    for column in ("cases", "groups", *inspection.class_names, *(["events"] if events else [])):
        table.add_column(escape(column), justify="right")
    for split, counts in inspection.splits.items():
        read = str(counts.cases) if counts.cases == counts.listed else f"{counts.cases} of {counts.listed}"
        classes = counts.classes or [0] * len(inspection.class_names)
        came = [counts.events or 0] if events else []
        table.add_row(split, read, str(counts.groups), *map(str, [*classes, *came]))
    return table


def _say(console: Console, title: str, lines: list[str], page: Path) -> None:
    if lines:
        console.print(f"{title}: {len(lines)}", style="bold", highlight=False)
    for line in lines[:LISTED]:
        console.print(f"  - {line}", markup=False, highlight=False, soft_wrap=True)
    if len(lines) > LISTED:
        console.print(f"  ... and {len(lines) - LISTED} more; all are in {page}", markup=False, soft_wrap=True)
