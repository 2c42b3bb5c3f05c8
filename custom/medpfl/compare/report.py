# SPDX-License-Identifier: Apache-2.0
"""report.html of a comparison: one self-contained page, for a desk and a phone, light and dark; figures as files."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml
from jinja2 import ChoiceLoader, Environment, PackageLoader, Template, select_autoescape

from medpfl.compare import arranging, comparison_tables, constant, figures
from medpfl.compare.arranging import ranked
from medpfl.compare.comparison_tables import bytes_text, p_text
from medpfl.compare.examples import Example
from medpfl.compare.file import POOLED
from medpfl.compare.level import level_text
from medpfl.compare.results import Made, Results, Row
from medpfl.compare.sheets import sheets
from medpfl.core.extras import require
from medpfl.deployed.evaluate import write_text
from medpfl.results.glossary import Glossary
from medpfl.results.report import plain_text
from medpfl.tasks.metrics.measure import Measure


@cache
def _template() -> Template:
    pages = ChoiceLoader([PackageLoader("medpfl.compare", "."), PackageLoader("medpfl.results", ".")])
    environment = Environment(loader=pages, autoescape=select_autoescape())
    environment.globals.update(zip=zip, p_text=p_text, bytes_text=bytes_text)
    return environment.get_template("report.html")


def write_report(content: Results, folder: Path, examples: list[Example] | None = None) -> Path:
    """Write ``report.html`` from what ``collect`` returned, and ``figures/`` anew: the page's large figures as SVG.

    Args:
        examples: what ``examples_of`` returned: images of patients. They are on this page only.

    Raises:
        MedPFLError: it cannot be written.
    """
    require("matplotlib", "compare", "a comparison's report")
    with plain_text():
        page, drawn = _page(content, examples)
    write_text(folder / "report.html", page)
    _write_figures(folder / "figures", drawn)
    return folder / "report.html"


def _page(content: Results, examples: list[Example] | None) -> tuple[str, dict[str, str]]:
    """The page, and its large figures by their titles."""
    rows, decimals = ranked(content), content.decimals(content.score)
    drawn = {
        "labels": figures.label_counts(content),
        "curves": figures.curves(rows, content),
        "differences": figures.differences(rows),
        "communication": figures.communication(rows, content),
    }
    sweeps = figures.sweeps(rows, content)
    shown, same = arranging.collapsed(rows)
    page = _template().render(
        c=content,
        glossary=Glossary(content.hospitals),
        rows=rows,
        same=same,
        number={row.name: place for place, row in enumerate(rows)},
        by_score=arranging.of_leaderboard(shown, content),
        by_hospital=arranging.of_hospitals(shown, content),
        by_gain=arranging.of_gains(shown, content),
        file=_file(content),
        score=content.score.replace("_", " "),
        label=content.label(content.score),
        measure=content.measure,
        decimals=content.decimals,
        score_digits=decimals,
        sites=content.hospitals,
        runs=comparison_tables.runs_text(content),
        budget=comparison_tables.budget_text(content),
        tests_at=_test_sizes(content),
        top=_top(rows, content.measure),
        winner=next((row.name for row in rows if row.name != POOLED), None),
        pooled=POOLED,
        last=comparison_tables.hospitals(content, "last"),
        metrics=comparison_tables.metrics(content),
        other_metrics=comparison_tables.other_metrics(content),
        together=comparison_tables.together(content),
        cost=comparison_tables.cost(content),
        privacy=comparison_tables.privacy(content),
        privacy_title=comparison_tables.PRIVACY,
        beside=constant.beside(content),
        majority=comparison_tables.majority(content),
        always=constant.always(content),
        warnings=constant.warnings(content),
        apart=any(row.to_first for row in rows),
        level=level_text(content),
        unseen=comparison_tables.unseen(content) if content.unseen else None,
        searches=comparison_tables.searches(content),
        chosen=comparison_tables.chosen(content),
        chosen_title=comparison_tables.CHOSEN,
        power=comparison_tables.power(content),
        needed_title=comparison_tables.NEEDED,
        interval_note=comparison_tables.interval_note(content),
        selections=comparison_tables.selections(content),
        sheets=sheets(content),
        **drawn,
        sweeps=sweeps,
        single_curves=figures.single_curves(rows, content),
        equal_curves=figures.equal_curves(rows),
        hidden_curves=figures.hidden_curves(rows),
        reliability=figures.reliability_plots(rows),
        crosses=[{"name": row.name, "cells": _shades(row.cross, content.measure, decimals)} for row in rows],
        mixings=mixings_of(rows),
        references=list(figures.REFERENCES),
        losses=_losses(rows, content.hospitals),
        scored=any(row.scored for row in rows),
        tests=_tests(shown),
        examples=examples,
    )
    return page, {**drawn, **{sweep["title"]: sweep["svg"] for sweep in sweeps}}


def _write_figures(folder: Path, drawn: dict[str, str]) -> None:
    for old in folder.glob("*.svg"):
        old.unlink()
    for title, svg in drawn.items():
        if svg:
            name = re.sub(r"[^\w.-]+", "-", title)
            # White behind it: the page that shows the file may be dark.
            write_text(folder / f"{name}.svg", svg.replace("<svg ", '<svg style="background: #fff" ', 1))


def _file(content: Results) -> str:
    """The comparison's file, as YAML that ``medpfl compare`` reads: what is not the default."""
    told = content.file.model_dump(mode="json", exclude_defaults=True)
    return str(yaml.safe_dump(told, sort_keys=False, allow_unicode=True, width=100))


def _test_sizes(content: Results) -> dict[str, str]:
    """Hospital to its number of test samples, over the splits."""
    found = {}
    for site in content.hospitals:
        sizes = sorted({split.sizes[site]["test"] for split in content.splits})
        found[site] = f"{sizes[0]}" if len(sizes) == 1 else f"{sizes[0]}–{sizes[-1]}"
    return found


def _top(rows: list[Row], measure: Measure) -> dict[str, float]:
    """Each hospital's best mean score; Pooled, which real hospitals cannot have, does not compete."""
    found: dict[str, list[float]] = {}
    for row in (row for row in rows if row.name != POOLED):
        for site, scores in row.hospitals.items():
            if scores.best.mean is not None:
                found.setdefault(site, []).append(scores.best.mean)
    return {site: measure.best(means) for site, means in found.items()}


def _losses(rows: list[Row], sites: list[str]) -> dict[str, int]:
    """How many hospitals would have done better alone, method by method (on the mean over the seeds)."""
    return {
        row.name: sum((gain := row.hospitals[site].gain) is not None and gain.mean < 0 for site in sites)
        for row in rows
        if row.gain
    }


def _tests(rows: Sequence[Row]) -> int:
    """How many p the tables of gains show."""
    of_rows = [(row.gain, row.to_first, *(one.gain for one in row.hospitals.values())) for row in rows]
    return sum(gain is not None and gain.shown_p is not None for gains in of_rows for gain in gains)


def _shades(matrix: list[list[float | None]], measure: Measure, decimals: int) -> list[list[tuple[str, float]]]:
    """Text and opacity of each cell, between the worst value and the best, which is the darkest."""
    known = [value for line in matrix for value in line if value is not None]
    best, worst = measure.best(known), max(known, key=measure.rank, default=0.0)
    span = max(abs(best - worst), 1e-9)
    return [
        [
            ("n/a", 0.0) if v is None else (f"{v:.{decimals}f}", round(0.06 + 0.6 * measure.gain(v, worst) / span, 3))
            for v in line
        ]
        for line in matrix
    ]


@dataclass(frozen=True)
class _Heat:
    """A table of text and opacity of each cell."""

    title: str
    cells: list[list[tuple[str, float]]]


def mixings_of(rows: list[Row]) -> list[_Heat]:
    """Every method's matrices once, though it may have several rows (models)."""
    found: list[_Heat] = []
    shown: list[tuple[list[Made], str]] = []
    for row in sorted(rows, key=lambda row: len(row.name)):
        for slot, matrix in row.mixing.slots.items():
            if (row.made, slot) not in shown:
                shown.append((row.made, slot))
                split = f", split {row.mixing.split}" if row.mixing.split is not None else ""
                title = f"{row.name}, slot “{slot}”{split}, seed {row.mixing.seed}"
                cells = [[(f"{value:.2f}", round(0.65 * min(1.0, abs(value)), 3)) for value in line] for line in matrix]
                found.append(_Heat(title, cells))
    return found
