# SPDX-License-Identifier: Apache-2.0
"""A comparison's learning curves: which are drawn, and that no two look alike."""

import io
import json
import re
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from pydantic import TypeAdapter
from rich.console import Console

from medpfl.compare import aggregate, figures
from medpfl.compare.comparison_tables import print_comparison
from medpfl.compare.figures import FIRST, REFERENCES, _lines, curves, equal_curves, hidden_curves, single_curves, sweeps
from medpfl.compare.report import write_report
from medpfl.compare.results import Results, Row, Stat, Sweep, SweepPoint
from medpfl.results.compact import read_compact
from medpfl.tasks.metrics.measure import Measure

pytestmark = pytest.mark.usefixtures("rendered")


def test_a_curve_has_gaps_where_there_is_no_score() -> None:
    """The first rounds of a metric that is not defined yet, say: they keep their places, and the others theirs."""
    runs: list[list[float | None]] = [[None, 0.5, 0.75], [None, None, 0.25]]
    assert aggregate.curve(runs) == [None, 0.5, 0.5]
    found = aggregate.reach(runs, 0.5, 10, 1.0, Measure())
    assert found is not None and found.rounds == [2, None] and found.median_round == 2
    row = Row.model_construct(name="Ditto", curve=aggregate.curve(runs), curves=runs)
    full = [_row(f"m{number}", [0.1, 0.2, 0.5 + number / 100], [0.2, 0.3, 0.6]) for number in range(9)]
    assert "Ditto" in curves([row], _content())
    assert len(single_curves([row, *full], _content(pairs=2))) == 10


def test_a_long_label_of_the_scores_is_whole() -> None:
    """In one line it is longer than the figure is high: "validation mae (mmol/L, lower is bette"."""
    found = Results.model_construct(
        score="mae", target=None, pairs=1, metrics={"mae": Measure(direction="lower", unit="mmol/L")}
    )
    text = re.sub(r"<[^>]+>", "\n", curves([_row("Local", [0.2, 0.1])], found))
    assert {"validation mae", "(mmol/L, lower is better)"} <= {line.strip() for line in text.splitlines()}


def _row(name: str, *runs: list[float]) -> Row:
    return Row.model_construct(name=name, curve=runs[0], curves=list(runs))


def _content(score: str = "dice", target: float | None = None, pairs: int = 1) -> Results:
    return Results.model_construct(score=score, target=target, pairs=pairs)


def test_equal_curves_are_drawn_once_and_under_the_references_name() -> None:
    same, other = [0.1, 0.5, 0.6], [0.2, 0.4, 0.7]
    rows = [_row("Ditto", other), _row("Ditto (global)", same), _row("FedAvg", same), _row("MoE (global)", same)]
    text = curves([*rows, _row("untrained", [])], _content())
    names = [row.name for row in rows]
    assert [name for name in names if f">{name}</text>" in text] == ["Ditto", "FedAvg"]
    assert ">untrained</text>" not in text
    assert equal_curves([*rows, _row("untrained", []), _row("idle", [])]) == ["FedAvg, Ditto (global), MoE (global)"]


def test_curves_that_agree_in_one_run_only_are_both_drawn() -> None:
    rows = [_row("FedPer", [0.1, 0.5], [0.2, 0.6]), _row("FedRep", [0.1, 0.5], [0.2, 0.7])]
    text = curves(rows, _content("balanced_accuracy", 0.5))
    assert len(re.findall(">(FedPer|FedRep)</text>", text)) == 2


def test_no_two_of_thirty_methods_look_alike() -> None:
    references = [_row(name, [0.5]) for name in ("Local", "FedAvg", "FedAvg before the mean")]
    lines = list(_lines([_row(f"method {number}", [0.5]) for number in range(30)] + references))
    assert len({(str(colour), style) for colour, style in lines}) == 33
    assert [style for _, style in lines[-3:]] == ["--", "--", ":"]  # the last two have nearly one colour


def test_a_sweep_shows_the_values_that_were_trained_whichever_failed() -> None:
    names = {value: f"Ditto lr {value}" for value in (10.0, 0.1, 0.01)}
    points = [SweepPoint(value=value, name=name) for value, name in names.items()]
    known = Stat(mean=0.5, sd=None, values=[0.5])
    rows = [Row.model_construct(name=f"{names[0.1]}{model}", best=known) for model in ("", " (global)")]
    rows += [Row.model_construct(name=names[0.01], best=known)]
    sweep = Sweep(method="Ditto", argument="lr", points=points)
    (figure,) = sweeps(rows, Results.model_construct(score="dice", sweeps=[sweep]))
    assert ">Ditto</text>" in figure["svg"] and ">Ditto (global)</text>" in figure["svg"]


def test_names_are_shown_as_they_are(tmp_path: Path) -> None:
    """To matplotlib "$" would begin a formula, and one that it cannot read would end the comparison without a page."""
    stored = Path(__file__).resolve().parents[2] / "docs" / "results" / "compare-fedsm-skin.json.xz"
    content = TypeAdapter(Results).validate_json(json.dumps(read_compact(stored)))
    first = content.splits[0]
    labels = {site: {"$5-$10": 3, r"$\bad{$": 4} for site in content.hospitals}
    splits = [first.model_copy(update={"labels": labels})]
    write_report(content.model_copy(update={"splits": splits, "rows": content.rows[:2]}), tmp_path)
    svg = (tmp_path / "figures" / "labels.svg").read_text(encoding="utf-8")
    assert "$5-$10" in svg and r"$\bad{$" in svg


@pytest.mark.parametrize("name", ["runs[old]", "runs[/b]"])
def test_where_the_report_is_is_said_as_it_is(name: str) -> None:
    """In square brackets the console would read a style."""
    stored = Path(__file__).resolve().parents[2] / "docs" / "results" / "compare-fedsm-skin.json.xz"
    content = TypeAdapter(Results).validate_json(json.dumps(read_compact(stored)))
    console = Console(record=True, file=io.StringIO())
    print_comparison(content, Path(name), console)
    assert f"Report: {name}/report.html" in console.export_text()


@pytest.mark.parametrize("length, columns", [(5, 3), (20, 2), (40, 1)])
def test_a_legend_with_long_names_is_whole(length: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Figure] = []
    monkeypatch.setattr(figures, "_svg", lambda figure: made.append(figure) or "")
    curves([_row(f"{number}" * length, [0.1, 0.5 + number / 100]) for number in range(7)], _content())
    (figure,) = made
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    (legend,) = figure.legends
    extent = legend.get_window_extent(canvas.get_renderer())
    assert extent.x0 >= 0 and extent.x1 <= figure.bbox.width and extent.y0 >= 0
    assert legend._ncols == columns and len(legend.get_texts()) == 7
    assert figure.axes[0].get_window_extent().height > 120


def test_no_method_has_a_references_colour() -> None:
    lines = _lines([_row(f"method {number}", [0.5]) for number in range(20)])
    assert not {to_hex(colour) for colour, _ in lines} & set(REFERENCES.values())


@pytest.mark.slow
def test_many_methods_leave_room_for_the_first_and_the_references_and_none_is_lost() -> None:
    names = [f"method {number}" for number in range(30)] + ["Local", "FedAvg"]
    rows = [_row(name, [0.1, 0.5 + number / 100]) for number, name in enumerate(names)]
    content = _content()
    text = curves(rows, content)
    assert [name for name in names if f">{name}</text>" in text] == [*names[:FIRST], "Local", "FedAvg"]
    assert hidden_curves(rows) == 30 - FIRST
    assert [plot["title"] for plot in single_curves(rows, content)] == names
    height = float(re.findall(r'height="([\d.]+)pt"', text)[0])
    assert float(re.findall(r'height="([\d.]+)pt"', curves(rows[:3], content))[0]) < height  # the legend's rows
    assert not hidden_curves(rows[:FIRST])
    assert not single_curves(rows[:6], _content(pairs=3))


@pytest.mark.slow
def test_a_single_figure_of_a_method_with_equal_curves_is_not_repeated() -> None:
    rows = [_row(f"method {number}", [0.1, 0.2 + number / 9]) for number in range(7)]
    titles = [plot["title"] for plot in single_curves([*rows, _row("again", *rows[2].curves)], _content(pairs=2))]
    assert titles == [row.name for row in rows]


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_a_single_round_is_no_fraction() -> None:
    """The axis said 0.96, 0.98, 1.00, 1.02, 1.04."""
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", curves([_row("Local", [0.2])], _content()))
    assert "1" in texts and "1.02" not in texts
