# SPDX-License-Identifier: Apache-2.0
"""A job's result table on the console."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from medpfl.results.chosen import chosen_table, paid, power_notes
from medpfl.results.files import read_summary
from medpfl.results.schema import EvaluationSummary, TrainingSummary
from medpfl.results.tables import GAIN, PRESENCE, SCORED, metric_means, result_table


def print_results(folder: Path, console: Console) -> None:
    """Per hospital: Local, FedAvg, FedAvg + fine-tuning and the personalised model on the test set, and the means; or
    the metrics of the model that was given.

    Raises:
        MedPFLError: the folder holds no results.
    """
    summary = read_summary(folder)
    results = result_table(summary)
    what = f"test {results.score} (best round by validation)"
    if isinstance(summary, EvaluationSummary):
        what = f"the given model '{summary.evaluated.model}' on every hospital's test split"
    table = Table(title=escape(f"{summary.job}: {what}"))
    table.add_column("hospital", no_wrap=True)  # in a narrow window the other columns give way
    table.add_column(escape(results.heading), justify="right")
    for label in results.labels:
        table.add_column(escape(label), justify="right")
    if results.presence:
        table.add_column(PRESENCE)
    for row, (site, size, values) in enumerate(zip(results.sites, results.sizes, results.values, strict=True)):
        best = results.best(row)
        shown = [f"[bold]{v:.3f}[/]" if v == best else f"{v:.3f}" for v in values]
        shown += [results.presence[site]] if results.presence else []
        table.add_row(escape(site), str(size), *shown)
    for site in results.absent:
        table.add_row(escape(site), *[""] * (1 + len(results.labels)), results.presence[site])
    table.add_section()
    table.add_row("mean", "", *results.mean_texts)
    if gains := results.gain_texts():
        table.add_row(GAIN, "", *gains)
    if results.scored:
        table.add_row(SCORED, "", *results.scored)
    console.print(table)
    head, rows = chosen_table(summary)
    if rows:
        console.print(_texts("what each hospital's validation cases choose, with 95 % intervals", head, rows))
    for text in filter(None, [paid(summary), *power_notes(summary)]):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    head, rows = metric_means(summary)
    if rows:
        console.print(_texts("all metrics, mean of the hospitals", head, rows))
    for site, spent in summary.privacy.items() if isinstance(summary, TrainingSummary) else ():
        console.print(f"{site}: what it sent has {spent}", markup=False)
    for event in summary.events:
        console.print(f"round {event.round}, {event.site}: {event.event}", markup=False)
    console.print(f"Report: {folder / 'report.html'}", soft_wrap=True)


def _texts(title: str, head: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title)
    for number, name in enumerate(head):
        table.add_column(escape(name), justify="right" if number else "left")
    for line in rows:
        table.add_row(*map(escape, line))
    return table
