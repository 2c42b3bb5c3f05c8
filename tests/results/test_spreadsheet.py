# SPDX-License-Identifier: Apache-2.0
"""Every table of a report as CSV: exact, and without formulas."""

import csv
import html
import io
import re
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import pytest

from medpfl.methods.panels import SharesPanel
from medpfl.privacy.contract import Spent
from medpfl.results.report import write_page
from medpfl.results.schema import Traffic, TrainingSummary
from medpfl.results.spreadsheet import Spreadsheet
from medpfl.tasks.metrics.certainty import Certainty
from summaries import result, summary

FILE = re.compile(r'<a download="([^"]+)" href="data:text/csv;charset=utf-8,([^"]+)">')
SURE = Certainty(patients=8, interval=(0.123456, 0.7), gain=-0.1, gained=(-0.2, 0.05))


def files(page: str) -> dict[str, list[list[str]]]:
    """File to its lines, read as a spreadsheet does."""
    found = {}
    for name, content in FILE.findall(page):
        text = unquote(html.unescape(content))
        assert text.startswith("\ufeff")
        found[name] = list(csv.reader(io.StringIO(text[1:])))
    return found


def full() -> TrainingSummary:
    """A value with 17 digits, a chosen model, noise and a method's table."""
    lines = [
        result("anna", "personal", 0.1 + 0.2, SURE),
        result("anna", "local", 0.5, None),
        result("berta", "local", 0.1 + 0.2, None),
    ]
    test = [line.model_copy(update={"metrics": {**line.metrics, "hd95": 6.0}}) for line in lines]
    of = summary((test[0], 0.5), also="berta")
    spent = Spent(level="record", epsilon=1.23456, delta=1e-5, releases=3)
    panel = SharesPanel(title="Who served", shares={"anna": {"own": 1 / 3}}, note="Of all.")
    return of.model_copy(update={"test": test, "privacy": {"anna": spent}, "panels": [panel]})


def test_every_table_comes_with_its_values_to_the_last_digit(tmp_path: Path) -> None:
    sent = [Traffic(round=1, site="anna", direction="from_site", raw=1234567, encoded=77, ratio=2.0)]
    page = write_page(tmp_path, full(), [], {"model/00001": np.eye(2)}, sent).read_text()
    found = files(page)
    assert found["test-dice.csv"][1] == ["anna", "9", "0.5", "0.30000000000000004"]
    assert found["test-dice.csv"][2] == ["berta", "9", "0.30000000000000004", ""]  # it has no such model
    assert found["all-metrics.csv"][1] == ["Local", "0.4", "6.0"]
    assert found["chosen-models.csv"][1] == [
        "anna", "Personal", "0.30000000000000004", "8", "0.123456", "0.7", "-0.1", "-0.2", "0.05",
    ]  # fmt: skip
    assert found["privacy.csv"][1] == ["anna", "record", "1.23456", "1e-05", "3", "no"]
    assert found["Who-served.csv"] == [["cases of", "own"], ["anna", str(1 / 3)]]
    assert found["traffic.csv"][1] == ["anna", "1", "from_site", "1234567", "77"]
    assert len(found) == page.count("<table>") == len(set(found))


@pytest.mark.parametrize(
    "name", ["=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "  =1", "＝1+1", '=HYPERLINK("http://x")']
)
def test_no_name_becomes_a_formula(name: str) -> None:
    (line,) = csv.reader(io.StringIO(Spreadsheet("t", [name], []).text, newline=""))
    assert line == [f"'{name}"]


def test_numbers_stay_numbers_and_names_names() -> None:
    sheet = Spreadsheet("a/../b: %", ["x"], [[-0.25, None, float("nan"), 'Köln, "Süd"\nline', "a-b", ""]])
    assert list(csv.reader(io.StringIO(sheet.text, newline="")))[1] == ["-0.25", "", "", 'Köln, "Süd"\nline', "a-b", ""]
    assert sheet.file == "a-b.csv" and not set("\"<>&'") & set(sheet.link)
