# SPDX-License-Identifier: Apache-2.0
"""A report's curves and its settings."""

import html
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from rich.console import Console

from medpfl.compare import report
from medpfl.compare.comparison_tables import bytes_text
from medpfl.methods.panels import CurvesPanel
from medpfl.results.curves import LETTERS, MANY, curves, four_fifths
from medpfl.results.report import heatmaps, made, write_page
from medpfl.results.schema import BestRound, Traffic, ValidationLine
from medpfl.results.skew import draw_label_counts
from medpfl.results.terminal_table import print_results
from summaries import result, summary

JOB = summary((result("anna", "local", 0.5, None), 0.5))


def lines(**scores: list[float]) -> list[ValidationLine]:
    return [
        ValidationLine(site=site, model=model, round=number + 1, metrics={"dice": value})
        for model, values in scores.items()
        for site in ("mean", "anna")
        for number, value in enumerate(values)
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_models_with_equal_curves_are_named_together() -> None:
    drawn = curves(JOB, lines(**{"all_share": [0.3, 0.4]}, local=[0.1, 0.2], fedavg=[0.3, 0.4]))
    assert ">FedAvg, All share</text>" in drawn and ">Local</text>" in drawn
    apart = [*lines(fedavg=[0.3, 0.4], **{"all_share": [0.3, 0.4]})]
    apart[-1] = apart[-1].model_copy(update={"metrics": {"dice": 0.5}})  # at one hospital, in one round
    drawn = curves(JOB, apart)
    assert ">FedAvg</text>" in drawn and ">All share</text>" in drawn


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
@pytest.mark.parametrize("count", [MANY - 1, MANY])
def test_many_hospitals_are_a_mean_and_a_band(count: int) -> None:
    """With the mean there is a picture more than hospitals."""
    sites = [f"hospital-{number:02d}" for number in range(count)]
    job = summary(*((result(site, "local", 0.5, None), 0.5) for site in sites))
    told = [
        ValidationLine(site=site, model="local", round=number, metrics={"dice": 0.1 * number + 0.01 * place})
        for place, site in enumerate(["mean", *sites])
        for number in (1, 2)
    ]
    drawn = curves(job, told)
    titles = sum(f">{site}</text>" in drawn for site in sites)
    many = count == MANY
    assert titles == (0 if many else count)
    assert (f">Mean of {count} hospitals; four fifths of them lie within the bands</text>" in drawn) == many


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_names_of_the_curves_stand_below_them() -> None:
    """They stood in the first picture, on the curves; a reference's line differs by more than its colour."""
    four = {"local": [0.1, 0.2], "personal": [0.2, 0.1], "fedavg": [0.3, 0.4], "fedavg_before_mean": [0.35, 0.4]}
    drawn = curves(JOB, lines(**four))
    found = re.findall(r'<text [^>]*\by="([\d.]+)"[^>]*>(Local|Personal|FedAvg|round)</text>', drawn)
    places = {name: float(place) for place, name in found}
    assert min(places[name] for name in ("Local", "Personal", "FedAvg")) > places["round"]
    local, fedavg, before = re.findall(r"stroke-dasharray: ([\d.,]+)", drawn)
    assert local == fedavg != before


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_a_long_name_leaves_the_matrix_its_room() -> None:
    """Of four hospitals, one of them with a name of 55 letters, the numbers of the matrix lay over each other."""
    wide = []
    for last in ("dora", "university-hospital-of-north-rhine-westphalia-neurology"):
        job = summary(*((result(site, "local", 0.5, None), 0.5) for site in ("anna", "berta", "clara", last)))
        (picture,) = heatmaps(job, {"model/0001": np.full((4, 4), 0.25)})
        (width,) = re.findall(r'<image [^>]*\bwidth="([\d.]+)"', picture["svg"])
        wide.append(float(width))
    assert wide[1] > 0.9 * wide[0] > 4 * 14  # points; "0.25" has some 14


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
@pytest.mark.filterwarnings("error::UserWarning")
def test_names_at_the_matrix_of_many_hospitals_can_be_read(tmp_path: Path) -> None:
    """Of twenty hospitals they were three pixels high, beside another matrix and on a telephone. A name in Chinese gave
    warnings of matplotlib's, whose own letters are not those that a browser shows."""
    names = {"few": ["anna", "berta"], "many": ["北京协和医院", *(f"hospital-{number:02d}" for number in range(19))]}
    style = {}
    for kind, sites in names.items():
        job = summary(*((result(site, "local", 0.5, None), 0.5) for site in sites))
        matrix = np.full((len(sites), len(sites)), 1 / len(sites))
        page = write_page(tmp_path, job, [], {"a/0001": matrix, "b/0001": matrix}, []).read_text()
        head = r'<div class="(grid|below)">\s*<div><div class="figure wide" style="--least: (\d+)px"'
        found = re.search(head + r'.*?viewBox="0 0 ([\d.]+) ', page, re.DOTALL)
        assert found is not None and int(found[2]) == pytest.approx(float(found[3]), abs=1)  # a point of its 7 a pixel
        style[kind] = found[1]
        assert ".wide svg { min-width: var(--least, 42rem); }" in page
    assert style == {"few": "grid", "many": "below"}


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
@pytest.mark.filterwarnings("error::UserWarning")
def test_large_numbers_are_written_out_at_the_curves() -> None:
    """The axis of costs had "1e6" above it, and its unit below said EUR."""
    drawn = curves(JOB, lines(local=[2_310_000.0, 2_310_001.0], fedavg=[2_310_003.0, 2_310_002.0]))
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", drawn)
    assert "2310001.0" in texts and not [text for text in texts if re.search(r"\de\d|\de?\+", text)]
    small = re.findall(r"<text [^>]*>([^<]*)</text>", curves(JOB, lines(local=[2e-5, 3e-5])))
    assert "0.00002" in [text.rstrip("0") for text in small]


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_long_names_are_whole_in_the_graph_and_leave_the_bubbles_their_room(tmp_path: Path) -> None:
    sites = ["anna", "berta", "clara", "klinikum-rechts-der-isar-muenchen"]
    job = summary(*((result(site, "local", 0.5, None), 0.5) for site in sites))
    job = job.model_copy(update={"networks": {"model": [("anna", "berta")]}})
    page = write_page(tmp_path, job, [], {}, []).read_text()
    svg = page.partition("Similar hospitals")[2].partition("</svg>")[0]
    (width,) = re.findall(r'viewBox="0 0 ([\d.]+) ', svg)
    (x,) = re.findall(rf'<text [^>]*x="([\d.]+)"[^>]*>{sites[-1]}</text>', svg)
    assert float(x) + 0.55 * 8 * len(sites[-1]) < float(width)  # begins there, in letters of 8 points
    figure = draw_label_counts({site: [3] * 7 for site in sites}, ["benign keratosis-like lesions", *"abcdef"])
    figure.canvas.draw()
    box = figure.axes[0].get_window_extent()
    assert box.height / figure.dpi * 72 > 7 * 10 and box.width / figure.dpi * 72 > 4 * 20


def test_four_fifths_of_the_hospitals_lie_between() -> None:
    points = {f"h{number}": {"local": [(1, number / 10), (3, 1.0)]} for number in range(11)}
    rounds, low, high = four_fifths({**points, "mean": {"local": [(1, 9.0)]}, "late": {"other": [(1, 5.0)]}}, "local")
    assert rounds == [1, 3] and low == pytest.approx([0.1, 1.0]) and high == pytest.approx([0.9, 1.0])


def test_settings_are_readable_yaml(tmp_path: Path) -> None:
    found = JOB.model_copy(update={"components": {"model": "Mean <b>"}, "codecs": {"from_site": {"bits": 8}}})
    shown = yaml.safe_load(made(found))
    assert shown["slots"] == {"model": "Mean <b>"} and shown["codecs"] == {"from_site": {"bits": 8}}
    assert shown["settings"]["rounds"] == 1 and made(found).startswith("slots:\n  model: ")
    page = write_page(tmp_path, found, [], {}, []).read_text()
    (block,) = re.findall("<pre>(.*?)</pre>", page, re.DOTALL)
    assert "<b>" not in page and yaml.safe_load(html.unescape(block)) == shown


@pytest.mark.slow
def test_names_of_hospitals_leave_a_telephone_room_for_numbers(tmp_path: Path) -> None:
    """The first column is broken where it must be, and stays where it is while the others are looked through."""
    page = write_page(tmp_path, JOB, [], {}, []).read_text()
    rule, wide, _ = re.findall(r"th:first-child, td:first-child \{([^}]*)\}", page)
    assert "white-space: normal" in rule and "overflow-wrap: anywhere" in rule and "position: sticky" in rule
    assert "@media (min-width: 48rem) { th:first" in page and "min-width: 10.5rem" in wide  # "vidir_moder n" on a desk


def test_paper_has_all_columns(tmp_path: Path) -> None:
    """Of a job with six models whose scores have six digits, the last digit of the last column was beyond the edge of
    the paper: 223010 EUR read 22301."""
    page = write_page(tmp_path, JOB, [], {}, []).read_text()
    before, _, paper = page.partition("</style>")[0].partition("@media print {")
    assert ".scroll { overflow-x: auto" in before and ".scroll { overflow: visible;" in paper
    assert "td { white-space: normal;" in paper and ".wide svg { min-width: 0; }" in paper
    assert b"{{ print_style() }}\n</style>" in Path(report.__file__).with_suffix(".html").read_bytes()


def test_one_hospital_and_one_round_are_no_several(tmp_path: Path) -> None:
    assert JOB.settings.rounds == len(JOB.roster) == 1
    page = " ".join(write_page(tmp_path, JOB, [], {}, []).read_text().split())
    assert "1 hospital, 1 round, seed 0;" in page and not re.search(r"\b1 (hospitals|rounds)\b", page)


def strokes(drawn: str) -> list[tuple[str, str]]:
    """Colour and dashes of every curve, in their order; what is drawn in the legend, too."""
    lines = [styled(one, drawn) for one in re.findall(r"<path ([^>]*)/>", drawn)]
    curves = [style for style in lines if "stroke-width: 1.4" in style]
    parts = [(re.search(r"stroke: (#\w+)", one), re.search(r"stroke-dasharray: ([\d.,]+)", one)) for one in curves]
    return [(colour[1] if colour else "", dashes[1] if dashes else "") for colour, dashes in parts]


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_each_hospital_has_one_line_in_all_pictures_of_a_method(tmp_path: Path) -> None:
    """The eleventh hospital had the line of the first, and behind one that has no value of a name the others' colours
    were the next one's."""
    sites = [f"h{number:02d}" for number in range(12)]
    job = summary(*((result(site, "local", 0.5, None), 0.5) for site in sites))
    job = job.model_copy(update={"panels": [CurvesPanel(title="Measured", names=["own", "tuned"])]})
    told = [
        ValidationLine(
            site=site, model=name, round=number, metrics={name: None if (name, site) == ("own", "h01") else 0.1 * place}
        )
        for name in ("own", "tuned")
        for place, site in enumerate(sites)
        for number in (1, 2, 3)
    ]
    page = write_page(tmp_path, job, told, {}, []).read_text()
    drawn = page.partition("Picture: Measured")[2].partition("</svg>")[0]
    found = strokes(drawn)
    own, tuned, legend = found[:11], found[11:23], found[23:]
    assert len(set(tuned)) == len(sites) and legend == tuned
    assert own == [line for site, line in zip(sites, tuned, strict=True) if site != "h01"]
    assert len({dashes for _, dashes in tuned[:4]}) == 4  # told apart in print, too


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_the_scores_of_a_single_round_are_seen() -> None:
    """A line of one point is not drawn, so that both pictures were empty, between the rounds "0.96" and "1.04"."""
    drawn = curves(JOB, lines(local=[0.1], fedavg=[0.2]))
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", drawn)
    assert "1" in texts and "0.96" not in texts
    inside = [one for one in re.findall(r"<use ([^>]*)>", drawn) if "fill: #d1802b" in styled(one, drawn)]
    assert len(inside) >= 2  # a point in the picture of the mean, and in the hospital's


def styled(element: str, drawn: str) -> str:
    """An element's style, which is its own or a class's."""
    own = re.search(r'style="([^"]*)"', element)
    named = re.search(r'class="([^"]*)"', element)
    if own or named is None:
        return own[1] if own else ""
    return re.findall(rf"\.{named[1]}\{{([^}}]*)\}}", drawn)[0]


def test_traffic_is_told_without_powers_of_ten(tmp_path: Path) -> None:
    """A hospital that sent 12.3 GB was said to have sent "1.23e+04" MB, and of a small model "8e-05"."""
    told = [
        Traffic(round=1, site="anna", direction=way, raw=raw, encoded=encoded, ratio=1.0)
        for way, raw, encoded in (("from_site", 12_345_600_000, 999_700_000), ("to_site", 80, 1_250_000))
    ]
    page = write_page(tmp_path, JOB, [], {}, told).read_text()
    assert "<td>anna</td><td>0.00008</td><td>1.25</td><td>12346</td><td>1000</td>" in page
    assert [bytes_text(value) for value in (1.5e12, 999.9e6, 12.3e6, 100e3)] == [
        "1500 GB",
        "1000 MB",
        "12.3 MB",
        "100 kB",
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("rendered")
def test_long_names_above_the_curves_stay_above_their_own() -> None:
    """Two hospitals side by side with names of 57 letters: the titles lay over each other."""
    names = [f"Universitaetsklinikum-Hamburg-Eppendorf-Radiologie-{where}" for where in ("Norden", "Sueden")]
    job = summary(*((result(site, "local", 0.5, None), 0.5) for site in names))
    told = [
        ValidationLine(site=site, model="local", round=number, metrics={"dice": 0.1 * number})
        for site in ("mean", *names)
        for number in (1, 2)
    ]
    texts = re.findall(r"<text [^>]*>([^<]*)</text>", curves(job, told))
    above = [text for text in texts if len(text) > 8 and text[0] not in "0123456789"]
    assert "Norden" in " ".join(above) and max(map(len, above)) <= LETTERS


def test_a_mean_of_some_hospitals_does_not_push_the_others_off_the_page(tmp_path: Path) -> None:
    """ "0.741 (2 of 3 hospitals)" in one line made each column so wide that half of the models were not seen."""
    page = write_page(tmp_path, JOB, [], {}, []).read_text()
    assert re.search(r"tr\.sum td \{ white-space: normal;", page)


def test_what_chose_the_rounds_is_told_where_validation_cases_are_missing(tmp_path: Path) -> None:
    """A hospital without any has no say in the choice, and where none has any there is no choice."""
    nobody = JOB.model_copy(update={"sizes": {"anna": {"train": 9, "validation": 0, "test": 3}}})
    page = " ".join(write_page(tmp_path, nobody, [], {}, []).read_text().split())
    assert "No hospital told a validation score, so that no round could be chosen: every model is that" in page
    assert "chosen by the mean validation score" not in page and "after that choice" not in page
    sizes = {**nobody.sizes, "berta": {"train": 9, "validation": 4, "test": 3}}
    some = nobody.model_copy(update={"sizes": sizes, "best": {"local": BestRound(round=1, score=0.5)}})
    page = " ".join(write_page(tmp_path, some, [], {}, []).read_text().split())
    assert "of all hospitals but those without validation cases (anna) (Local: round 1)" in page
    for left, words in ((nobody, "(last round: no hospital told a validation score)"), (some, "(best round by")):
        (tmp_path / "summary.json").write_text(left.model_dump_json())
        console = Console(record=True, width=200)
        print_results(tmp_path, console)
        assert words in " ".join(console.export_text().split())
