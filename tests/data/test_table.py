# SPDX-License-Identifier: Apache-2.0
"""Tables: real CSV files in, numbers or one sentence out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from medpfl.core.errors import DataError
from medpfl.data.declared import Problems
from medpfl.data.preparation import Spec
from medpfl.data.site_file import load_site_file
from medpfl.data.table.declare import Table, TableData, read_table

HEADER = "age,cp,num\n"
ROWS = ["40,1,0\n", "50,2,1\n", "60,3,0\n", "70,1,2\n", "45,2,0\n", "55,3,1\n"]


def declare(folder: Path, **others: Any) -> Table:
    table: dict[str, Any] = {
        "kind": "table",
        "files": ["t.csv"],
        "features": {"age": "number", "cp": [1, 2, 3]},
        "label": {"column": "num", "classes": {"healthy": [0], "ill": [1, 2]}},
        "split": {"fractions": {"train": 0.5, "test": 0.5}},
    } | others
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": {"t": table}}, sort_keys=False))
    declared = load_site_file(folder / "site.yaml").dataset("t", Table)
    assert isinstance(declared, Table)
    return declared


def read(folder: Path, text: str | bytes, **others: Any) -> TableData:
    (folder / "t.csv").write_bytes(text.encode() if isinstance(text, str) else text)
    return read_table(declare(folder, **others))


def test_header_or_declared_columns_make_no_difference(tmp_path: Path) -> None:
    named = read(tmp_path, HEADER + "".join(ROWS))
    bare = read(tmp_path, "".join(ROWS), columns=["age", "cp", "num"])
    assert np.array_equal(named.features, bare.features) and np.array_equal(named.targets, bare.targets)
    assert named.columns == ["age", "cp=2", "cp=3"]  # one-hot without the first category
    assert named.class_names == ["healthy", "ill"]
    assert named.targets.tolist() == [0, 1, 0, 1, 0, 1]
    assert named.rows[0] == "t.csv:2" and bare.rows[0] == "t.csv:1"


def test_only_the_training_part_standardises(tmp_path: Path) -> None:
    data = read(tmp_path, HEADER + "".join(ROWS))
    raw = np.array([[40, 0, 0], [50, 1, 0], [60, 0, 1], [70, 0, 0], [45, 1, 0], [55, 0, 1]], dtype=float)
    train = raw[data.splits["train"]]
    assert len(train) == 3 and len(data.splits["test"]) == 3
    mean = train.sum(axis=0) / 3
    deviation = np.sqrt(((train - mean) ** 2).sum(axis=0) / 2)
    expected = (raw - mean) / np.where(deviation == 0, 1, deviation)
    np.testing.assert_allclose(data.features, expected, rtol=1e-12, atol=1e-12)


def test_a_constant_column_is_zero(tmp_path: Path) -> None:
    data = read(tmp_path, HEADER + "".join(f"7,{row.split(',', 1)[1]}" for row in ROWS))
    assert not data.features[:, 0].any()


@pytest.mark.parametrize("value", [0.1, 0.7])  # the mean of three is not the value, to the last bit
def test_a_decimal_fraction_that_is_constant_in_training_does_not_blow_other_values_up(
    tmp_path: Path, value: float
) -> None:
    parts = ["train", "train", "train", "test", "test", "test"]
    rows = [f"{value if part == 'train' else value + 1},1,{number % 2},{part}\n" for number, part in enumerate(parts)]
    data = read(tmp_path, "age,cp,num,part\n" + "".join(rows), split={"column": "part"})
    assert data.preparation.scale[0] == 1
    np.testing.assert_allclose(data.features[:, 0], [0, 0, 0, 1, 1, 1], atol=1e-12)


def test_one_value_written_in_several_ways(tmp_path: Path) -> None:
    data = read(tmp_path, HEADER + "40,3,0\n50,3.0,0.0\n60, 3 ,1\n70,1.0,1.00\n45,2,2\n55,2,2e0\n")
    on = data.features[:, 2] > data.features[:, 2].min()
    assert on.tolist() == [True, True, True, False, False, False]
    assert data.targets.tolist() == [0, 0, 1, 1, 1, 1]


def test_blank_lines_quotes_and_a_byte_order_mark_do_not_shift_anything(tmp_path: Path) -> None:
    data = read(tmp_path, "\ufeff" + HEADER + '\n"40", "1","0"\n\n' + "".join(ROWS) + "\n\n")
    assert data.rows[:2] == ["t.csv:3", "t.csv:5"]
    assert len(data.targets) == 7


def test_missing_cells(tmp_path: Path) -> None:
    text = HEADER + "".join(ROWS) + "?,1,0\n80,NA,0\n,1,1\n"
    with pytest.raises(DataError, match=r"t\.csv:8: column 'age' is missing .*value: 3.*'missing_rows: drop'"):
        read(tmp_path, text)
    dropped = read(tmp_path, text, missing_rows="drop")
    assert dropped.rows == [f"t.csv:{line}" for line in range(2, 8)]
    assert np.array_equal(dropped.features, read(tmp_path, HEADER + "".join(ROWS)).features)


def test_training_after_a_check_still_refuses(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(HEADER + "".join(ROWS) + "old,1,0\n")
    table, problems = declare(tmp_path), Problems(keep=True)
    table.cases(problems)
    assert len(problems.found) == 1
    with pytest.raises(DataError, match="expected a number, got 'old'"):
        table.load(Spec("class", ("rows",)))


def test_groups_stay_together_and_a_missing_group_is_a_missing_value(tmp_path: Path) -> None:
    rule = {"fractions": {"train": 0.5, "test": 0.5}, "group": "who"}
    lines = [f"{row.strip()},{who}\n" for row, who in zip(ROWS, "aabbcc", strict=True)]
    data = read(tmp_path, "age,cp,num,who\n" + "".join(lines), split=rule)
    assert all(index ^ 1 in indices for indices in data.splits.values() for index in indices)
    with pytest.raises(DataError, match=r"t\.csv:8: column 'who' is missing"):
        read(tmp_path, "age,cp,num,who\n" + "".join(lines) + "1,1,1,\n", split=rule)


def test_a_zero_byte_makes_no_patient_of_another_name(tmp_path: Path) -> None:
    """As a disk that failed leaves it; of one patient's rows some would be in training and some in test."""
    lines = [f"{row.strip()},{who}\n" for row, who in zip(ROWS, ["p1", "p1", "p2", "p2", "p\0003", "p3"], strict=True)]
    with pytest.raises(DataError, match=r"t\.csv: cannot be read as a table: line 6 holds a zero byte"):
        read(tmp_path, "age,cp,num,who\n" + "".join(lines), split={"group": "who"})


def test_several_files_are_one_table(tmp_path: Path) -> None:
    (tmp_path / "u.csv").write_text("num;cp;age\n1;1;30\n".replace(";", ","))
    data = read(tmp_path, HEADER + "".join(ROWS), files=["t.csv", "u.csv"])
    assert data.rows[-1] == "u.csv:2" and data.targets[-1] == 1


GOOD = HEADER + "".join(ROWS)


@pytest.mark.parametrize(
    ("text", "others", "words"),
    [
        ("age,num\n1,1\n", {}, ["t.csv: column 'cp' is missing", "the file has: age, num"]),
        (GOOD, {"split": {"group": "patient"}}, ["t.csv: column 'patient' is missing", "age, cp, num"]),
        ("age,age,cp,num\n1,1,1,1\n", {}, ["t.csv: column 'age' is there more than once"]),
        (GOOD + "old,1,0\n", {}, ["t.csv:8", "column 'age'", "expected a number", "got 'old'"]),
        (GOOD + "inf,1,0\n", {}, ["t.csv:8", "expected a number", "got 'inf'"]),
        (GOOD + "40,9,0\n", {}, ["t.csv:8", "column 'cp'", "'9' is not among", "(1, 2, 3)"]),
        (GOOD + "40,1,5\n", {}, ["t.csv:8", "column 'num'", "'5' is not among", "(0, 1, 2)"]),
        (GOOD + "\n40,x,0\n", {}, ["t.csv:9", "'x' is not among"]),
        (GOOD + "40,1,0,9\n", {}, ["t.csv:8", "expected 3 columns, got 4"]),
        (GOOD + "40,1\n", {}, ["t.csv:8", "expected 3 columns, got 2"]),
        (HEADER + "4,5,1,0\n", {}, ["t.csv:2", "expected 3 columns, got 4"]),
        ("1,2,0\n", {"columns": ["age", "num", "cp", "x"]}, ["t.csv:1", "expected 4 columns, got 3"]),
        (GOOD, {"separator": ";"}, ["t.csv", "column 'age' is missing", "age,cp,num"]),
        ("", {}, ["t.csv", "no rows"]),
        ("\n\n", {}, ["t.csv", "no rows"]),
        (HEADER, {}, ["t.csv", "no rows"]),
        (HEADER + "?,1,0\n", {"missing_rows": "drop"}, ["t.csv", "no row is left"]),
        (HEADER + "1,1,0\n", {}, ["t.csv", "1 rows cannot be cut into 2 splits"]),
        (b"\x89PNG\r\n\x1a\n\x00\xff", {}, ["t.csv", "as text in UTF-8"]),
        (GOOD, {"files": ["nowhere.csv"]}, ["nowhere.csv: no such file"]),
        (GOOD, {"files": ["."]}, ["is a folder; name the file in it"]),
        (GOOD, {"files": ["a\0b"]}, ["cannot be read as a table", "null"]),
    ],
)
def test_one_sentence_names_the_place(
    tmp_path: Path, text: str | bytes, others: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, text, **others)
    for word in words:
        assert word in str(caught.value)
    assert "t.csv" not in caught.value.public


cells = st.sampled_from(["1", "2", "3", "0", "40.5", "?", "", "x", '"', "nan", "inf", "-1e9", " 1", "1e999", "\0", "é"])
lines = st.lists(cells, min_size=1, max_size=4).map(",".join)
fuzz = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))


@fuzz
@given(
    text=st.lists(lines, max_size=8).map(lambda some: (HEADER + "\n".join(some)).encode())
    | st.text(max_size=30).map(lambda text: text.encode("utf-8"))
    | st.binary(max_size=30),
    drop=st.sampled_from(["drop", "refuse"]),
    columns=st.sampled_from([None, ["age", "cp", "num"]]),
)
@pytest.mark.slow
def test_any_text_is_a_table_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, drop: str, columns: list[str] | None
) -> None:
    try:
        data = read(tmp_path_factory.getbasetemp(), text, missing_rows=drop, columns=columns)
    except DataError as error:
        assert "t.csv" in str(error)
        return
    assert isinstance(data, TableData)
    assert np.isfinite(data.features).all() and data.features.shape == (len(data.targets), 3)
    assert set(data.targets.tolist()) <= {0, 1}
