# SPDX-License-Identifier: Apache-2.0
"""A job's result table on the console."""

from pathlib import Path

from rich.console import Console
from rich.markup import escape

from medpfl.results.chosen import chosen_table, paid, power_notes
from medpfl.results.files import read_summary
from medpfl.results.presence import told
from medpfl.results.schema import EvaluationSummary, TrainingSummary
from medpfl.results.tables import GAIN, PRESENCE, SCORED, metric_means, result_table
from medpfl.results.terminal_blocks import print_table


def print_results(folder: Path, console: Console) -> None:
    """Per hospital: Local, FedAvg, FedAvg + fine-tuning and the personalised model on the test set, and the means; or
    the metrics of the model that was given.

    Raises:
        MedPFLError: the folder holds no results.
    """
    summary = read_summary(folder)
    results = result_table(summary)
    chosen_by = "best round by validation" if summary.best else "last round: no hospital told a validation score"
    what = f"test {results.score} ({chosen_by})"
    if isinstance(summary, EvaluationSummary):
        what = f"the given model '{summary.evaluated.model}' on every hospital's test split"
    head = ["hospital", results.heading, *results.labels, *([PRESENCE] if results.presence else [])]
    none = [""] if results.presence else []
    lines = []
    for row, (site, size, values) in enumerate(zip(results.sites, results.sizes, results.values, strict=True)):
        best = results.best(row)
        texts = results.texts(values)
        shown = [f"[bold]{text}[/]" if v == best else text for text, v in zip(texts, values, strict=True)]
        shown += [results.presence[site]] if results.presence else []
        lines.append([escape(site), str(size), *shown])
    for site in results.absent:
        lines.append([escape(site), *[""] * (1 + len(results.labels)), results.presence[site]])
    closing = [["mean", "", *results.mean_texts, *none]]
    if gains := results.gain_texts():
        closing.append([GAIN, "", *gains, *none])
    if results.scored:
        closing.append([SCORED, "", *results.scored, *none])
    print_table(console, f"{summary.job}: {what}", head, lines, closing=closing, marked=True)
    head, rows = chosen_table(summary)
    if rows:
        print_table(console, "what each hospital's validation cases choose, with 95 % intervals", head, rows)
    for text in filter(None, [paid(summary), *power_notes(summary)]):
        console.print(text, markup=False, highlight=False, soft_wrap=True)
    head, rows = metric_means(summary)
    if rows:
        print_table(console, "all metrics, mean of the hospitals", head, rows)
    for site, spent in summary.privacy.items() if isinstance(summary, TrainingSummary) else ():
        console.print(f"{site}: what it sent has {spent}", markup=False)
    for line in told(summary.events):
        console.print(line, markup=False)
    console.print(f"Report: {folder / 'report.html'}", markup=False, emoji=False, soft_wrap=True)
