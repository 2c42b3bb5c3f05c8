# SPDX-License-Identifier: Apache-2.0
"""report.html: one self-contained page with a job's table, curves, mixing matrices and bytes."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import yaml
from jinja2 import Environment, PackageLoader, Template, select_autoescape

from medpfl.core.errors import MedPFLError, counted
from medpfl.core.extras import require
from medpfl.core.mixing import Matrix
from medpfl.methods.panels import CurvesPanel, GraphPanel, Panel, SharesPanel
from medpfl.results import spreadsheet
from medpfl.results.chosen import chosen_table, interval_table, paid, power_notes
from medpfl.results.curves import MANY, curves, new_figure
from medpfl.results.differences import draw_boxes, draw_graph, sdwd_of_slots
from medpfl.results.files import json_of, read_lines, read_mixing, read_summary, read_traffic, write_whole
from medpfl.results.glossary import Glossary
from medpfl.results.presence import told
from medpfl.results.schema import (
    Direction,
    Line,
    RoundLine,
    Summary,
    Traffic,
    TrainingSummary,
    ValidationLine,
)
from medpfl.results.sentences import sentences
from medpfl.results.spreadsheet import Spreadsheet
from medpfl.results.svg import legend_below, plain_numbers, svg_text
from medpfl.results.tables import PRESENCE, ResultTable, metric_means, other_tables, result_table
from medpfl.tasks.metrics.digits import amount

_DASHES = ("-", "--", "-.", ":")
"""Of hospitals' curves, beside their colours, which not everybody tells apart and paper does not show."""


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a results folder from the files in it.

    Raises:
        MedPFLError: the folder holds no results, or the page cannot be written.
    """
    summary = read_summary(folder)
    mixing = read_mixing(folder, len(summary.roster))
    return write_page(folder, summary, read_lines(folder), mixing, read_traffic(folder))


@cache
def _template() -> Template:
    environment = Environment(loader=PackageLoader("medpfl.results", "."), autoescape=select_autoescape())
    environment.globals["zip"] = zip
    return environment.get_template("report.html")


def write_page(
    folder: Path, summary: Summary, lines: Sequence[Line], mixing: Mapping[str, Matrix], traffic: Sequence[Traffic]
) -> Path:
    """Write ``report.html`` into a results folder.

    Args:
        folder: its slots' files are read for how hospitals' models differ.
        mixing: "slot/round" to matrix.
    """
    require("matplotlib", "compare", "report.html")
    with plain_text():
        drawn = {
            "curves": curves(summary, lines),
            "heatmaps": heatmaps(summary, mixing),
            "panels": _panels(summary, lines, mixing),
            "sdwd": _sdwd(folder, summary),
        }
    page = _template().render(
        summary=summary,
        glossary=Glossary(summary.roster),
        brought=sentences(summary),
        sheets=_sheets(summary, traffic),
        made=made(summary),
        best=_table(summary, result_table(summary)),
        silent=[site for site, sizes in summary.sizes.items() if sizes.get("validation") == 0],
        last=_table(summary, result_table(summary, "last"), "last round"),
        means=metric_means(summary),
        chosen=chosen_table(summary),
        paid=paid(summary),
        power=power_notes(summary),
        sure=interval_table(summary, result_table(summary)),
        others=[_table(summary, table) for table in other_tables(summary)],
        **drawn,
        traffic=_traffic(traffic),
        seconds=[line.seconds for line in lines if isinstance(line, RoundLine)],
        events=told(summary.events),
    )
    path = folder / "report.html"
    try:
        write_whole(path, page)
    except OSError as error:
        raise MedPFLError(f"cannot write {path}: {error.strerror}") from error
    return path


def made(summary: Summary) -> str:
    """How results were made, as YAML: the job's components, settings and codecs, or the model that it was given."""
    content = json_of(summary)
    shown = {"slots": "components", "settings": "settings", "codecs": "codecs", "model": "evaluated"}
    found = {title: content[key] for title, key in shown.items() if content.get(key)}
    return str(yaml.safe_dump(found, sort_keys=False, allow_unicode=True, width=100))


def _sheets(summary: Summary, traffic: Sequence[Traffic]) -> dict[str, Spreadsheet]:
    """The tables that are not a hospital-by-hospital result."""
    found = {"traffic": spreadsheet.of_traffic(traffic)}
    if isinstance(summary, TrainingSummary):
        found |= {
            "means": spreadsheet.of_means(summary),
            "chosen": spreadsheet.of_chosen(summary),
            "intervals": spreadsheet.of_intervals(summary),
            "privacy": spreadsheet.of_privacy(summary),
        }
    return found


def plain_text() -> AbstractContextManager[None]:
    """While it is entered, figures show names as they are: to matplotlib, "$" would begin a formula."""
    import matplotlib

    return matplotlib.rc_context({"text.parse_math": False})


@dataclass(frozen=True)
class _Row:
    """A hospital's row; ``cells``: text, and whether it is the best of the row; ``presence``: "" if all were there."""

    site: str
    size: int | str
    cells: list[tuple[str, bool]]
    presence: str


@dataclass(frozen=True)
class _Shown:
    """A result table as the page has it; ``presence``: heading of the column of who was there, "" without one;
    ``gains``: None without local training; ``scored``: empty where it is not known; ``rounds``: "" where none is
    best."""

    score: str
    heading: str
    labels: list[str]
    presence: str
    rows: list[_Row]
    mean: list[str]
    gains: list[str] | None
    scored: list[str]
    rounds: list[int | str]
    sheet: Spreadsheet


@dataclass(frozen=True)
class _Drawn:
    """A method's panel as the page has it: a picture, or a table."""

    title: str
    note: str
    svg: str = ""
    head: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    sheet: Spreadsheet | None = None


def _table(summary: Summary, table: ResultTable, name: str = "") -> _Shown:
    rows = []
    for row, (site, size, values) in enumerate(zip(table.sites, table.sizes, table.values, strict=True)):
        top = table.best(row)
        cells = [(text, bool(v == top)) for text, v in zip(table.texts(values), values, strict=True)]
        rows.append(_Row(site, size, cells, table.presence.get(site, "")))
    none = [("", False)] * len(table.labels)
    rows += [_Row(site, "", none, table.presence[site]) for site in table.absent]
    return _Shown(
        score=table.score,
        heading=table.heading,
        labels=table.labels,
        presence=PRESENCE if table.presence else "",
        rows=rows,
        mean=table.mean_texts,
        gains=table.gain_texts(),
        scored=table.scored,
        rounds=[summary.best[model].round if model in summary.best else "" for model in table.models],
        sheet=spreadsheet.of_results(table, name),
    )


def heatmaps(summary: Summary, mixing: Mapping[str, Matrix]) -> list[dict[str, str]]:
    """The last round's matrix of every slot: row k is what hospital k's model is made of."""
    names = summary.roster
    last: dict[str, str] = {}
    for key in sorted(mixing):
        last[key.rsplit("/", 1)[0]] = key
    pictures = []
    for slot, key in last.items():
        matrix = mixing[key]
        side = min(max(2.8, 0.55 * len(names) + 1.4), 0.55 * MANY + 1.4)
        longer = max(0.0, 0.065 * max(map(len, names)) - 1.4)  # inches of the longest name for which that has no room
        figure, axes = new_figure(side + longer, side * 0.85 + 0.7 * longer)
        axis = axes[0, 0]
        axis.imshow(matrix, cmap="Blues", vmin=0, vmax=max(1e-9, float(matrix.max())))
        named = range(0, len(names), -(-len(names) // (2 * MANY)))  # of many every second, third, ...
        axis.set_xticks(named, [names[number] for number in named], rotation=45, ha="right", fontsize=7)
        axis.set_yticks(named, [names[number] for number in named], fontsize=7)
        if len(names) <= 12:
            for row, column in np.ndindex(matrix.shape):
                dark = matrix[row, column] > 0.6 * matrix.max()
                axis.text(
                    column,
                    row,
                    f"{matrix[row, column]:.2f}",
                    ha="center",
                    va="center",
                    fontsize=7,
                    color="white" if dark else "#222222",
                )
        least = str(round(72 * (side + longer)))  # pixels, at which letters of 7 points can be read
        number = str(int(key.rsplit("/", 1)[1]))
        pictures.append({"slot": slot, "round": number, "svg": svg_text(figure), "least": least})
    return pictures


def _panels(summary: Summary, lines: Sequence[Line], mixing: Mapping[str, Matrix]) -> list[_Drawn]:
    """What the method shows of its own."""
    graphs = summary.networks if isinstance(summary, TrainingSummary) else {}
    panels = [*summary.panels, *(GraphPanel(slot=slot, edges=pairs) for slot, pairs in graphs.items())]
    return [_drawn(panel, summary, lines, mixing) for panel in panels]


def _drawn(panel: Panel, summary: Summary, lines: Sequence[Line], mixing: Mapping[str, Matrix]) -> _Drawn:
    match panel:
        case GraphPanel():
            last = max((key for key in mixing if key.rsplit("/", 1)[0] == panel.slot), default=None)
            longest = max(map(len, summary.roster))  # on both sides of the circle there is room for 12 letters
            figure, axes = new_figure(3.6 + max(0.0, 0.15 * (longest - 12)), 3.2)
            draw_graph(axes[0, 0], summary.roster, panel.edges, mixing[last] if last else None)
            note = (
                f"Slot “{panel.slot}”: {counted(len(panel.edges), 'edge')} of the network along which models are drawn "
                "together; thick: much was heard in the last round."
            )
            return _Drawn("Similar hospitals", note, svg_text(figure))
        case CurvesPanel():
            return _Drawn(panel.title, "By round, on each hospital's validation cases.", _diagnosed(panel, lines))
        case SharesPanel():
            rows = [[site, *(f"{share:.2f}" for share in found.values())] for site, found in panel.shares.items()]
            sheet = spreadsheet.of_shares(panel)
            return _Drawn(panel.title, panel.note, head=sheet.head, rows=rows, sheet=sheet)


def _diagnosed(panel: CurvesPanel, lines: Sequence[Line]) -> str:
    """A picture a name, a curve a hospital; none of what was never a number, and "" where nothing was."""
    told = [line for line in lines if isinstance(line, ValidationLine) and line.model in panel.names]
    names = [name for name in panel.names if any(line.metrics.get(name) is not None for line in told)]
    if not names:
        return ""
    figure, axes = new_figure(3.4 * len(names), 2.7, len(names))
    plain_numbers(*axes.flat)
    for axis, name in zip(axes.flat, names, strict=True):
        axis.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        for number, site in enumerate(sorted({line.site for line in told})):
            points = [(x.round, x.metrics.get(name)) for x in told if (x.site, x.model) == (site, name)]
            known = sorted((x, y) for x, y in points if y is not None)
            # The 21st has the first one's colour and dashes; one without points is in the legend.
            axis.plot(
                [x for x, _ in known],
                [y for _, y in known],
                _DASHES[number % len(_DASHES)],
                color=f"C{number % 10}",
                label=site,
                linewidth=1.4,
                marker="." if len(known) < 3 else "",
            )
        axis.set_title(name.replace("_", " "), fontsize=9)
        axis.set_xlabel("round", fontsize=7)
        axis.grid(alpha=0.25)
        axis.tick_params(labelsize=7)
    legend_below(axes.flat[0], 8)
    return svg_text(figure)


def _sdwd(folder: Path, summary: Summary) -> str:
    boxes = {slot: values for slot, values in sdwd_of_slots(folder, summary.slots).items() if values[-1] > 0}
    if not boxes:
        return ""
    figure, axes = new_figure(6.4, 1.2 + 0.35 * len(boxes))
    draw_boxes(axes[0, 0], boxes)
    return svg_text(figure)


@dataclass(frozen=True)
class _Megabytes:
    """What a hospital was sent and what it sent, as text."""

    site: str
    received: str
    received_encoded: str
    sent: str
    sent_encoded: str


def _traffic(traffic: Sequence[Traffic]) -> list[_Megabytes]:
    """By hospital, summed over the rounds."""

    sums: dict[tuple[str, Direction], tuple[int, int]] = {}
    for line in traffic:
        raw, encoded = sums.get((line.site, line.direction), (0, 0))
        sums[line.site, line.direction] = raw + line.raw, encoded + line.encoded

    def total(site: str, way: Direction) -> tuple[str, str]:
        raw, encoded = sums.get((site, way), (0, 0))
        return amount(raw / 1e6), amount(encoded / 1e6)

    sites = sorted({line.site for line in traffic})
    return [_Megabytes(site, *total(site, "to_site"), *total(site, "from_site")) for site in sites]
