# SPDX-License-Identifier: Apache-2.0
"""The page's figures, as SVG: learning curves and reliability plots."""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from medpfl.compare.file import BEFORE_MEAN, FEDAVG, FINE_TUNED, LOCAL, POOLED
from medpfl.compare.results import Results, Row
from medpfl.results.differences import draw_boxes
from medpfl.results.schema import Direction
from medpfl.results.skew import draw_label_counts
from medpfl.results.svg import in_two_lines, legend_below, plain_numbers, svg_text

# References are dashed; the others take colours that differ on paper and on a screen (Tableau).
REFERENCES = {LOCAL: "#7f7f7f", FEDAVG: "#b07d00", BEFORE_MEAN: "#d4a017", FINE_TUNED: "#8c564b", POOLED: "#4d4d4d"}
BANDS = 6
"""With more curves than this in one figure, bands would hide each other."""
FIRST = 10
"""So many curves beside the references can still be told apart in one figure."""


def curves(rows: Sequence[Row], content: Results) -> str:
    """Mean validation score by round, in one figure: the references and the FIRST other curves of the leaderboard;
    bands, if they are few: standard deviation over the runs."""
    shown = [row for row, first in _distinct(rows) if first]
    if not shown:
        return ""
    figure = _figure(5.0, 2.9)
    axis = figure.subplots()
    for row, (colour, style) in zip(shown, _lines(shown), strict=True):
        _draw(axis, row, colour, style, band=len(shown) <= BANDS)
    _target(axis, content)
    plain_numbers(axis)
    axis.set_xlabel("round")
    axis.set_ylabel(in_two_lines(f"validation {content.label(content.score)}"))
    legend_below(axis, 9)
    return _svg(figure)


def hidden_curves(rows: Sequence[Row]) -> int:
    """How many curves are in small figures only."""
    return sum(not first for _, first in _distinct(rows))


def single_curves(rows: Sequence[Row], content: Results) -> list[dict[str, str]]:
    """A small figure for each curve with its band, beside Local; where one figure has too many for bands or for all."""
    shown = [row for row, _ in _distinct(rows)]
    if len(shown) <= BANDS or (content.pairs < 2 and not hidden_curves(rows)):
        return []
    local = next((row for row in shown if row.name == LOCAL), None)
    low = min(float(_values(row).min()) for row in shown)
    high = max(float(_values(row).max()) for row in shown)
    margin = 0.05 * (high - low) or 0.02
    found = []
    for row, (colour, style) in zip(shown, _lines(shown), strict=True):
        figure = _figure(2.7, 1.9)
        axis = figure.subplots()
        if local and row is not local:
            _draw(axis, local, REFERENCES[LOCAL], "--", band=False)
        _draw(axis, row, colour, style, band=True)
        axis.set_ylim(low - margin, high + margin)
        plain_numbers(axis)
        axis.tick_params(labelsize=8)
        found.append({"title": row.name, "svg": _svg(figure)})
    return found


def _distinct(rows: Sequence[Row]) -> list[tuple[Row, bool]]:
    """The rows with a curve and whether it is among the first. Equal curves (FedAvg's, and that of other methods'
    global models) are there once, as the reference's if one of them is."""
    found: list[Row] = []
    for row in sorted((row for row in rows if row.curve), key=lambda row: row.name not in REFERENCES):
        if not any(row.curves == other.curves for other in found):
            found.append(row)
    found.sort(key=rows.index)
    others = [row.name for row in found if row.name not in REFERENCES]
    return [(row, row.name not in others[FIRST:]) for row in found]


def equal_curves(rows: Sequence[Row]) -> list[str]:
    """The names of each group of rows whose curves are equal, of which one is drawn: that one's first."""
    drawn = [row for row, _ in _distinct(rows)]
    groups = [[one, *(row for row in rows if row is not one and row.curves == one.curves)] for one in drawn]
    return [", ".join(row.name for row in group) for group in groups if len(group) > 1]


def sweeps(rows: Sequence[Row], content: Results) -> list[dict[str, str]]:
    """Test score by the value of the swept argument, a line for each of the method's models; bars: standard deviation
    over the runs. References are level lines."""
    by_name = {row.name: row for row in rows if row.best.mean is not None}
    found = []
    for sweep in content.sweeps:
        values = [point.value for point in sweep.points]
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        ordered = len(numbers) == len(values)
        places: list[float] = [*numbers] if ordered else [*range(len(values))]
        figure = _figure(5.0, 2.9)
        axis = figure.subplots()
        models = {
            name.removeprefix(point.name)
            for point in sweep.points  # the runs of one may have failed
            for name in by_name
            if name == point.name or name.startswith(f"{point.name} (")
        }
        for model in sorted(models):
            known = [(x, by_name[p.name + model].best) for x, p in zip(places, sweep.points, strict=True)
                     if p.name + model in by_name]  # fmt: skip
            x, means, bars = zip(*((x, stat.mean, stat.sd or 0.0) for x, stat in known), strict=True)
            label = sweep.method + model
            axis.errorbar(x, means, bars, marker="o", markersize=4, linewidth=1.6, capsize=3, label=label)
        for name, colour in REFERENCES.items():
            if name in by_name:
                axis.axhline(by_name[name].best.mean, linestyle="--", color=colour, linewidth=1.2, label=name)
        smallest = min((x for x in places if x > 0), default=0)
        if ordered and min(places) >= 0 and max(places) >= 20 * smallest > 0:
            axis.set_xscale("symlog", linthresh=smallest)  # 0 has its place too
            axis.set_xlim(min(places) - 0.3 * smallest, 1.2 * max(places))
            axis.minorticks_off()
        axis.set_xticks(
            places, [f"{place:g}" if ordered else str(value) for place, value in zip(places, values, strict=True)]
        )
        axis.grid(alpha=0.25)
        plain_numbers(axis)
        axis.set_xlabel(sweep.argument)
        axis.set_ylabel(in_two_lines(f"test {content.label(content.score)}"))
        legend_below(axis, 9)
        found.append({"title": f"{sweep.method} by {sweep.argument}", "svg": _svg(figure)})
    return found


def differences(rows: Sequence[Row]) -> str:
    """How hospitals' models differ, the most different ones first: every method's slots of which each has its own."""
    found = {
        f"{row.name}: {slot}" if len(row.sdwd) > 1 else row.name: values
        for row in rows
        for slot, values in row.sdwd.items()
        if values[-1] > 0
    }
    boxes = dict(sorted(found.items(), key=lambda item: item[1][len(item[1]) // 2]))  # by their medians
    if not boxes:
        return ""
    figure = _figure(6.4, 1.0 + 0.3 * len(boxes))
    draw_boxes(figure.subplots(), boxes)
    return _svg(figure)


def communication(rows: Sequence[Row], content: Results) -> str:
    """Score by bytes of a hospital a round, both directions; where some methods' messages are encoded."""
    if not any(row.ratio for row in rows):
        return ""
    known = [row for row in rows if row.best.mean is not None]
    shown = [row for row in known if row.bytes["to_site"] or row.bytes["from_site"]]
    figure = _figure(6.4, 2.7)
    left, right = figure.subplots(1, 2, sharey=True)
    ways: tuple[tuple[Any, Direction, str], ...] = (
        (left, "from_site", "from the hospital"),
        (right, "to_site", "to the hospital"),
    )
    for axis, way, title in ways:
        for row, (colour, _) in zip(shown, _lines(shown), strict=True):
            place = (max(row.bytes[way], 1), row.best.mean)
            axis.errorbar(*place, yerr=row.best.sd or 0, marker="o", color=colour, label=row.name)
        _in_bytes(axis, [max(row.bytes[way], 1) for row in shown])
        axis.set_xlabel(f"bytes a round {title}")
    plain_numbers(left)
    left.set_ylabel(in_two_lines(f"test {content.label(content.score)}"))
    legend_below(left, 8)
    return _svg(figure)


def _in_bytes(axis: Any, shown: Sequence[float]) -> None:
    """A logarithmic axis of whole powers of ten. Its own labels are formulas, which are shown as they are."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullFormatter

    axis.set_xscale("log")
    axis.set_xlim(10 ** math.floor(math.log10(0.9 * min(shown))), 10 ** math.ceil(math.log10(1.1 * max(shown))))
    axis.xaxis.set_major_locator(LogLocator())
    axis.xaxis.set_major_formatter(EngFormatter("B"))
    axis.xaxis.set_minor_formatter(NullFormatter())
    axis.tick_params(axis="x", labelsize=8)


def reliability_plots(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Method by method: how often the chosen class was right, by the probability it was given; of all hospitals."""
    found = []
    for row in rows:
        if not row.calibration:
            continue
        figure = _figure(2.5, 2.3)
        axis = figure.subplots()
        axis.plot([0, 1], [0, 1], ":", color="#555555", linewidth=0.8)
        every = [site.bins for site in row.calibration.values()]
        for bins in every:
            count, hits, total = np.array(bins).T
            known = count > 0
            axis.plot(total[known] / count[known], hits[known] / count[known], color="#9aa5b1", linewidth=0.8)
        count, hits, total = np.sum(every, axis=0).T
        known = count > 0
        axis.plot(total[known] / count[known], hits[known] / count[known], color="#1f6fb4", linewidth=1.6)
        size = 8 + 60 * count[known] / count.sum()
        axis.scatter(total[known] / count[known], hits[known] / count[known], size, color="#1f6fb4")
        low = min(0.45, float((total[known] / count[known]).min()) - 0.05)
        axis.set_xlim(low, 1.02)
        axis.set_ylim(-0.03, 1.03)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("probability given", fontsize=8)
        axis.set_ylabel("share that was right", fontsize=8)
        found.append({"title": row.name, "svg": _svg(figure)})
    return found


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure  # the object interface: no display, no global state

    return Figure(figsize=(width, height), layout="constrained")


def _lines(rows: Sequence[Row]) -> Iterator[tuple[Any, str]]:
    """Colour and style of each row's line; when the colours are used up, they come again dash-dotted."""
    import matplotlib

    known = [*matplotlib.color_sequences["tab10"], *matplotlib.color_sequences["Dark2"]]
    colours = [colour for colour in known if matplotlib.colors.to_hex(colour) not in REFERENCES.values()]
    palette = ((colour, style) for style in itertools.cycle(("-", "-.")) for colour in colours)
    for row in rows:
        yield (REFERENCES[row.name], _style(row.name)) if row.name in REFERENCES else next(palette)


def _style(reference: str) -> str:
    """FedAvg before the mean is dotted: in a small picture its colour is nearly FedAvg's."""
    return ":" if reference == BEFORE_MEAN else "--"


def _values(row: Row) -> Any:
    """Run x round, masked where a run has no score."""
    return np.ma.masked_invalid(np.array(row.curves, dtype=np.float64))


def _draw(axis: Any, row: Row, colour: Any, style: str, band: bool) -> None:
    values = _values(row)
    x = np.arange(1, values.shape[1] + 1)
    mean = values.mean(axis=0)
    axis.plot(x, mean, style, color=colour, label=row.name, linewidth=1.8, marker="." if len(x) < 3 else "")
    if len(values) > 1 and band:
        deviation = values.std(axis=0, ddof=1)  # masked of a single run
        axis.fill_between(x, mean - deviation, mean + deviation, color=colour, alpha=0.15, linewidth=0)
    axis.grid(alpha=0.25)
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)  # of one round its number alone


def _target(axis: Any, content: Results) -> None:
    if content.target is not None:
        axis.axhline(content.target, color="#555555", linewidth=0.8, linestyle=":")


def label_counts(content: Results) -> str:
    """Who has which labels (of the first split: the others cut the same samples); nothing if they are not known."""
    labels = content.splits[0].labels
    if not labels:
        return ""
    classes = list(next(iter(labels.values())))
    return _svg(draw_label_counts({site: list(counts.values()) for site, counts in labels.items()}, classes))


def _svg(figure: Any) -> str:
    for axis in figure.axes:
        for side in ("top", "right"):
            axis.spines[side].set_visible(False)
    return svg_text(figure, transparent=True)
