# SPDX-License-Identifier: Apache-2.0
"""``medpfl site init`` of columns that hold codes of many digits, such as SNOMED CT's."""

from pathlib import Path

import yaml

from medpfl.data.declared import Problems
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.site_file import load_site_file
from medpfl.data.table.declare import Table

CODES = [900000000000207008, 900000000000207009, 73211009]


def test_codes_that_no_number_holds_are_categories(tmp_path: Path) -> None:
    """As numbers, which was proposed, the first two are one."""
    rows = "".join(f"{20 + number},{CODES[number % 3]},{10**17 + number},{number % 2}\n" for number in range(60))
    (tmp_path / "t.csv").write_text(f"age,finding,serial,sick\n{rows}")
    write_site_file(tmp_path / "t.csv", tmp_path / "site.yaml", Answers({"site": "h", "dataset": "t", "label": "sick"}))
    text = (tmp_path / "site.yaml").read_text()
    assert yaml.safe_load(text)["datasets"]["t"]["features"] == {"age": "number", "finding": sorted(CODES)}
    assert "serial (60 different texts)" in text
    table = load_site_file(tmp_path / "site.yaml").dataset("t", Table)
    assert sum(len(cases) for cases in table.cases(Problems()).values()) == 60
    assert set(table.cells()["finding"]) == set(map(str, CODES))
