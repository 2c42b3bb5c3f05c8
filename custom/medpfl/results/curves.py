# SPDX-License-Identifier: Apache-2.0
"""The report's curves: a score by round, hospital by hospital, or how far many hospitals lie apart."""

from collections.abc import Mapping, Sequence
from textwrap import wrap
from typing import Any

import numpy as np

from medpfl.results.chosen import label_of
from medpfl.results.schema import EvaluationSummary, Line, Summary, ValidationLine
from medpfl.results.svg import in_two_lines, legend_below, plain_numbers, svg_text

COLOURS = {"local": "#8c8c8c", "fedavg": "#d1802b", "fedavg_before_mean": "#c9a227", "fedavg_finetuned": "#b5536b"}
PERSONAL = ["#1f6fb4", "#2f9e6e", "#7b5bb5", "#b8a21a"]
"""Of the method's own models; the references' lines are dashed, too, for who does not tell all these colours apart."""
STYLES = {"fedavg_before_mean": ":"}
"""Its colour is nearly FedAvg's."""
MANY = 20
"""Of so many hospitals each has a picture of its own; more would be neither read nor drawn in a reasonable time."""

LETTERS = 36
"""Of a title so many have room above a small picture; a longer name of a hospital stands in several lines."""

Curves = dict[str, dict[str, list[tuple[int, float]]]]
"""Hospital (or "mean") to model to rounds and scores."""


def new_figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches, and its axes, rows x columns."""
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False)


def curves(summary: Summary, lines: Sequence[Line]) -> str:
    """SVG of the validation score of the mixed models by round: the mean, then hospital by hospital, or of many the
    mean and where four fifths of them lie; "" without any."""
    if isinstance(summary, EvaluationSummary):  # it has no rounds and chooses nothing
        return ""
    score = summary.score
    sites = [site for site in summary.roster if site in summary.sizes]
    points: Curves = {}
    for line in lines:
        if isinstance(line, ValidationLine) and (value := line.metrics.get(score)) is not None:
            points.setdefault(line.site, {}).setdefault(line.model, []).append((line.round, value))
    shown = [site for site in ("mean", *sites) if site in points]
    if not shown:
        return ""
    together = _equal(points)
    apart = "mean" in points and len(shown) > MANY
    shown = ["mean"] if apart else shown
    bands = f"Mean of {len(points) - 1} hospitals; four fifths of them lie within the bands"
    mean = bands if apart else "Mean of the hospitals"
    columns = min(3, len(shown))
    rows = -(-len(shown) // columns)
    size = (6.8, 3.6) if apart else (3.4 * columns, 2.5 * rows)
    figure, axes = new_figure(*size, columns, rows)
    personal = iter(PERSONAL)
    colours = dict(COLOURS)
    for model in together:
        if model not in colours:
            colours[model] = next(personal, "#333333")
    flat = list(axes.flat)
    plain_numbers(*flat)
    for axis in flat:
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    for axis, site in zip(flat, shown, strict=False):
        for model, label in together.items():
            if model in points[site]:
                x, y = zip(*sorted(points[site][model]), strict=True)
                style = STYLES.get(model, "--" if model in COLOURS else "-")
                few = "." if len(x) < 3 else ""  # a line of one point is not seen
                axis.plot(x, y, style, color=colours[model], label=label, linewidth=1.6, marker=few)
            if apart:
                axis.fill_between(*four_fifths(points, model), color=colours[model], alpha=0.12, linewidth=0)
        axis.set_title(mean if site == "mean" else "\n".join(wrap(site, LETTERS)), fontsize=9)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=7)
        axis.set_xlabel("round", fontsize=7)
    for axis in flat[len(shown) :]:
        axis.set_visible(False)
    flat[0].set_ylabel(in_two_lines(summary.label(score)), fontsize=8)
    legend_below(flat[0], 8)
    return svg_text(figure)


def four_fifths(points: Curves, model: str) -> tuple[list[int], list[float], list[float]]:
    """Rounds, and between which scores four fifths of the hospitals lie in each."""
    by_round: dict[int, list[float]] = {}
    for site, found in points.items():
        if site != "mean":
            for number, value in found.get(model, ()):
                by_round.setdefault(number, []).append(value)
    rounds = sorted(by_round)
    low, high = ([float(np.quantile(by_round[number], share)) for number in rounds] for share in (0.1, 0.9))
    return rounds, low, high


def _equal(points: Mapping[str, Mapping[str, list[tuple[int, float]]]]) -> dict[str, str]:
    """The first model of each group whose curves are the same at every hospital, and all names of the group: one curve
    would hide the others."""
    groups: dict[tuple[tuple[str, tuple[tuple[int, float], ...]], ...], list[str]] = {}
    for model in dict.fromkeys(model for of_site in points.values() for model in of_site):
        curve = tuple((site, tuple(sorted(found[model]))) for site, found in points.items() if model in found)
        groups.setdefault(curve, []).append(model)
    named = [sorted(models, key=lambda model: model not in COLOURS) for models in groups.values()]  # references first
    return {models[0]: ", ".join(map(label_of, models)) for models in named}
