# SPDX-License-Identifier: Apache-2.0
"""Groups of patients that a site file names: where their columns come from, how numbers are banded, what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from medpfl.check.check import check_data
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.contract import Dataset
from medpfl.data.site_file import load_site_file
from medpfl.data.subgroups import Described, Grouping, groupings
from pictures import TABLE, images, write_images

ROWS = ["age,sex,sick,part", "41,f,0,train", "50,m,1,train", "64,f,0,test", "65,,1,test", "80,f,1,validation"]
BLOOD: dict[str, Any] = {
    "kind": "table",
    "files": ["t.csv"],
    "features": {"age": "number"},
    "label": {"column": "sick", "classes": {"no": [0], "yes": [1]}},
    "split": {"column": "part"},
}


def declared(folder: Path, subgroups: object, **changes: Any) -> Dataset:
    (folder / "t.csv").write_text("\n".join(ROWS) + "\n")
    content = {"datasets": {"t": {**BLOOD, **changes, "subgroups": subgroups}}}
    (folder / "site.yaml").write_text(yaml.safe_dump(content))
    return load_site_file(folder / "site.yaml").datasets["t"]


def found(dataset: Dataset) -> list[tuple[str, dict[str, str]]]:
    assert isinstance(dataset, Described)
    return [(one.column, named(one)) for one in groupings(dataset)]


def named(one: Grouping) -> dict[str, str]:
    return {name: one.groups[place] for name, place in one.of.items()}


def test_texts_numbers_with_edges_and_quantiles_of_a_table(tmp_path: Path) -> None:
    dataset = declared(tmp_path, ["sex", {"column": "age", "edges": [50, 65]}])
    lines = [f"t.csv:{line}" for line in range(2, 7)]
    assert found(dataset) == [
        ("sex", dict(zip(lines, ["f", "m", "f", "not known", "f"], strict=True))),
        ("age", dict(zip(lines, ["below 50", "50 to below 65", "50 to below 65", *["65 and above"] * 2], strict=True))),
    ]
    (grouping,) = groupings(declared(tmp_path, [{"column": "age", "quantiles": 2}]))  # type: ignore[arg-type]
    assert grouping.groups == ("below 64", "64 and above") and list(grouping.of.values()) == [0, 0, 1, 1, 1]


def test_edges_are_told_in_full(tmp_path: Path) -> None:
    """Of days as numbers two groups were "2.0201e+07 to below 2.0201e+07"."""
    edges = [20200101, 20200104, 20200107.5]
    (grouping,) = groupings(declared(tmp_path, [{"column": "age", "edges": edges}]))  # type: ignore[arg-type]
    shown = ("below 20200101", "20200101 to below 20200104", "20200104 to below 20200107.5", "20200107.5 and above")
    assert grouping.groups == shown


def test_a_column_of_an_images_table_and_a_placeholder(tmp_path: Path) -> None:
    write_images(tmp_path)
    ((column, groups),) = found(images(tmp_path, TABLE, subgroups=["site"]))
    assert column == "site" and groups["images/i03.png"] == "b" and groups["images/i00.png"] == "a"


def test_a_field_of_a_datalist(tmp_path: Path) -> None:
    items = [{"image": f"{n}.nii", "label": f"{n}_l.nii", **({"scanner": 7} if n else {})} for n in range(6)]
    (tmp_path / "list.json").write_text(json.dumps({"training": items}))
    volumes = {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"t": {**volumes, "subgroups": ["scanner"]}}}))
    ((_, groups),) = found(load_site_file(tmp_path / "site.yaml").datasets["t"])
    assert groups["0"] == "not known" and groups["5"] == "7"
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"t": {**volumes, "subgroups": ["scaner"]}}}))
    with pytest.raises(DataError, match=r"no item has the field 'scaner', which 'subgroups' names; did you mean 'sca"):
        found(load_site_file(tmp_path / "site.yaml").datasets["t"])


@pytest.mark.parametrize(
    ("subgroups", "sentence"),
    [
        (["sx"], r"t\.csv: column 'sx' is missing; the file has: age, sex, sick, part; did you mean 'sex'\?"),
        ([{"column": "sex", "quantiles": 3}], r"t\.csv:2: 'subgroups': column 'sex' makes bands of numbers, got 'f'"),
    ],
)
def test_a_wrong_column_is_a_sentence_and_the_data_check_tells_it(
    tmp_path: Path, subgroups: object, sentence: str
) -> None:
    with pytest.raises(DataError, match=sentence) as raised:
        found(declared(tmp_path, subgroups))
    assert raised.value.public == "DataError (see this hospital's log)"
    assert str(raised.value) in check_data(tmp_path / "site.yaml", None, None, lambda *_: None).problems


@pytest.mark.parametrize(
    ("subgroups", "sentence"),
    [
        ([{"column": "age", "egdes": [1]}], r"unknown key 'datasets\.t\.subgroups\.0\.egdes'; did you mean 'edges'\?"),
        ([{"column": "age", "edges": [60, 40]}], "the edges of 'age' must ascend"),
        ([{"column": "age", "edges": [60], "quantiles": 2}], "'age' has 'edges' and 'quantiles'; leave one out"),
        (["age", "age"], "the column 'age' is listed twice"),
    ],
)
def test_a_wrong_declaration_is_a_sentence(tmp_path: Path, subgroups: object, sentence: str) -> None:
    with pytest.raises(SiteFileError, match=sentence):
        declared(tmp_path, subgroups)


def test_a_column_of_many_values_needs_bands(tmp_path: Path) -> None:
    ROWS_ = ["age,sex,sick,part", *(f"{age},f,0,train" for age in range(30)), "70,f,1,test"]
    dataset = declared(tmp_path, ["age"])
    (tmp_path / "t.csv").write_text("\n".join(ROWS_) + "\n")
    with pytest.raises(DataError, match=r"'age' has 31 values, expected at most 20; of numbers make bands: \{column"):
        found(dataset)
