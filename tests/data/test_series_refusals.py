# SPDX-License-Identifier: Apache-2.0
"""Time series that cannot be used: each answered with one sentence that names the place, expected and got."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.declared import Problems
from medpfl.data.preparation import Spec
from medpfl.data.series.declare import Series
from medpfl.data.series.recordings import new_recordings
from medpfl.data.site_file import load_site_file

WINDOWS = Spec("class", ("windows",))

HEADER = "x,y,act\n"
GOOD = HEADER + "".join(f"{step},{step * step},{1 if step < 6 else 4}\n" for step in range(12))
DECLARED: dict[str, Any] = {
    "kind": "series",
    "files": ["a.csv", "b.csv", "c.csv"],
    "channels": ["x", "y"],
    "label": {"column": "act", "classes": {"lying": [1], "walking": [4]}, "ignore": [0]},
    "window": {"length": 4, "step": 2},
}
ARRAYS: dict[str, Any] = {
    "kind": "series",
    "files": ["e.npz"],
    "inputs": "x",
    "label": {"column": "y", "classes": {"no": [0], "yes": [1]}},
}


def declare(folder: Path, base: dict[str, Any], **others: Any) -> Series:
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": {"s": base | others}}, sort_keys=False))
    return load_site_file(folder / "site.yaml").dataset("s", Series)


@pytest.mark.parametrize(
    ("base", "others", "words"),
    [
        (DECLARED, {"inputs": "x"}, ["either 'channels'", "or 'inputs'"]),
        (DECLARED, {"channels": None}, ["either 'channels'", "or 'inputs'"]),
        (DECLARED, {"files": ["a.npz"]}, ["'channels' needs table files", "got 'a.npz'"]),
        (ARRAYS, {"files": ["a.csv"]}, ["'inputs' needs .npz files", "got 'a.csv'"]),
        (ARRAYS, {"separator": ";"}, ["'separator' is for table files"]),
        (ARRAYS, {"columns": ["x"]}, ["'columns' is for table files"]),
        (ARRAYS, {"missing": ["-9"]}, ["'missing' is for table files"]),
        (ARRAYS, {"codes": {"y": {1: 2, 2: 1}}}, ["'codes' is for table files"]),
        (ARRAYS, {"rename": {"y": "act"}}, ["'rename' is for table files"]),
        (DECLARED, {"codes": {"Act": {1: 2, 2: 1}}}, ["'codes' names 'Act', which is no column that is used"]),
        (ARRAYS, {"split": {"time": True}}, ["'split.time' needs recordings in table files"]),
        (DECLARED, {"window": None}, ["'window' is missing", "length"]),
        (DECLARED, {"window": {"length": 0}}, ["'datasets.s.window.length'", "at least 1|greater than or equal to 1"]),
        (DECLARED, {"window": {"length": 4, "step": 0}}, ["window.step'", "at least 1|greater than or equal to 1"]),
        (DECLARED, {"window": {"length": 4, "stride": 2}}, ["unknown key 'datasets.s.window.stride'"]),
        (DECLARED, {"channels": []}, ["channels'", "at least 1"]),
        (DECLARED, {"channels": ["x", "x"]}, ["'x' is named twice"]),
        (DECLARED, {"channels": ["x", "act"]}, ["'act' is named twice"]),
        (DECLARED, {"split": {"group": "act"}}, ["'act' is named twice"]),
        (DECLARED, {"split": {"stratify": True}}, ["'stratify' is not for series"]),
        (DECLARED, {"split": {"time": True, "group": "who"}}, ["'time' cuts by time alone, so 'group'"]),
        (DECLARED, {"split": {"time": True, "seed": 3}}, ["'time' cuts by time alone, so 'seed'"]),
        (DECLARED, {"missing_samples": "drop"}, ["missing_samples'", "'refuse' or 'interpolate'", "got 'drop'"]),
        (
            DECLARED,
            {"label": {"column": "act", "classes": {"a": [1], "b": [4]}, "ignore": [4.0]}},
            ["datasets.s.label", "4.0 is listed twice"],
        ),
        (
            DECLARED,
            {"label": {"column": "act", "classes": {"a": [1], "b": [4]}, "ignore": [True]}},
            ["datasets.s.label", "put them in quotes"],
        ),
    ],
)
def test_declarations(tmp_path: Path, base: dict[str, Any], others: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SiteFileError) as caught:
        declare(tmp_path, base, **others)
    for word in words:
        assert any(one in str(caught.value) for one in word.split("|")), caught.value
    assert "\n" not in str(caught.value)


def put(line: int, text: str) -> str:
    """GOOD with one line (from 1, the header) replaced."""
    lines = GOOD.splitlines()
    lines[line - 1] = text
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "others", "words"),
    [
        (put(5, "one,1,1"), {}, ["b.csv:5", "channel 'x'", "expected a number, got 'one'"]),
        (put(5, "inf,1,1"), {}, ["b.csv:5", "channel 'x'", "got 'inf'"]),
        (put(5, "1,1e39,1"), {}, ["b.csv:5", "channel 'y'", "got '1e39'"]),
        (put(5, "1,NaN,1"), {}, ["b.csv:5", "channel 'y' is missing (1 samples", "'missing_samples: interpolate'"]),
        (put(5, "1,,1"), {}, ["b.csv:5", "channel 'y' is missing"]),
        (put(5, "1,1,"), {}, ["b.csv:5", "label 'act' is missing (1 time steps)"]),
        (put(5, "1,1,9"), {}, ["b.csv:5", "label 'act'", "'9' is not among", "(1, 4; ignored: 0)"]),
        (put(5, "1,1"), {}, ["b.csv:5", "expected 3 columns, got 2"]),
        (put(5, "1,5,1,1"), {}, ["b.csv:5", "expected 3 columns, got 4"]),
        (put(1, "x,act"), {}, ["b.csv", "column 'y' is missing; the file has: x, act"]),
        (put(1, "x,x,y,act"), {}, ["b.csv", "column 'x' is there more than once"]),
        (GOOD, {"split": {"group": "who"}}, ["a.csv", "column 'who' is missing"]),
        (GOOD, {"window": {"length": 7}}, ["a.csv", "too short for a window of 7 time steps", "longest run", "has 6"]),
        (HEADER + "1,1,1\n2,2,1\n", {}, ["b.csv", "too short for a window of 4", "has 2"]),
        (HEADER, {}, ["b.csv", "no rows"]),
        ("", {}, ["b.csv", "no rows"]),
        (b"\x00\xff\x00", {}, ["b.csv", "as text in UTF-8|cannot be read"]),
        (GOOD, {"separator": ";"}, ["a.csv", "column 'x' is missing"]),
        (GOOD, {"files": ["a.csv", "b.csv", "none.csv"]}, ["none.csv: there is no such file"]),
        (GOOD, {"files": ["a.csv", "b.csv", "."]}, ["there is no such file"]),
        (GOOD, {"files": ["a.csv", "b.csv"]}, ["2 recordings or groups cannot be cut into 3 splits", "time: true"]),
        (
            GOOD,
            {"files": ["a.csv"], "split": {"time": True}, "window": {"length": 6}},
            ["train split is empty"],
        ),
    ],
)
def test_recordings(tmp_path: Path, text: str | bytes, others: dict[str, Any], words: list[str]) -> None:
    for name, content in (("a.csv", GOOD), ("b.csv", text), ("c.csv", GOOD)):
        (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DataError) as caught:
        declare(tmp_path, DECLARED, **others).load(WINDOWS)
    for word in words:
        assert any(one in str(caught.value) for one in word.split("|")), caught.value
    assert "\n" not in str(caught.value) and ".csv" not in caught.value.public


def test_a_cut_in_time_is_not_named_where_it_is_refused(tmp_path: Path) -> None:
    """It needs 'label', and a number was to be predicted."""
    (tmp_path / "a.csv").write_text(HEADER + "".join(f"{step},{step},5\n" for step in range(12)))
    problems = Problems(keep=True)
    content = {**DECLARED, "files": ["a.csv"], "value": "act"}
    del content["label"]
    declare(tmp_path, content).cases(problems)
    (told,) = problems.found
    assert told.endswith("a.csv: 1 recordings or groups cannot be cut into 3 splits (train, validation, test)")


X = np.random.default_rng(0).normal(size=(9, 2, 5))
Y = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0])


@pytest.mark.parametrize(
    ("arrays", "others", "words"),
    [
        ({"x": X}, {}, ["e.npz: array 'y' is missing; the file has: x"]),
        ({"x": X[0], "y": Y}, {}, ["array 'x': expected n x channels x length, got shape (2, 5)"]),
        ({"x": X[:0], "y": Y[:0]}, {}, ["array 'x'", "got shape (0, 2, 5)"]),
        ({"x": X.astype(complex), "y": Y}, {}, ["array 'x': expected numbers, got type complex128"]),
        ({"x": X.astype(str), "y": Y}, {}, ["array 'x': expected numbers, got type <U"]),
        ({"x": X.astype(object), "y": Y}, {}, ["e.npz: cannot be read as an .npz file", "Object arrays"]),
        ({"x": X, "y": Y[:5]}, {}, ["array 'y': expected 9 values", "got shape (5,)"]),
        ({"x": X, "y": np.stack([Y, Y])}, {}, ["array 'y'", "got shape (2, 9)"]),
        ({"x": X, "y": Y + 1}, {}, ["e.npz[1]:0: label 'y': '2' is not among the declared values (0, 1)"]),
        ({"x": X, "y": np.where(Y, np.nan, 0)}, {}, ["e.npz[1]:0: label 'y' is missing"]),
        ({"x": np.where(X > 1, np.nan, X), "y": Y}, {}, ["e.npz[", "channel '", "is missing"]),
        ({"x": np.where(X > 1, np.inf, X), "y": Y}, {}, ["e.npz[", "expected a number, got 'inf'"]),
        ({"x": X, "y": Y}, {"window": {"length": 6}}, ["e.npz[0]", "too short for a window of 6 time steps", "has 5"]),
        ({"x": X, "y": Y}, {"split": {"group": "who"}}, ["e.npz: array 'who' is missing"]),
        ({"x": X, "y": Y}, {"files": ["e.npz", "f.npz"]}, ["f.npz[0]: expected 2 channels as in the others, got 3"]),
        ({"x": X, "y": Y}, {"files": ["e.npz", "g.npz"]}, ["g.npz[0]: expected 5 time steps", "got 6", "'window'"]),
        ({"x": X[:2], "y": Y[:2]}, {}, ["e.npz: 2 recordings or groups cannot be cut into 3 splits"]),
        ({"x": X, "y": Y}, {"files": ["h.npz"]}, ["h.npz: there is no such file"]),
    ],
)
def test_arrays(tmp_path: Path, arrays: dict[str, Any], others: dict[str, Any], words: list[str]) -> None:
    np.savez(tmp_path / "e.npz", **arrays)
    np.savez(tmp_path / "f.npz", x=np.zeros((9, 3, 5)), y=Y)
    np.savez(tmp_path / "g.npz", x=np.zeros((9, 2, 6)), y=Y)
    with pytest.raises(DataError) as caught:
        declare(tmp_path, ARRAYS, **others).load(WINDOWS)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_no_arrays(tmp_path: Path) -> None:
    path = tmp_path / "e.npz"
    np.savez(path, x=X, y=Y)
    whole = path.read_bytes()
    with path.open("wb") as file:
        np.save(file, X)
    single = path.read_bytes()
    for content in (b"", b"text", whole[:200], whole[:-30], whole[:150] + b"\1" * 50 + whole[200:], single):
        path.write_bytes(content)
        with pytest.raises(DataError, match=r"e\.npz: (cannot be read as an \.npz file|expected an \.npz file)"):
            declare(tmp_path, ARRAYS).load(WINDOWS)


def test_all_problems_are_listed(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(put(3, "one,1,1"))
    (tmp_path / "b.csv").write_text(put(9, "1,1,9") + "\n1,1,8\n1\n")
    (tmp_path / "c.csv").write_text(put(5, ",1,1"))
    problems = Problems(keep=True)
    dataset = declare(tmp_path, DECLARED, split={"fractions": {"train": 0.5, "test": 0.5}})
    listing = dataset.cases(problems)
    assert [text.split(": ")[0].removeprefix(f"{tmp_path}/") for text in problems.found] == [
        "a.csv:3", "b.csv:15", "b.csv:9", "b.csv:14", "c.csv:5",
    ]  # fmt: skip
    assert dataset.read(listing["train"][0]).image.shape == (2, 4)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x,y\n1,2\n", ["new.csv: expected at least 4 time steps", "got 1"]),
        ("x,y\n" + "1,2\n" * 3 + "1,\n" + "1,2\n", ["new.csv:5", "channel 'y' is missing (1 samples"]),
        ("x,y\n" + "1,2\n" * 4 + "1,two\n", ["new.csv:6", "channel 'y'", "got 'two'"]),
        ("x\n" + "1\n" * 5, ["new.csv", "column 'y' is missing"]),
    ],
)
def test_new_recordings_refused(tmp_path: Path, text: str, words: list[str]) -> None:
    for name in DECLARED["files"]:
        (tmp_path / name).write_text(GOOD)
    preparation = declare(tmp_path, DECLARED).load(WINDOWS).preparation
    (tmp_path / "new.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        list(new_recordings(tmp_path / "new.csv", preparation))
    for word in words:
        assert word in str(caught.value)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="empty: the folder has no files"):
        list(new_recordings(tmp_path / "empty", preparation))


fuzz = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
cells = st.sampled_from(
    ["1", "4", "0", "2.5", "?", "", "x", '"', "nan", "inf", "-1e9", " 1", "1e999", "\0", "é", "1,1"]
)
lines = st.sampled_from(["1,2,1", "3,4,4", "5,6,0"]) | st.lists(cells, min_size=1, max_size=4).map(",".join)


@fuzz
@given(
    text=st.lists(lines, max_size=30).map(lambda some: (HEADER + "\n".join(some)).encode())
    | st.text(max_size=30).map(lambda text: text.encode("utf-8"))
    | st.binary(max_size=30),
    missing=st.sampled_from(["refuse", "interpolate"]),
    time=st.booleans(),
    keep=st.booleans(),
)
@pytest.mark.slow
def test_any_text_is_a_series_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, missing: str, time: bool, keep: bool
) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name, content in (("a.csv", GOOD.encode()), ("b.csv", text), ("c.csv", GOOD.encode())):
        (folder / name).write_bytes(content)
    dataset = declare(folder, DECLARED, missing_samples=missing, split={"time": time}, window={"length": 2})
    try:
        if keep:
            problems = Problems(keep=True)
            cases = dataset.cases(problems)
            assert all(dataset.read(case).image.shape == (2, 2) for some in cases.values() for case in some)
            if problems.found:
                return
        data = dataset.load(WINDOWS)
    except DataError as error:
        assert ".csv" in str(error)
        return
    for samples in data.splits.values():
        assert bool(np.isfinite(samples.inputs[:].numpy()).all()) and set(samples.targets[:].tolist()) <= {0, 1}


types = st.sampled_from(
    [
        pa.int16(), pa.uint64(), pa.float16(), pa.float32(), pa.string(), pa.bool_(), pa.decimal128(9, 2), pa.binary(),
        pa.timestamp("us"), pa.null(), pa.list_(pa.int64()), pa.dictionary(pa.int32(), pa.float64()),
    ]
)  # fmt: skip


@fuzz
@given(kinds=st.fixed_dictionaries({name: types for name in ("x", "y", "act")}), data=st.data())
@pytest.mark.slow
def test_any_column_type_is_a_series_or_a_sentence(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[str, pa.DataType], data: Any
) -> None:
    folder = tmp_path_factory.getbasetemp()
    columns = {}
    for name, kind in kinds.items():
        value = data.draw(st.sampled_from([None, 1, 4, 0.5, "1", "a", "", float("nan"), True, b"1", 1e300]))
        try:
            columns[name] = pa.array([value, None, value, value], kind)
        except (pa.ArrowException, TypeError, ValueError, OverflowError):
            columns[name] = pa.array([None] * 4, kind)
    parquet.write_table(pa.table(columns), folder / "odd.parquet")
    for name in ("a.csv", "b.csv"):
        (folder / name).write_text(GOOD)
    files = ["a.csv", "b.csv", "odd.parquet"]
    missing = data.draw(st.sampled_from(["refuse", "interpolate"]))
    try:
        found = declare(folder, DECLARED, files=files, missing_samples=missing, window={"length": 2}).load(
            Spec("class", ("windows",))
        )
    except DataError as error:
        assert "odd.parquet" in str(error) and "\n" not in str(error)
        return
    assert all(bool(np.isfinite(samples.inputs[:].numpy()).all()) for samples in found.splits.values())


texts = st.sampled_from(["x", "a.csv"]) | st.text(max_size=5)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["time", "column", "x"]), inner),
    max_leaves=6,
)


@fuzz
@given(base=st.sampled_from([DECLARED, ARRAYS]), data=st.data())
@pytest.mark.slow
def test_any_value_in_a_declaration(tmp_path_factory: pytest.TempPathFactory, base: dict[str, Any], data: Any) -> None:
    folder = tmp_path_factory.getbasetemp()
    for name in DECLARED["files"]:
        (folder / name).write_text(GOOD)
    np.savez(folder / "e.npz", x=X, y=Y)
    content = copy.deepcopy(base)
    place = data.draw(st.sampled_from([content, content["label"], content.get("window", content)]))
    key = data.draw(st.sampled_from([*place, "split", "missing_samples", "step"]))
    place[key] = data.draw(values)
    try:
        declare(folder, content).load(WINDOWS)
    except (SiteFileError, DataError) as error:
        assert "\n" not in str(error)
