# SPDX-License-Identifier: Apache-2.0
"""Tables: TSV and Parquet files, imputation, and rows that come after the training."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

import declared_table
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.declared import Problems
from medpfl.data.table.declare import Table, TableData, read_table
from medpfl.data.table.new import TablePreparation, new_rows
from medpfl.deployed.model_file import load_deployed
from medpfl.deployed.predict import predict
from medpfl.tasks import Tabular
from tools import run

SPLIT = [*["train"] * 5, "validation", *["test"] * 3]
FRAME = pd.DataFrame(
    {
        "age": [40.0, 50.0, None, 70.0, 90.0, None, 1000.0, None, 2000.0],
        "cp": ["a", "b", "b", None, "c", "c", "c", "c", None],
        "sick": [0, 1, 0, 1, 1, 0, 1, 0, 1],
        "part": SPLIT,
    }
)
DECLARED = declared_table.DECLARED | {"split": {"column": "part"}}


def declare(folder: Path, **others: Any) -> Table:
    return declared_table.declare(folder, DECLARED | others)


def read(folder: Path, frame: pd.DataFrame = FRAME, **others: Any) -> TableData:
    return declared_table.read(folder, frame, DECLARED | others)


def test_only_the_training_part_imputes(tmp_path: Path) -> None:
    data = read(tmp_path)
    assert data.preparation.imputed == {"age": 60.0, "cp": "b"}  # median of 40, 50, 70, 90; b is there twice
    assert np.isnan(data.raw[2, 0]) and np.isnan(data.raw[3, 1:]).all()
    train = np.array([[40, 0, 0], [50, 1, 0], [60, 1, 0], [70, 1, 0], [90, 0, 1]], dtype=float)
    mean, scale = train.mean(axis=0), train.std(axis=0, ddof=1)
    assert data.splits["train"] == [0, 1, 2, 3, 4]
    np.testing.assert_allclose(data.features[:5], (train - mean) / scale, rtol=1e-12)
    np.testing.assert_allclose(data.features[7], ((60, 0, 1) - mean) / scale, rtol=1e-12)  # a row of the test part


def test_other_rows_never_change_what_training_fitted(tmp_path: Path) -> None:
    before = read(tmp_path)
    other = FRAME.copy()
    other.loc[5:, "age"] = [-5.0, np.nan, 7.5, 1e6]
    other.loc[5:, "cp"] = ["a", "a", None, "a"]
    other.loc[5:, "sick"] = [1, 0, 1, 0]
    after = read(tmp_path, other)
    assert before.preparation == after.preparation
    assert np.array_equal(before.features[:5], after.features[:5])
    changed = FRAME.copy()
    changed.loc[0, "age"] = 41.0
    assert read(tmp_path, changed).preparation != before.preparation


def test_a_row_without_a_value_keeps_its_name_and_is_read_with_nan(tmp_path: Path) -> None:
    data = read(tmp_path)
    assert data.rows == [f"t.csv:{line}" for line in range(2, 11)]
    dataset = declare(tmp_path)
    case = dataset.cases(Problems())["train"][2]
    assert case.name == "t.csv:4" and np.isnan(dataset.read(case).image).tolist() == [True, False, False]
    assert torch.isfinite(torch.from_numpy(data.features)).all()


@pytest.mark.parametrize(("column", "line"), [("sick", 4), ("part", 4)])
def test_a_label_or_split_is_never_imputed(tmp_path: Path, column: str, line: int) -> None:
    frame = FRAME.astype({"sick": object})
    frame.loc[2, column] = None
    with pytest.raises(DataError, match=rf"t\.csv:{line}: column '{column}' is missing.*never imputed"):
        read(tmp_path, frame)


def test_a_column_without_any_value_in_training_cannot_be_imputed(tmp_path: Path) -> None:
    frame = FRAME.copy()
    frame.loc[:4, "age"] = None
    with pytest.raises(DataError, match=r"t\.csv: column 'age' has no value in the training part"):
        read(tmp_path, frame)


def test_all_problems_are_listed(tmp_path: Path) -> None:
    frame = FRAME.astype({"sick": object, "age": object})
    frame.loc[0, "cp"], frame.loc[1, "age"], frame.loc[2, "sick"], frame.loc[6, "sick"] = "z", "old", None, 7
    frame.to_csv(tmp_path / "t.csv", index=False)
    problems = Problems(keep=True)
    listing = declare(tmp_path).cases(problems)
    assert sum(map(len, listing.values())) == 5
    assert [text.split(":")[1] for text in problems.found] == ["4", "8", "3", "2"]


@pytest.mark.parametrize("form", ["t.tsv", "t.tab", "t.parquet", "text.parquet", "category.parquet", "t.pq"])
def test_every_form_of_file_gives_the_same_numbers(tmp_path: Path, form: str) -> None:
    expected = read(tmp_path)
    path = tmp_path / form
    if form.startswith("t.t"):
        FRAME.to_csv(path, sep="\t", index=False)
    else:
        kind: dict[str, Any] = {"text.parquet": {"age": str, "sick": str}, "category.parquet": {"cp": "category"}}
        FRAME.astype(kind.get(form, {})).to_parquet(path)
    data = read_table(declare(tmp_path, files=[form]))
    assert np.array_equal(data.raw, expected.raw, equal_nan=True)
    assert np.array_equal(data.features, expected.features) and np.array_equal(data.targets, expected.targets)
    assert data.rows == [f"{form}:{line if form.startswith('t.t') else line - 1}" for line in range(2, 11)]


def test_whole_numbers_with_missing_values_are_floats_in_parquet_and_mean_the_same(tmp_path: Path) -> None:
    frame = FRAME.assign(cp=[1.0, 2.0, 2.0, None, 3.0, 3.0, 3.0, 3.0, None], sick=FRAME["sick"] > 0)
    frame.to_parquet(tmp_path / "t.parquet")
    data = read_table(declare(tmp_path, files=["t.parquet"], features={"age": "number", "cp": [1, 2, 3]}))
    assert data.preparation.imputed["cp"] == 2
    assert np.array_equal(data.features, read(tmp_path).features)
    assert data.targets.tolist() == FRAME["sick"].tolist()


@pytest.mark.parametrize(("declared", "written"), [("-9", "-9.0"), ("-9.0", "-9"), ("-9", "-9")])
@pytest.mark.parametrize("column", ["age", "cp"])
def test_a_number_that_means_not_known_may_be_written_otherwise(
    tmp_path: Path, declared: str, written: str, column: str
) -> None:
    """pandas writes -9 as -9.0 into a column with a missing value or a fraction."""
    expected = read(tmp_path)
    frame = FRAME.astype({column: object})
    frame[column] = frame[column].where(frame[column].notna(), written)
    data = read(tmp_path, frame, missing=["", "?", "NA", declared])
    assert np.array_equal(data.raw, expected.raw, equal_nan=True)
    frame.to_csv(tmp_path / "t.csv", index=False, sep=";")
    (tmp_path / "t.csv").write_text((tmp_path / "t.csv").read_text().replace(".", ","))
    commas = read_table(declare(tmp_path, missing=["", "?", "NA", declared], separator=";", decimal=","))
    assert np.array_equal(commas.raw, expected.raw, equal_nan=True)
    frame.astype(str).to_parquet(tmp_path / "t.parquet")
    texts = read_table(declare(tmp_path, missing=["", "nan", "None", declared], files=["t.parquet"]))
    assert np.array_equal(texts.raw, expected.raw, equal_nan=True)


def test_declared_missing_texts_hold_for_numbers_of_parquet(tmp_path: Path) -> None:
    FRAME.fillna({"age": -9.0, "cp": "-9"}).to_parquet(tmp_path / "t.parquet")
    data = read_table(declare(tmp_path, files=["t.parquet"], missing=["-9"]))
    assert np.array_equal(data.raw, read(tmp_path).raw, equal_nan=True)


def test_large_identifiers_stay_apart_in_parquet(tmp_path: Path) -> None:
    who = [2**60, 2**60 + 1, 2**60, 2**60 + 1, 5, 5, 5, 6, 6]
    FRAME.assign(who=who).to_parquet(tmp_path / "t.parquet")
    data = read_table(declare(tmp_path, files=["t.parquet"], split={"group": "who", "seed": 1}))
    assert data.groups == [str(value) for value in who]


def test_text_and_parquet_files_are_one_table(tmp_path: Path) -> None:
    FRAME[:4].to_csv(tmp_path / "t.csv", index=False)
    FRAME[4:7].to_csv(tmp_path / "t.tsv", sep="\t", index=False)
    FRAME[7:].to_parquet(tmp_path / "t.parquet")
    data = read_table(declare(tmp_path, files=["t.csv", "t.tsv", "t.parquet"]))
    assert data.rows[3:8] == ["t.csv:5", "t.tsv:2", "t.tsv:3", "t.tsv:4", "t.parquet:1"]
    assert np.array_equal(data.features, read(tmp_path).features)


def written(folder: Path, **columns: Any) -> TableData:
    table = pa.table({"age": [1.0, 2.0], "cp": ["a", "b"], "sick": [0, 1], "part": ["train", "test"], **columns})
    parquet.write_table(table, folder / "t.parquet")
    return read_table(declare(folder, files=["t.parquet"]))


@pytest.mark.parametrize(
    ("column", "values", "words"),
    [
        ("age", pa.array([1, 2], pa.timestamp("ms")), ["column 'age'", "timestamp[ms]", "expected numbers, texts"]),
        ("age", pa.array([1, 2], pa.date32()), ["column 'age'", "date32"]),
        ("age", pa.array([[1], [2]]), ["column 'age'", "list<"]),
        ("age", pa.array([{"x": 1}, {"x": 2}]), ["column 'age'", "struct<"]),
        ("cp", pa.array([b"a", b"b"]), ["column 'cp'", "binary"]),
        ("part", pa.array([1, 2], pa.duration("s")), ["column 'part'", "duration"]),
        ("age", pa.array(["1", "old"]), ["t.parquet:2", "column 'age'", "expected a number, got 'old'"]),
        ("age", pa.array([1.0, float("inf")]), ["t.parquet:2", "expected a number, got 'inf'"]),
        ("cp", pa.array(["a", "z"]), ["t.parquet:2", "column 'cp'", "'z' is not among", "(a, b, c)"]),
        ("sick", pa.array([0, 7]), ["t.parquet:2", "column 'sick'", "'7' is not among", "(0, 1)"]),
        ("part", pa.array(["train", "later"]), ["t.parquet:2", "must be train, validation or test, got 'later'"]),
    ],
)
def test_parquet_that_does_not_fit(tmp_path: Path, column: str, values: Any, words: list[str]) -> None:
    with pytest.raises(DataError) as caught:
        written(tmp_path, **{column: values})
    for word in ["t.parquet", *words]:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_parquet(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with pytest.raises(DataError, match=r"t\.parquet: no such file"):
        read_table(declare(tmp_path, files=["t.parquet"]))
    FRAME.to_parquet(path)
    whole = path.read_bytes()
    for content in (b"", b"age,cp\n1,a\n", whole[:100], whole[:-20], whole[:4] + b"\0" * 300 + whole[304:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"t\.parquet: cannot be read as a Parquet file: ") as caught:
            read_table(declare(tmp_path, files=["t.parquet"]))
        assert "\n" not in str(caught.value)
    FRAME.iloc[:0].to_parquet(path)
    with pytest.raises(DataError, match=r"t\.parquet: it has no rows"):
        read_table(declare(tmp_path, files=["t.parquet"]))
    FRAME.drop(columns="cp").to_parquet(path)
    with pytest.raises(DataError, match=r"t\.parquet: column 'cp' is missing; the file has: age, sick, part"):
        read_table(declare(tmp_path, files=["t.parquet"]))


# -- rows that come after the training


def test_new_rows_are_prepared_as_the_trained_ones(tmp_path: Path) -> None:
    data = read(tmp_path)
    kept = json.loads(data.preparation.model_dump_json())
    for name in ("new.csv", "new.tsv", "new.parquet"):
        new = FRAME[["cp", "age"]]  # another order, no label, no split
        path = tmp_path / name
        new.to_parquet(path) if name == "new.parquet" else new.to_csv(
            path, sep="\t" if name == "new.tsv" else ",", index=False
        )
        rows, values = new_rows(path, TablePreparation.model_validate(kept))
        assert np.array_equal(values, data.features), name
        assert rows[0] == ("new.parquet:1" if name == "new.parquet" else f"{name}:2")
    cases = list(Tabular("t").new_cases(tmp_path / "new.csv", kept))
    assert [case.name for case in cases] == [f"new.csv:{line}" for line in range(2, 11)]
    assert cases[3].inputs.dtype == torch.float32 and cases[3].inputs.shape == (1, 3)
    np.testing.assert_allclose(cases[3].inputs[0].numpy(), data.features[3], rtol=1e-6)


@pytest.mark.parametrize("name", ["new.csv", "new.parquet"])
def test_new_rows_may_lack_what_the_site_file_renames_but_the_features(tmp_path: Path, name: str) -> None:
    """A hospital whose label has another name than the agreed one predicts patients whose label nobody knows yet."""
    theirs = {"cp": "Schmerz", "sick": "Diagnose", "part": "Teil"}
    FRAME.rename(columns=theirs).to_csv(tmp_path / "t.csv", index=False)
    data = read_table(declare(tmp_path, rename={other: agreed for agreed, other in theirs.items()}))
    new = FRAME.rename(columns=theirs)[["Schmerz", "age"]]
    path = tmp_path / name
    new.to_csv(path, index=False) if name == "new.csv" else new.to_parquet(path)
    assert np.array_equal(new_rows(path, data.preparation)[1], data.features)
    other = new.rename(columns={"Schmerz": "pain"})
    other.to_csv(path, index=False) if name == "new.csv" else other.to_parquet(path)
    with pytest.raises(DataError, match="column 'Schmerz', which 'rename' names, is missing"):
        new_rows(path, data.preparation)


def test_a_renamed_column_of_a_file_with_another_separator(tmp_path: Path) -> None:
    """Where a column is renamed, the sentence named the column alone, and not the separator, as it does elsewhere."""
    FRAME.rename(columns={"cp": "Schmerz"}).to_csv(tmp_path / "t.csv", index=False, sep=";")
    with pytest.raises(DataError, match=r"column 'Schmerz', which 'rename' names, is missing; 'separator' says"):
        read_table(declare(tmp_path, rename={"Schmerz": "cp"}))


def test_new_rows_of_a_file_without_header_may_lack_the_label(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "t.csv", index=False, header=False)
    columns = list(FRAME.columns)
    data = read_table(declare(tmp_path, columns=columns))
    FRAME.drop(columns="sick").to_csv(tmp_path / "new.csv", index=False, header=False)
    rows, values = new_rows(tmp_path / "new.csv", data.preparation)
    assert np.array_equal(values, data.features) and rows[0] == "new.csv:1"
    assert np.array_equal(new_rows(tmp_path / "t.csv", data.preparation)[1], data.features)


def test_new_rows_of_a_file_without_header_may_lack_a_time_and_its_event(tmp_path: Path) -> None:
    frame = FRAME.assign(days=range(9))[["days", "age", "cp", "part", "sick"]]
    frame.to_csv(tmp_path / "t.csv", index=False, header=False)
    survival = {"time": "days", "event": "sick"}
    data = read_table(declare(tmp_path, columns=list(frame.columns), label=None, survival=survival))
    frame.drop(columns=["days", "sick"]).to_csv(tmp_path / "new.csv", index=False, header=False)
    for name in ("t.csv", "new.csv"):
        kept = TablePreparation.model_validate(data.preparation.model_dump(mode="json"))
        assert np.array_equal(new_rows(tmp_path / name, kept)[1], data.features), name


def test_a_preparation_holds_no_row_and_no_path(tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    FRAME.to_csv(tmp_path / "secret" / "t.csv", index=False)
    text = read_table(declare(tmp_path, files=["secret/t.csv"])).preparation.model_dump_json()
    assert "secret" not in text and "t.csv" not in text and "1000" not in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("age,cp\n40,a\n,b\n", ["new.csv:3", "column 'age' is missing", "trained on rows without missing values"]),
        ("age,cp\n40,z\n", ["new.csv:2", "column 'cp'", "'z' is not among the declared values (a, b, c)"]),
        ("age,cp\nold,a\n", ["new.csv:2", "column 'age'", "expected a number, got 'old'"]),
        ("age\n40\n", ["new.csv", "column 'cp' is missing"]),
        ("age,cp\n", ["new.csv", "no rows"]),
        ("age,cp\n1,2,3\n", ["new.csv:2", "expected 2 columns, got 3"]),
    ],
)
def test_new_rows_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    preparation = read(tmp_path, FRAME, missing_rows="drop").preparation.model_dump(mode="json")
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        list(Tabular("t").new_cases(tmp_path / "new.csv", preparation))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.slow
def test_a_models_own_test_rows_are_predicted_as_in_its_test(
    tmp_path: Path, table_sites: dict[str, Path], make_job: Any
) -> None:
    """Federation, deployed model and prediction from a bare file agree on the hospital's own test rows."""
    run(make_job(), table_sites, tmp_path)
    models = tmp_path / "home" / "clara" / "small" / "models"
    tested = pd.read_csv(models / "personal-last.csv").set_index("case")
    model = load_deployed(models / "personal-last.safetensors")
    rows = predict(model, table_sites["clara"].with_suffix(".csv"), tmp_path / "predictions").rows
    found = pd.DataFrame(rows).set_index("case").loc[tested.index]
    assert (found["predicted"] == tested["predicted"].map({0: "no", 1: "yes"})).all()
    np.testing.assert_allclose(found[["p_no", "p_yes"]].max(axis=1), tested["probability"], atol=1e-5)
    with pytest.raises(DataError, match="cannot be prepared: the model's file has no hospital's preparation"):
        list(model.task.new_cases(table_sites["clara"].with_suffix(".csv"), {}))


def test_missing_rows_has_three_answers(tmp_path: Path) -> None:
    with pytest.raises(SiteFileError, match="'drop', 'refuse' or 'impute', got 'guess'"):
        declare(tmp_path, missing_rows="guess")
    words = r"t\.csv:4: column 'age' is missing \(rows that lack a value: 5\);.*'missing_rows: drop'.*'impute'"
    with pytest.raises(DataError, match=words):
        read(tmp_path, missing_rows="refuse")


types = st.sampled_from(
    [
        pa.int8(), pa.uint64(), pa.float16(), pa.float32(), pa.float64(), pa.string(), pa.large_string(), pa.bool_(),
        pa.decimal128(9, 2), pa.binary(), pa.timestamp("us"), pa.date64(), pa.null(), pa.list_(pa.int64()),
        pa.dictionary(pa.int8(), pa.string()), pa.dictionary(pa.int32(), pa.float64()), pa.time32("s"),
    ]
)  # fmt: skip


@settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))
@given(kinds=st.fixed_dictionaries({name: types for name in ("age", "cp", "sick")}), data=st.data())
@pytest.mark.slow
def test_any_column_type_is_a_table_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, pa.DataType], data: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    plain = st.sampled_from([None, 0, 1, 2, "0", "a", "", "?", 1.5, float("nan"), True, b"0", 1e300, "1e999"])
    columns: dict[str, Any] = {"part": SPLIT}
    for name, kind in kinds.items():
        values = data.draw(st.lists(plain, min_size=9, max_size=9))
        converted = []
        for value in values:
            try:
                pa.array([value], kind)
                converted.append(value)
            except (pa.ArrowException, TypeError, ValueError, OverflowError):
                converted.append(None)
        columns[name] = pa.array(converted, kind)
    parquet.write_table(pa.table(columns), folder / "odd.parquet")
    try:
        found = read_table(declare(folder, files=["odd.parquet"], features={"age": "number", "cp": [0, 1, "a"]}))
    except DataError as error:
        assert "odd.parquet" in str(error) and "\n" not in str(error)
        return
    assert np.isfinite(found.features).all() and set(found.classes.tolist()) <= {0, 1}


@pytest.mark.parametrize("second", ["", '"'])
@pytest.mark.parametrize("note", ["late", "late" * 40_000])
def test_a_quotation_mark_that_nobody_closes_hides_no_rows(tmp_path: Path, second: str, note: str) -> None:
    """The last column's cell would take in all rows up to the next mark, or to the end of the file."""
    frame = FRAME.assign(note=["ok", '"early', "ok", "ok", "ok", f"{second}{note}", "ok", "ok", "ok"])
    lines = [",".join(map(str, row)).replace("nan", "") for row in [frame.columns, *frame.values.tolist()]]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(DataError, match=r"t\.csv:3: a cell of this line begins with a quotation mark"):
        read_table(declare(tmp_path))


def test_quoted_cells_may_have_lines_blanks_and_marks_in_them(tmp_path: Path) -> None:
    expected = read(tmp_path)
    notes = ['"two\nlines"', '"a ""word"""', '12" tube', '"blank after" ', "", '"a\r\nb\n\nc"', "ok", '""', 'end"']
    rows = zip(FRAME.values.tolist(), notes, strict=True)
    lines = [",".join([*FRAME.columns, "note"]), *(",".join([*map(str, row), note]) for row, note in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines).replace("nan", "").replace("None", ""))
    assert np.array_equal(read_table(declare(tmp_path)).raw, expected.raw, equal_nan=True)


def test_a_file_that_is_listed_twice_is_refused(tmp_path: Path) -> None:
    for again in ("t.csv", "./t.csv", "sub/../t.csv"):
        with pytest.raises(SiteFileError, match=r"'datasets.t.files': the file 't.csv' is listed twice; every one"):
            declare(tmp_path, files=["t.csv", again])
    assert declare(tmp_path, files=["t.csv", "sub/t.csv"]).files == ["t.csv", "sub/t.csv"]
