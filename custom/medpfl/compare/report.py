# SPDX-License-Identifier: Apache-2.0
"""report.html of a comparison: one self-contained page, for a desk and for a phone, light and dark."""

import io
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, select_autoescape

from medpfl.compare.console import bytes_text, hospitals, p_text, ranked
from medpfl.compare.plan import FEDAVG, FINE_TUNED, LOCAL
from medpfl.evaluate.models import write_text
from medpfl.evaluate.skew import draw_label_counts

# References are grey and dashed; ten colours that differ on paper and on a screen (Tableau).
REFERENCES = {LOCAL: "#7f7f7f", FEDAVG: "#b07d00", FINE_TUNED: "#8c564b"}


def write_report(content: dict[str, Any], folder: Path) -> Path:
    """Write ``report.html`` from what ``collect`` returned.

    Raises:
        MedPFLError: it cannot be written.
    """
    environment = Environment(loader=PackageLoader("medpfl.compare", "."), autoescape=select_autoescape())
    environment.globals.update(zip=zip, bytes_text=bytes_text, p_text=p_text)
    rows = ranked(content)
    page = environment.get_template("report.html").render(
        c=content,
        rows=rows,
        score=content["score"].replace("_", " "),
        sites=content["hospitals"],
        top=_top(rows),
        last=hospitals(content, "last"),
        labels=_labels(content["labels"]),
        curves=_curves(rows, content),
        crosses=[{"name": row["name"], "cells": _shades(row["cross"])} for row in rows],
        mixings=_mixings(rows),
        references=list(REFERENCES),
        losses=_losses(rows, content["hospitals"]),
        tests=sum(len(content["hospitals"]) + 1 for row in rows if row["gain"]),
    )
    write_text(folder / "report.html", page)
    return folder / "report.html"


def _top(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Each hospital's highest mean score."""
    found: dict[str, float] = {}
    for row in rows:
        for site, scores in row["hospitals"].items():
            if scores["best"]["mean"] is not None:
                found[site] = max(found.get(site, -1e9), scores["best"]["mean"])
    return found


def _losses(rows: list[dict[str, Any]], sites: list[str]) -> dict[str, int]:
    """How many hospitals would have done better alone, method by method (on the mean over the seeds)."""
    return {
        row["name"]: sum((gain := row["hospitals"][site]["gain"]) is not None and gain["mean"] < 0 for site in sites)
        for row in rows
        if row["gain"]
    }


def _shades(matrix: list[list[float | None]]) -> list[list[tuple[str, float]]]:
    """Text and opacity of each cell, between the smallest and the largest value."""
    known = [value for line in matrix for value in line if value is not None]
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    span = max(high - low, 1e-9)
    return [
        [("n/a", 0.0) if v is None else (f"{v:.3f}", round(0.06 + 0.6 * (v - low) / span, 3)) for v in line]
        for line in matrix
    ]


def _mixings(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found = []
    for row in rows:
        for slot, matrix in row["mixing"]["slots"].items():
            if row["name"] != FINE_TUNED:  # it is FedAvg's
                title = f"{row['name']}, slot “{slot}”, seed {row['mixing']['seed']}"
                cells = [[(f"{value:.2f}", round(0.65 * min(1.0, abs(value)), 3)) for value in line] for line in matrix]
                found.append({"title": title, "cells": cells})
    return found


def _labels(labels: dict[str, dict[str, int]]) -> str:
    """Who has which labels, as a picture; nothing where a sample has no single class."""
    if not labels:
        return ""
    classes = list(next(iter(labels.values())))
    buffer = io.StringIO()
    draw_label_counts({site: list(counts.values()) for site, counts in labels.items()}, classes).savefig(
        buffer, format="svg", metadata={"Date": None}
    )
    return buffer.getvalue()[buffer.getvalue().index("<svg") :]


def _curves(rows: list[dict[str, Any]], content: dict[str, Any]) -> str:
    """Mean validation score by round; bands are the standard deviation over the seeds."""
    import matplotlib
    import numpy as np
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    shown = [row for row in rows if row["curve"]]
    if not shown:
        return ""
    figure = Figure(figsize=(5.0, 3.7), layout="constrained")
    axis = figure.subplots()
    palette = iter([*matplotlib.color_sequences["tab10"], *matplotlib.color_sequences["Dark2"]] * 3)
    for row in shown:
        reference = row["name"] in REFERENCES
        colour = REFERENCES[row["name"]] if reference else next(palette)
        values = np.array(row["curves"])
        x = np.arange(1, values.shape[1] + 1)
        mean = values.mean(axis=0)
        style = "--" if reference else "-"
        axis.plot(x, mean, style, color=colour, label=row["name"], linewidth=1.8, marker="." if len(x) < 3 else "")
        if len(values) > 1 and len(shown) <= 6:
            deviation = values.std(axis=0, ddof=1)
            axis.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.12, linewidth=0)
    if content["target"] is not None:
        axis.axhline(content["target"], color="#555555", linewidth=0.8, linestyle=":")
    axis.grid(alpha=0.25)
    axis.locator_params(axis="x", integer=True)
    axis.set_xlabel("round")
    axis.set_ylabel(f"validation {content['score'].replace('_', ' ')}")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.legend(loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": "medpfl"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    return text[text.index("<svg") :]
