# SPDX-License-Identifier: Apache-2.0
"""``medpfl site init`` of tables whose cells hold line breaks: headings and notes of spreadsheets and databases."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from medpfl.data.declared import Problems
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.site_file import load_site_file
from medpfl.data.table.declare import Table


def proposed(folder: Path, text: str) -> tuple[dict[str, Any], int]:
    """The dataset that is proposed of such a table, and how many of its rows the site file's reader then takes."""
    (folder / "t.csv").write_bytes(text.encode())
    write_site_file(folder / "t.csv", folder / "site.yaml", Answers({"site": "h", "dataset": "t", "label": "sick"}))
    found: dict[str, Any] = yaml.safe_load((folder / "site.yaml").read_text())["datasets"]["t"]
    table = load_site_file(folder / "site.yaml").dataset("t", Table)
    return found, sum(len(cases) for cases in table.cases(Problems()).values())


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("separator", [",", ";"])
def test_in_quotation_marks_they_are_part_of_the_cell(tmp_path: Path, separator: str, end: str) -> None:
    """Before, what was proposed had lost them: a category, a class or a column that the table does not have."""
    rows = [["age", f'"CRP{end}(mg/l)"', "ward", f'"free{end}{end}note"', "sick"]]
    for number in range(60):  # three lines each: more than are looked at for the separator
        ward, sick = (f'"south{end}B"', '"no"') if number % 3 else ("north", f'"yes,{end}; much"')
        rows.append([f"{20 + number}", f"{number / 4 + 0.25}", ward, f'"note {number}{end}{end}, and; more"', sick])
    found, used = proposed(tmp_path, "".join(separator.join(row) + end for row in rows))
    assert found["features"] == {"age": "number", f"CRP{end}(mg/l)": "number", "ward": ["north", f"south{end}B"]}
    assert found["label"]["classes"] == {"no": ["no"], "yes, ; much": [f"yes,{end}; much"]}
    assert found.get("separator", ",") == separator and used == 60
    (comment,) = [line for line in (tmp_path / "site.yaml").read_text().splitlines() if "free note" in line]
    assert comment.strip().startswith("#")


@pytest.mark.parametrize("sign", ["\v", "\f", "\x1c", "\x85", "\u2028"])
def test_signs_that_only_python_takes_for_a_line_end_do_not_end_a_row(tmp_path: Path, sign: str) -> None:
    """FileMaker writes a vertical tab for a line break within a cell; before, the row was said to lack columns."""
    rows = "".join(f"{20 + number},a{sign}{number % 2},{number % 2}\n" for number in range(40))
    found, used = proposed(tmp_path, f"age,ward,sick\n{rows}")
    assert found["features"] == {"age": "number", "ward": [f"a{sign}0", f"a{sign}1"]} and used == 40


def test_lines_end_as_on_old_macs_too_and_blank_ones_count_nowhere(tmp_path: Path) -> None:
    rows = "".join(f"{20 + number},{number % 2}\r\r" for number in range(40))
    found, used = proposed(tmp_path, f"\r  \rage,sick\r{rows}")
    assert found["features"] == {"age": "number"} and used == 40
