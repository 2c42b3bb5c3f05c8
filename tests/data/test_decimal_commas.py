# SPDX-License-Identifier: Apache-2.0
"""Text tables as much of Europe writes them: semicolons between columns, and commas as decimal signs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from medpfl.core.errors import DataError
from medpfl.data.declared import Problems
from medpfl.data.images.declare import Images
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.preparation import Spec
from medpfl.data.series.declare import Series
from medpfl.data.site_file import load_site_file
from medpfl.data.table.declare import Table, read_table
from medpfl.data.table.new import new_rows
from medpfl.deployed import reference

POINTS = "age,crp,grade,sick\n" + "".join(f"{40 + n}.5,{n % 5}.{n},{('1.5', '2')[n % 2]},{n % 2}\n" for n in range(10))
COMMAS = POINTS.replace(",", ";").replace(".", ",")
DECLARED: dict[str, Any] = {
    "kind": "table",
    "files": ["t.csv"],
    "features": {"age": "number", "crp": "number", "grade": [1.5, 2]},
    "label": {"column": "sick", "classes": {"well": [0], "ill": [1]}},
}
EUROPEAN = {"separator": ";", "decimal": ","}


def table(folder: Path, text: str, **others: Any) -> Table:
    (folder / "t.csv").write_text(text)
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": {"t": DECLARED | others}}))
    return load_site_file(folder / "site.yaml").dataset("t", Table)


def test_a_table_with_commas_is_the_same_table(tmp_path: Path) -> None:
    """Numbers, categories that are numbers, and new rows; a quoted number may even hold the separator."""
    points, commas = read_table(table(tmp_path, POINTS)), read_table(table(tmp_path, COMMAS, **EUROPEAN))
    quoted = POINTS.splitlines()[0] + "\n"
    for line in POINTS.splitlines()[1:]:
        quoted += ",".join(f'"{cell.replace(".", ",")}"' for cell in line.split(",")) + "\n"
    for other in (commas, read_table(table(tmp_path, quoted, decimal=","))):
        np.testing.assert_array_equal(points.raw, other.raw)
        np.testing.assert_array_equal(points.features, other.features)
    (tmp_path / "new.csv").write_text("age;crp;grade\n40,5;1,25;1,5\n")
    np.testing.assert_allclose(
        new_rows(tmp_path / "new.csv", commas.preparation)[1][0] * commas.preparation.scale + commas.preparation.mean,
        [40.5, 1.25, 0.0],
    )


def test_the_reference_reader_of_exported_models_reads_them_alike(tmp_path: Path) -> None:
    data = read_table(table(tmp_path, COMMAS, **EUROPEAN))
    told = {"preparation": data.preparation.model_dump(mode="json")}
    np.testing.assert_allclose(reference._of_table(tmp_path / "t.csv", told), data.features, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        # a thousand, or a decimal point? not to be guessed
        ("1.234", "column 'crp': expected a number, got '1.234' (with a point, where 'decimal' says"),
        ("1.234,5", "column 'crp': expected a number, got '1.234,5'"),
        ("1,2,3", "column 'crp': expected a number, got '1,2,3'"),
        ("wenig", "column 'crp': expected a number, got 'wenig'"),
    ],
)
def test_what_is_no_number_with_a_comma_is_refused(tmp_path: Path, cell: str, words: str) -> None:
    text = COMMAS.replace("40,5;0,0;", f"40,5;{cell};")
    with pytest.raises(DataError) as caught:
        read_table(table(tmp_path, text, **EUROPEAN))
    assert f"t.csv:2: {words}" in str(caught.value)


def test_who_forgot_the_keys_is_told_of_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"column 'age' is missing.*'separator' says \",\", is it \";\"\?"):
        read_table(table(tmp_path, COMMAS))
    with pytest.raises(DataError, match=r"expected a number, got '40,5'.*'decimal: \",\"'"):
        read_table(table(tmp_path, COMMAS, separator=";"))


def test_recordings(tmp_path: Path) -> None:
    """Channels, and a number to predict; a thousand with a point is refused in either."""
    said = {
        "kind": "series",
        "files": ["a.csv", "b.csv", "c.csv"],
        "channels": ["x"],
        "value": "dose",
        "window": {"length": 2},
    }

    def series(decimal: str, odd: str = "") -> Series:
        separator = ";" if decimal == "," else ","
        for number, name in enumerate("abc"):
            rows = [["x", "dose"], *([f"{step}{decimal}5", odd or f"{number}{decimal}25"] for step in range(4))]
            (tmp_path / f"{name}.csv").write_text("".join(separator.join(row) + "\n" for row in rows))
        others = EUROPEAN if decimal == "," else {}
        (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"s": said | others}}))
        return load_site_file(tmp_path / "site.yaml").dataset("s", Series)

    loaded = [series(sign).load(Spec("value", ("windows",))) for sign in (".", ",")]
    for split in ("train", "validation", "test"):
        one, other = (data.splits[split] for data in loaded)
        assert len(one) and np.array_equal(one.inputs[:], other.inputs[:])
        assert np.array_equal(one.targets[:], other.targets[:])
    with pytest.raises(DataError, match=r"a\.csv:2: column 'dose': expected a number, got '1\.5'"):
        series(",", odd="1.5").load(Spec("value", ("windows",)))


def test_a_table_of_images(tmp_path: Path) -> None:
    for number in range(6):
        Image.new("L", (4, 4), number).save(tmp_path / f"i{number}.png")
    rows = "".join(f"i{number};{number},5\n" for number in range(6))
    (tmp_path / "t.csv").write_text("image;age\n" + rows)
    said = {
        "kind": "images",
        "files": "*.png",
        "channels": 1,
        "table": {"file": "t.csv", "image": "image", **EUROPEAN},
        "value": "age",
    }
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"i": said}}))
    cases = load_site_file(tmp_path / "site.yaml").dataset("i", Images).cases(Problems())
    assert sorted(float(case.label) for split in cases.values() for case in split) == [0.5, 1.5, 2.5, 3.5, 4.5, 5.5]


def proposed(folder: Path, **given: str) -> dict[str, Any]:
    """The dataset that ``site init`` writes of t.csv, or of the folder's images."""
    place = folder / "t.csv" if "place" not in given else folder / given.pop("place")
    write_site_file(place, folder / "site.yaml", Answers({"site": "h", "dataset": "t", **given}))
    found: dict[str, Any] = yaml.safe_load((folder / "site.yaml").read_text())["datasets"]["t"]
    return found


@pytest.mark.parametrize("separator", [";", ","])
def test_site_init_sees_them(tmp_path: Path, separator: str) -> None:
    """Before, a column of few such numbers was proposed as categories, one of many as texts that are left out."""
    lines = [line.split(";") for line in COMMAS.splitlines()]
    (tmp_path / "t.csv").write_text(
        "\n".join(separator.join(f'"{c}"' if separator in c else c for c in line) for line in lines)
    )
    found = proposed(tmp_path, label="sick")
    assert found["decimal"] == "," and found["features"] == {"age": "number", "crp": "number", "grade": "number"}
    assert found.get("separator", ",") == separator
    assert len(load_site_file(tmp_path / "site.yaml").dataset("t", Table).cases(Problems())["train"]) == 6


def test_site_init_with_commas_but_no_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("\n".join(COMMAS.splitlines()[1:]))
    found = proposed(tmp_path, label="column_4")
    assert found["columns"] == ["column_1", "column_2", "column_3", "column_4"] and found["decimal"] == ","


def test_a_column_with_points_beside_them_stays_a_text(tmp_path: Path) -> None:
    rows = "".join(f"{n},5;v{n % 2}.1;{('2.1', '2.2')[n % 2]};{n // 2 % 2}\n" for n in range(12))
    (tmp_path / "t.csv").write_text("crp;form;version;sick\n" + rows)
    found = proposed(tmp_path, label="sick")
    assert found["features"]["crp"] == "number" and found["features"]["version"] == [2.1, 2.2]
    read_table(load_site_file(tmp_path / "site.yaml").dataset("t", Table))


def test_lists_between_commas_are_no_decimals(tmp_path: Path) -> None:
    """In a table with commas between columns a text such as "1,2" may be a list; as many columns have a point."""
    rows = "".join(f'{n}.5,"{n % 2},{n % 3}",{n // 2 % 2}\n' for n in range(12))
    (tmp_path / "t.csv").write_text("crp,wards,sick\n" + rows)
    found = proposed(tmp_path, label="sick")
    assert "decimal" not in found and found["features"]["crp"] == "number"
    assert found["features"]["wards"] == ["0,0", "0,1", "0,2", "1,0", "1,1", "1,2"]


@pytest.mark.parametrize(("label", "key"), [("sick", "label"), ("age", "value")])
def test_site_init_of_images_with_such_a_table(tmp_path: Path, label: str, key: str) -> None:
    """Before, how the table is written was not proposed, and a number to predict ended with an error of Python's."""
    (tmp_path / "pictures").mkdir()
    for number in range(30):
        Image.new("L", (4, 4), number).save(tmp_path / "pictures" / f"i{number}.png")
    rows = "".join(f"i{number};{number},5;{number % 2}\n" for number in range(30))
    (tmp_path / "pictures" / "t.csv").write_text("image;age;sick\n" + rows)
    found = proposed(tmp_path, place="pictures", label=label)
    assert found["table"] == {"file": "pictures/t.csv", "image": "image", **EUROPEAN} and key in found
    assert len(load_site_file(tmp_path / "site.yaml").dataset("t", Images).cases(Problems())["train"]) == 18
