# SPDX-License-Identifier: Apache-2.0
"""A comparison by a metric whose unit makes it small: its tables, page and figures tell the methods apart."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from benchmarks.tables import keep, tables_of
from medpfl.compare import comparison_tables
from medpfl.compare.figures import single_curves
from medpfl.compare.report import write_report
from medpfl.compare.results import Results
from medpfl.results.compact import compact, read_compact

STORED = Path(__file__).resolve().parents[2] / "docs" / "results" / "compare-label-skew-sgd.json.xz"
SCORES = {"best", "last", "gain", "hospitals", "metrics", "together", "curve", "curves", "cross", "worst", "score"}
NONE = re.compile(r"0\.000(?!\d)")


def scaled(value: Any, inside: bool = False) -> Any:
    """A small part of all scores and gains, with the numbers of seeds and patients, and p, as they are."""
    if isinstance(value, dict):
        return {
            key: one
            if key in ("p", "needed", "picks", "wins", "losses", "pairs")
            else scaled(one, inside or key in SCORES)
            for key, one in value.items()
        }
    if isinstance(value, list):
        return [scaled(one, inside) for one in value]
    return value / 250 if inside and isinstance(value, float) else value


@pytest.fixture(scope="module")
def content() -> dict[str, Any]:
    stored = read_compact(STORED)
    return {**stored, "rows": scaled(stored["rows"]), "chosen": [], "target": None, "score": stored["score"],
            "metrics": {str(stored["score"]): {"direction": "lower", "unit": "mmol/L"}}}  # fmt: skip


@pytest.fixture(scope="module")
def small(content: dict[str, Any]) -> Results:
    return TypeAdapter(Results).validate_json(json.dumps(content))


def test_the_tables_have_three_digits_of_the_largest(small: Results, tmp_path: Path) -> None:
    assert small.decimals(small.score) == 5
    text = comparison_tables.markdown(small)
    tables = [line for line in text.splitlines() if line.startswith("|") and "Local" in line]
    assert tables and "± 0.000 " not in text and "+0.000 " not in text
    first = comparison_tables.leaderboard(small)[1][0]
    assert re.fullmatch(r"0\.00\d{3} ± 0\.00\d{3}", first[1]), first
    with (tmp_path / "told.txt").open("w") as file:
        comparison_tables.print_comparison(small, tmp_path, Console(file=file, width=200))
    assert first[1] in (tmp_path / "told.txt").read_text()


def test_the_page_has_them_too(small: Results, tmp_path: Path) -> None:
    page = re.sub(r"<[^>]+>", "", write_report(small, tmp_path).read_text())
    first = comparison_tables.leaderboard(small)[1][0][1]
    assert first.replace(" ±", "±") in page.replace("\n", " ")
    assert not NONE.findall(page.partition("Cost")[0])


@pytest.mark.usefixtures("rendered")
def test_small_curves_fill_their_figures(small: Results) -> None:
    """A margin of 0.02 made lines at the bottom of them."""
    rows = comparison_tables.ranked(small)
    many = []
    for number in range(4):
        for row in (row for row in rows if row.curve):
            curves = [[x and x * (1 + number / 9) for x in one] for one in row.curves]
            many.append(row.model_copy(update={"name": f"{row.name} {number}", "curves": curves}))
    svg = single_curves(many, small)[0]["svg"]
    assert "0.002" in svg or "0.003" in svg or "0.004" in svg


def test_what_is_kept_of_it_has_the_same_tables(content: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(compact(content))
    keep(tmp_path / "results.json", tmp_path / "kept.json.xz")
    assert tables_of(tmp_path / "kept.json.xz") == tables_of(tmp_path / "results.json")
