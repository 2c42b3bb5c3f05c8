# SPDX-License-Identifier: Apache-2.0
"""Numbers with a sign after the thousands, as spreadsheets write them: 1,096 beside 219, or 1.096 where commas are
decimal signs. Read as a decimal sign, such a number is a thousandth of what it is."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from medpfl.check.check import check_data
from medpfl.core.errors import DataError
from medpfl.data.declared import Problems
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.numbers import like_thousands
from medpfl.data.site_file import load_site_file
from medpfl.data.table.declare import Table

COUNTS = [214 + 61 * number for number in range(30)]  # from 214 to 1983; 17 of them are a thousand or more


def written(sign: str, separator: str) -> str:
    """Of each case an age, a count of platelets and whether it is sick."""
    lines = [separator.join(("age", "platelets", "sick"))]
    for number, count in enumerate(COUNTS):
        cell = f"{count:,}".replace(",", sign)
        lines.append(separator.join((str(40 + number), f'"{cell}"', str(number % 2))))
    return "\n".join(lines) + "\n"


def proposed(folder: Path, text: str) -> tuple[str, dict[str, Any]]:
    """The site file that ``site init`` writes of such a table, and the dataset in it."""
    (folder / "blood.csv").write_text(text)
    write_site_file(
        folder / "blood.csv", folder / "site.yaml", Answers({"site": "h", "dataset": "blood", "label": "sick"})
    )
    said = (folder / "site.yaml").read_text()
    return said, yaml.safe_load(said)["datasets"]["blood"]


@pytest.mark.parametrize(("sign", "separator"), [(",", ","), (",", "\t"), (".", ";"), (".", ",")])
def test_site_init_leaves_such_a_column_out_and_says_why(tmp_path: Path, sign: str, separator: str) -> None:
    """Before, it proposed a decimal comma, or a number with a point, and the numbers became 1.008 beside 214."""
    said, found = proposed(tmp_path, written(sign, separator))
    assert "decimal" not in found and found["features"] == {"age": "number"}
    assert f"platelets (is '1{sign}007' a thousand?" in said


def test_a_decimal_comma_elsewhere_is_seen_nevertheless(tmp_path: Path) -> None:
    lines = written(".", ";").splitlines()
    crp = ["crp", *(f"{number},5" for number in range(len(COUNTS)))]
    said, found = proposed(tmp_path, "\n".join(f"{one};{line}" for one, line in zip(crp, lines, strict=True)))
    assert found["decimal"] == "," and list(found["features"]) == ["crp", "age"]
    assert "platelets (is '1.007' a thousand?" in said


@pytest.mark.parametrize(("sign", "separator"), [(",", ","), (".", ";")])
def test_the_data_check_warns_where_a_site_file_declares_such_numbers(
    tmp_path: Path, sign: str, separator: str
) -> None:
    (tmp_path / "blood.csv").write_text(written(sign, separator))
    dataset = {
        "kind": "table",
        "files": ["blood.csv"],
        "separator": separator,
        "decimal": sign,
        "features": {"age": "number", "platelets": "number"},
        "label": {"column": "sick", "classes": {"no": [0], "yes": [1]}},
    }
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"blood": dataset}}))
    report = check_data(tmp_path / "site.yaml", None, None, lambda what, done, count: None)
    (warning,) = [one for one in report.warnings if "three decimal places" in one]
    assert warning.startswith("column 'platelets': 17 numbers have three decimal places, such as 1.007, ")


def test_a_thousand_where_a_number_with_a_point_belongs_is_not_taken_for_a_decimal_comma_alone(tmp_path: Path) -> None:
    (tmp_path / "blood.csv").write_text(written(",", ","))
    dataset = {
        "kind": "table",
        "files": ["blood.csv"],
        "features": {"age": "number", "platelets": "number"},
        "label": {"column": "sick", "classes": {"no": [0], "yes": [1]}},
    }
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"blood": dataset}}))
    with pytest.raises(DataError, match=r"got '1,007' \(if its comma stands after thousands, write the number without"):
        load_site_file(tmp_path / "site.yaml").dataset("blood", Table).cases(Problems())


@pytest.mark.parametrize(
    ("cells", "found"),
    [
        (["1,096", "219", "16,000"], ["1,096", "16,000"]),
        (["-1.096", "0", "+219"], ["-1.096"]),
        (["0,987", "219"], []),  # nobody writes a thousand so
        (["1.096", "219.0"], []),
        (["1.096", "2.19", "3"], []),
        (["1,096", "2,001"], []),  # of three decimal places each: may be either
        (["1,096", "1200"], []),  # who writes this has no sign after thousands
        (["1,096", "219", "n.b."], []),
        (["219", "4"], []),
        ([], []),
    ],
)
def test_which_columns_look_so(cells: list[str], found: list[str]) -> None:
    assert like_thousands(cells) == found
