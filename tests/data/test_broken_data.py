# SPDX-License-Identifier: Apache-2.0
"""Broken input of every kind through ``medpfl check-data``: the file, row or key is named, never a traceback."""

import gzip
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dicom_series import write_series
from hospitals import AFFINE, SHAPE, change_json, change_yaml, save, scan, write_site, write_table, write_volumes
from medpfl.cli import main

Break = Callable[[Path], object]


def organ(**values: Any) -> Break:
    return lambda folder: change_yaml(folder / "site.yaml", lambda site: site["datasets"]["organ"].update(values))


def blood(**values: Any) -> Break:
    return lambda folder: change_yaml(folder / "site.yaml", lambda site: site["datasets"]["blood"].update(values))


def site(**values: Any) -> Break:
    return lambda folder: change_yaml(folder / "site.yaml", lambda content: content.update(values))


def entry(key: str, number: int, **values: Any) -> Break:
    return lambda folder: change_json(folder / "list.json", lambda lists: lists[key][number].update(values))


def replace(old: str, new: str) -> Break:
    def change(folder: Path) -> None:
        text = (folder / "blood.csv").read_text()
        assert old in text
        (folder / "blood.csv").write_text(text.replace(old, new, 1))

    return change


def image(values: Any, affine: Any = AFFINE, name: str = "images/p02.nii.gz") -> Break:
    return lambda folder: save(folder / name, values, affine)


def content(name: str, data: bytes) -> Break:
    return lambda folder: (folder / name).write_bytes(data)


def cut_short(folder: Path) -> None:
    data = (folder / "images/p02.nii.gz").read_bytes()
    (folder / "images/p02.nii.gz").write_bytes(data[: len(data) // 2])


def cut_inside(folder: Path) -> None:
    """A sound .gz whose NIfTI ends too early."""
    data = gzip.decompress((folder / "images/p02.nii.gz").read_bytes())
    (folder / "images/p02.nii.gz").write_bytes(gzip.compress(data[:-500]))


def flat_header(folder: Path) -> None:
    """No thickness in the affine (srow_z, from byte 312) nor in pixdim (from byte 76); nibabel would not write it."""
    data = bytearray(gzip.decompress((folder / "images/p02.nii.gz").read_bytes()))
    assert np.frombuffer(data, "<f4", 4, 312).tolist() == [0, 0, 4, 0]
    data[312:328], data[88:92] = bytes(16), bytes(4)
    (folder / "images/p02.nii.gz").write_bytes(gzip.compress(data))


NAN = scan(2)[0]
NAN = np.where(NAN.max() == NAN, np.nan, NAN)
SHIFTED = AFFINE.copy()
SHIFTED[0, 3] = 30.0

SITE: list[tuple[str, Break, list[str]]] = [
    ("no site file", lambda f: (f / "site.yaml").unlink(), ["cannot read the site file", "site.yaml"]),
    ("no YAML", content("site.yaml", b"site: [\n"), ["site.yaml (line 2)", "not valid YAML"]),
    ("no text", content("site.yaml", b"\xff\xfe\x00"), ["site.yaml", "not valid YAML"]),
    ("a list", content("site.yaml", b"- a\n"), ["expected a mapping with the key 'datasets'", "got list"]),
    ("no datasets", site(datasets={}), ["'datasets'", "at least 1"]),
    ("unknown key", site(colour=1), ["unknown key 'colour'"]),
    ("unknown inner key", organ(sizes=3), ["unknown key 'datasets.organ.sizes'"]),
    ("unknown kind", organ(kind="movie"), ["'datasets.organ.kind'", "got 'movie'"]),
    ("negative memory", site(storage={"memory_gb": -1}), ["'storage.memory_gb'", "greater than 0", "got -1"]),
    ("fractions", organ(split={"fractions": {"train": 0.9, "test": 0.3}}), ["sum to 1", "1.2"]),
    ("label gap", organ(labels={0: "a", 2: "b"}), ["without gaps", "[0, 2]"]),
    ("label_map", organ(label_map={255: 7}), ["255 is mapped to 7", "not among the labels"]),
    ("one class", organ(labels={0: "a"}), ["'datasets.organ.labels'", "at least 2"]),
]
VOLUMES: list[tuple[str, Break, list[str]]] = [
    ("no datalist", lambda f: (f / "list.json").unlink(), ["cannot read the datalist", "list.json"]),
    ("datalist no JSON", content("list.json", b"{"), ["list.json: not valid JSON"]),
    ("datalist without training", content("list.json", b"{}"), ["list.json", "'training'"]),
    ("no image key", entry("training", 1, image=None), ["list.json: training[1]", "expected {'image': file"]),
    ("no label key", entry("training", 1, label=None), ["list.json: training[1]", "'label' is missing"]),
    ("no image file", entry("training", 1, image="images/x.nii.gz"), ["images/x.nii.gz: no such file", "training[1]"]),
    ("no label file", entry("test", 0, label="labels/x.nii.gz"), ["labels/x.nii.gz: no such file", "test[0]"]),
    ("patient in two splits", entry("test", 0, patient="p00"), ["test[0]", "'p00'", "train split", "test split"]),
    ("test is no list", lambda f: change_json(f / "list.json", lambda c: c.update(test=3)), ["'test' must be a list"]),
    ("empty test", lambda f: change_json(f / "list.json", lambda c: c.update(test=[])), ["the test split is empty"]),
    ("no NIfTI", content("images/p02.nii.gz", b"hello"), ["images/p02.nii.gz: cannot be read as an image"]),
    ("empty file", content("images/p02.nii.gz", b""), ["images/p02.nii.gz: cannot be read as an image"]),
    ("cut short", cut_short, ["images/p02.nii.gz: cannot be read as an image"]),
    ("cut inside", cut_inside, ["images/p02.nii.gz: cannot be read as an image"]),
    ("NaN", image(NAN.astype(np.float32)), ["images/p02.nii.gz: holds values that are not finite"]),
    ("two axes", image(np.ones((8, 10), np.float32)), ["images/p02.nii.gz: expected a volume with 3 axes"]),
    ("other shape", image(np.ones((8, 10, 7), np.float32)), ["labels/p02.nii.gz", "(8, 10, 6)", "(8, 10, 7)"]),
    ("shifted", image(scan(2)[0], SHIFTED), ["labels/p02.nii.gz", "does not fit", "30 mm apart"]),
    ("flat geometry", flat_header, ["images/p02.nii.gz: expected a voxel spacing above 0", "2 x 2 x 0 mm"]),
    (
        "undeclared value",
        image(np.full(SHAPE, 3, np.uint8), name="labels/p02.nii.gz"),
        ["labels/p02.nii.gz: label value 3 is not declared", "expected 0 to 1"],
    ),
    (
        "fractional label",
        image(np.full(SHAPE, 0.5, np.float32), name="labels/p02.nii.gz"),
        ["labels/p02.nii.gz: label value 0.5 is not declared"],
    ),
    (
        "two channels in one case",
        entry("training", 2, image=["images/p02.nii.gz", "images/p02.nii.gz"]),
        ["differ in their number of channels", "15 with 1", "1 with 2"],
    ),
    (
        "the same image in two splits",
        lambda f: [shutil.copy(f / part / "p00.nii.gz", f / part / "p15.nii.gz") for part in ("images", "labels")],
        ["test[4]: the same image as", "training[0]", "train split"],
    ),
]
TABLE: list[tuple[str, Break, list[str]]] = [
    ("no table", lambda f: (f / "blood.csv").unlink(), ["blood.csv", "no such file"]),
    ("table no text", content("blood.csv", b"a,b\n\xff\xfe,1\n"), ["blood.csv", "UTF-8"]),
    ("empty table", content("blood.csv", b""), ["blood.csv", "no rows"]),
    ("header only", content("blood.csv", b"patient_id,age,sex,crp,sick\n"), ["blood.csv", "no rows"]),
    ("column missing", replace("crp", "CRP"), ["blood.csv", "column 'crp' is missing", "CRP"]),
    ("column twice", replace("sex,crp", "crp,crp"), ["blood.csv", "column 'sex' is missing"]),
    ("too many cells", replace("p00,40,m", "p00,40,1,m"), ["blood.csv:2", "expected 5 columns, got 6"]),
    ("too few cells", replace("p00,40,m", "p00,40"), ["blood.csv:2", "expected 5 columns, got 4"]),
    ("no number", replace("p00,40", "p00,forty"), ["blood.csv:2: column 'age'", "expected a number, got 'forty'"]),
    ("infinite", replace("p00,40", "p00,inf"), ["blood.csv:2: column 'age'", "'inf'"]),
    ("missing value", replace("p00,40", "p00,?"), ["blood.csv:2: column 'age' is missing", "missing_rows: drop"]),
    ("unknown category", replace("p00,40,m", "p00,40,x"), ["blood.csv:2: column 'sex'", "'x'", "(m, f)"]),
    ("no group column", blood(split={"group": "ward"}), ["blood.csv", "column 'ward' is missing"]),
    ("no split column", blood(split={"column": "part"}), ["blood.csv", "column 'part' is missing"]),
    ("split value", blood(split={"column": "sex"}), ["blood.csv:2: 'sex' must be train, validation or test, got 'm'"]),
    ("wrong separator", blood(separator=";"), ["blood.csv", "column 'age' is missing"]),
    ("undeclared class", blood(label={"column": "sick", "classes": {"a": [0], "b": [2]}}), ["column 'sick': '1'"]),
    ("value in two classes", blood(label={"column": "sick", "classes": {"a": [0], "b": [0]}}), ["0 is listed twice"]),
    ("label is a feature", blood(label={"column": "age", "classes": {"a": [0], "b": [1]}}), ["is also a feature"]),
    ("too few groups", blood(split={"group": "sex"}), ["2 groups cannot be cut into 3 splits"]),
]


def no_position(number: int, header: Any) -> None:
    if number == 2:
        del header.ImagePositionPatient


def other_series(number: int, header: Any) -> None:
    if number == 2:
        header.SeriesInstanceUID = "1.2.3"


def gap(number: int, header: Any) -> None:
    if number == 4:
        header.ImagePositionPatient = [*header.ImagePositionPatient[:2], 99.0]


def larger(number: int, header: Any) -> None:
    if number == 2:
        header.Rows, header.PixelData = header.Rows * 2, header.PixelData * 2


DICOM: list[tuple[str, Break | Callable[[int, Any], None], list[str]]] = [
    ("no tag", no_position, ["series", "the DICOM tag ImagePositionPatient is missing"]),
    ("two series", other_series, ["series", "belongs to another series"]),
    ("a gap", gap, ["series: slices are not evenly spaced"]),
    ("another size", larger, ["series", "pixels as in"]),
]


def check(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The command as a user runs it: its exit code, and all it printed."""
    monkeypatch.setattr(sys, "argv", ["medpfl", "check-data", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def assert_told(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    code, printed = check(path, monkeypatch, capsys)
    assert code == 1, printed
    lines = [line for line in printed.splitlines() if line.startswith(("  - ", "medpfl: "))]
    assert any(all(word in line for word in words) for line in lines), printed
    assert "Traceback" not in printed


def cases(kind: list[tuple[str, Break, list[str]]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(("change", "words"), [case[1:] for case in kind], ids=[case[0] for case in kind])


@pytest.fixture(scope="module")
def volumes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("volumes")
    write_volumes(folder)
    return folder


@cases(SITE + VOLUMES)
@pytest.mark.slow
def test_volumes(tmp_path: Path, volumes: Path, change: Break, words: list[str], monkeypatch: Any, capsys: Any) -> None:
    folder = shutil.copytree(volumes, tmp_path / "hospital")
    change(folder)
    assert_told(folder / "site.yaml", words, monkeypatch, capsys)


@cases(TABLE)
@pytest.mark.slow
def test_tables(tmp_path: Path, change: Break, words: list[str], monkeypatch: Any, capsys: Any) -> None:
    path = write_table(tmp_path)
    change(tmp_path)
    assert_told(path, words, monkeypatch, capsys)


@pytest.mark.parametrize(("change", "words"), [case[1:] for case in DICOM], ids=[case[0] for case in DICOM])
@pytest.mark.slow
def test_dicom(tmp_path: Path, change: Any, words: list[str], monkeypatch: Any, capsys: Any) -> None:
    path = write_dicom(tmp_path, change)
    assert_told(path, words, monkeypatch, capsys)


def write_dicom(folder: Path, change: Callable[[int, Any], None]) -> Path:
    """Four patients' series with label maps in NIfTI; the first one is changed."""
    items = []
    for number in range(4):
        values, label = scan(number)
        changed = change if number == 0 else (lambda place, header: None)
        write_series(folder / f"p{number}" / "series", values.astype(np.int16), AFFINE, changed)
        save(folder / f"p{number}" / "label.nii.gz", label)
        items.append({"image": f"p{number}/series", "label": f"p{number}/label.nii.gz"})
    (folder / "list.json").write_text(json.dumps({"training": items}))
    declared = {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}
    return write_site(folder, {"organ": declared})


def test_what_is_sound_passes(tmp_path: Path, volumes: Path, monkeypatch: Any, capsys: Any) -> None:
    """Or every test above would pass on anything."""
    folder = shutil.copytree(volumes, tmp_path / "hospital")
    for path in (
        folder / "site.yaml",
        write_table(tmp_path / "t"),
        write_dicom(tmp_path / "d", lambda place, header: None),
    ):
        code, printed = check(path, monkeypatch, capsys)
        assert code == 0, printed


def test_the_table_is_long_enough() -> None:
    assert len(SITE + VOLUMES + TABLE + DICOM) >= 40
