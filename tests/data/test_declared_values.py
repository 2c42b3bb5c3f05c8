# SPDX-License-Identifier: Apache-2.0
"""Tables: what a site file says of the values of its columns, by ``missing``, ``codes`` and categories, must agree."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

import declared_table
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.declared import canonical
from medpfl.data.init.answers import as_value
from medpfl.data.init.tables import is_number
from medpfl.data.meaning import described
from medpfl.data.outcome import number
from medpfl.data.site_file import load_site_file
from medpfl.data.subgroups import _number
from medpfl.data.table.declare import Table, TableData
from medpfl.deployed.reference import _canonical

FRAME = pd.DataFrame(
    {"age": [40.0, 50.0, 60.0, 70.0, 90.0, 80.0], "cp": ["a", "b", "b", "a", "c", "c"], "sick": [0, 1, 0, 1, 1, 0]}
)
DECLARED = declared_table.DECLARED


def declare(folder: Path, **others: Any) -> Table:
    return declared_table.declare(folder, DECLARED | others)


def read(folder: Path, frame: pd.DataFrame = FRAME, **others: Any) -> TableData:
    return declared_table.read(folder, frame, DECLARED | others)


@pytest.mark.parametrize(
    ("column", "declared"),
    [
        ("cp", {"features": {"age": "number", "cp": ["a", "b", "NA"]}}),  # 'NA' is missing if nothing is said
        ("cp", {"missing": ["b"]}),
        ("sick", {"missing": ["-9"], "label": {"column": "sick", "classes": {"no": [0], "yes": [1, -9.0]}}}),
        ("sick", {"label": None, "survival": {"time": "days", "event": "sick", "no": [0, "?"]}}),
    ],
)
def test_a_declared_value_cannot_mean_not_known(tmp_path: Path, column: str, declared: dict[str, Any]) -> None:
    """Its patients would be imputed as the most frequent category, or dropped, in silence."""
    with pytest.raises(SiteFileError, match=f"so it means not known, and it is a declared value of '{column}', too"):
        declare(tmp_path, **declared)
    features = {"age": "number", "cp": ["a", "b", "NA"]}
    data = read(tmp_path, features=features, codes={"cp": {"c": "NA"}})  # what hospitals agreed on, and no file holds
    assert data.raw[4].tolist() == [90, 0, 1]


def test_codes_of_a_column_that_is_not_used_are_refused(tmp_path: Path) -> None:
    """Of a column named as in the files, and not as the hospitals agreed, codes that swap two values did nothing."""
    features = {"age": "number", "sex": [1, 2]}
    swapped = {1: 2, 2: 1}
    with pytest.raises(SiteFileError, match="'codes' names 'Sex', which is no column that is used; by 'rename' it is"):
        declare(tmp_path, features=features, rename={"Sex": "sex"}, codes={"Sex": swapped})
    with pytest.raises(SiteFileError, match="'codes' names 'sxe', which is no column that is used; did you mean 'sex'"):
        declare(tmp_path, features=features, codes={"sxe": swapped})
    frame = FRAME.assign(Sex=[1, 2] * 3)
    data = read(tmp_path, frame, features=features, rename={"Sex": "sex"}, codes={"sex": swapped, "sick": {"x": 1}})
    assert data.raw[:3, 1].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("codes", "words"),
    [
        ({True: 1, False: 0}, "YAML reads yes, no, .* put them in quotes"),  # {yes: 1, no: 0}
        ({"J": True, "N": False}, "YAML reads yes, no, .* put them in quotes"),
        ({1: "a", "1.0": "b"}, "the value '1.0' is listed twice"),
    ],
)
def test_codes_are_texts_and_numbers_each_once(tmp_path: Path, codes: dict[Any, Any], words: str) -> None:
    with pytest.raises(SiteFileError, match=f"datasets.t.codes': {words}"):
        declare(tmp_path, codes={"cp": codes})


def test_a_text_with_underscores_is_no_number(tmp_path: Path) -> None:
    """Python's float takes 1_0 for 10: such a code was another one's."""
    features = {"age": "number", "cp": [10, "1_5", 15]}
    frame = FRAME.assign(cp=["10", "1_5", "15", "10", "15", "1_5"])
    data = read(tmp_path, frame, features=features)
    assert data.raw[:3, 1:].tolist() == [[0, 0], [1, 0], [0, 1]] and _canonical("1_5") != _canonical("15")
    with pytest.raises(DataError, match="'1_0' is not among the declared values"):
        read(tmp_path, frame.replace("10", "1_0"), features=features)
    assert as_value("1_5") == "1_5" and not is_number("1_5") and _number("1_5") is None and number("days", " 15 ") == 15
    with pytest.raises(ValueError, match="expected a number, got '1_5'"):
        number("days", "1_5")


CODES = [900000000000207008, 900000000000207009, 900000000000207010]
"""As SNOMED CT has them: more digits than a double holds."""


def test_codes_of_many_digits_are_not_each_other(tmp_path: Path) -> None:
    """Of the declared code and others near it one category was made, and one class, in silence."""
    frame = FRAME.assign(cp=CODES * 2)
    data = read(tmp_path, frame, features={"age": "number", "cp": CODES})
    assert data.raw[:3, 1:].tolist() == [[0, 0], [1, 0], [0, 1]]
    label = {"column": "cp", "classes": {"no": [CODES[0]], "yes": [f"{CODES[1]}.0", f"0{CODES[2]}"]}}
    data = read(tmp_path, frame, features={"age": "number"}, label=label)
    assert data.targets.tolist() == [0, 1, 1, 0, 1, 1]
    with pytest.raises(DataError, match=f"'{CODES[1]}' is not among the declared values"):
        read(tmp_path, frame, features={"age": "number", "cp": [CODES[0], CODES[2]]})
    assert len(set(map(_canonical, CODES))) == 3 and _canonical(f"{CODES[0]}.0") == _canonical(CODES[0])
    assert [as_value(str(code)) for code in CODES] == CODES and as_value("007.0") == 7
    assert canonical("1e20") == canonical(10**20) == canonical(1e20) == _canonical("1e20") == _canonical(10**20)
    assert len({described("cp", CODES[:2]), described("cp", CODES[1:])}) == 2


@pytest.mark.parametrize("quoted", [False, True])
def test_classes_named_no_and_yes_are_put_in_quotes(tmp_path: Path, quoted: bool) -> None:
    no, yes = ("no", "yes") if quoted else (False, True)  # as YAML reads no: [0] and yes: [1]
    label = {"column": "sick", "classes": {no: [0], yes: [1]}}
    arrays = {"kind": "arrays", "file": "a.npz", "inputs": "x", "labels": "y", "classes": {no: [0], yes: [1]}}
    table = {"kind": "table", "files": ["a.csv"], "features": {"age": "number"}, "label": label}
    for dataset, where in ((table, "label.classes"), (arrays, "classes")):
        file = tmp_path / "site.yaml"
        file.write_text(yaml.safe_dump({"datasets": {"blood": dataset}}))
        if quoted:
            assert load_site_file(file).datasets["blood"].class_names() == ["no", "yes"]
            continue
        with pytest.raises(SiteFileError) as caught:
            load_site_file(file)
        assert f"'datasets.blood.{where}': YAML reads yes, no, on, off, true and false as truth" in str(caught.value)
        assert "put them in quotes" in str(caught.value)
