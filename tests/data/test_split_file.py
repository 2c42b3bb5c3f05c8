# SPDX-License-Identifier: Apache-2.0
"""A split file: patients stay where they are when others come, of every kind of dataset."""

import csv
import json
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from medpfl.cli import app
from medpfl.core.errors import DataError, SiteFileError
from medpfl.data import split_file
from medpfl.data.contract import Listing
from medpfl.data.declared import Problems
from medpfl.data.site_file import load_site_file
from medpfl.data.split_file import extend, read_split_file

LABEL: dict[str, Any] = {"column": "sick", "classes": {"no": [0], "yes": [1]}}


def table(folder: Path, patients: range) -> dict[str, Any]:
    rows = [(one, one % 2, age) for one in patients for age in (30, 40)]
    pd.DataFrame(rows, columns=["patient", "sick", "age"]).to_csv(folder / "t.csv", index=False)
    return {"kind": "table", "files": ["t.csv"], "features": {"age": "number"}, "label": LABEL}


def series(folder: Path, patients: range) -> dict[str, Any]:
    for one in patients:
        frame = pd.DataFrame({"patient": [one] * 4, "x": range(4), "sick": [one % 2] * 4})
        frame.to_csv(folder / f"r{one}.csv", index=False)
    return {"kind": "series", "files": "r*.csv", "channels": ["x"], "label": LABEL, "window": {"length": 4}}


def images(folder: Path, patients: range) -> dict[str, Any]:
    for one in patients:
        Image.fromarray(np.zeros((2, 2), np.uint8)).save(folder / f"{one}.png")
    rows = [(str(one), one, one % 2) for one in patients]
    pd.DataFrame(rows, columns=["image", "patient", "sick"]).to_csv(folder / "images.csv", index=False)
    return {"kind": "images", "files": "*.png", "table": {"file": "images.csv", "image": "image"}, "label": LABEL}


def volumes(folder: Path, patients: range) -> dict[str, Any]:
    items = [{"image": f"{one}.nii", "label": "l.nii", "patient": one} for one in patients]
    (folder / "list.json").write_text(json.dumps({"training": items}))
    return {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}


def arrays(folder: Path, patients: range) -> dict[str, Any]:
    numbers = np.array(patients)
    np.savez(folder / "a.npz", x=np.zeros((len(patients), 2, 2), np.uint8), y=numbers % 2, patient=numbers)
    classes = {"no": [0], "yes": [1]}
    return {"kind": "arrays", "file": "a.npz", "inputs": "x", "labels": "y", "classes": classes}


KINDS = pytest.mark.parametrize("kind", [table, series, images, volumes, arrays])


def declare(folder: Path, declared: dict[str, Any], **split: Any) -> Any:
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": {"d": declared | {"split": split}}}))
    return load_site_file(folder / "site.yaml").datasets["d"]


def owners(listing: Listing) -> dict[str, set[str]]:
    return {split: {case.group for case in cases} for split, cases in listing.items()}


def written(folder: Path) -> list[list[str]]:
    return list(csv.reader((folder / "split.csv").open()))


@KINDS
def test_without_a_file_one_patient_more_moves_others(tmp_path: Path, kind: Any) -> None:
    """Why there is one: a model's training patients would be another evaluation's test patients."""
    before = owners(declare(tmp_path, kind(tmp_path, range(1, 31)), group="patient").cases(Problems()))
    after = owners(declare(tmp_path, kind(tmp_path, range(1, 32)), group="patient").cases(Problems()))
    assert before["train"] & after["test"]


@KINDS
def test_patients_stay_where_they_are_when_others_come(tmp_path: Path, kind: Any) -> None:
    drawn = owners(declare(tmp_path, kind(tmp_path, range(1, 31)), group="patient", seed=3).cases(Problems()))
    dataset = declare(tmp_path, kind(tmp_path, range(1, 31)), group="patient", seed=3, file="split.csv")
    with pytest.raises(DataError, match=r"split\.csv: no such file, which 'split\.file' names; 'medpfl site split'"):
        dataset.cases(Problems())
    assert extend(dataset).new == {"train": 18, "validation": 6, "test": 6}
    assert owners(dataset.cases(Problems())) == drawn  # what they are without a file

    dataset = declare(tmp_path, kind(tmp_path, range(1, 41)), group="patient", seed=3, file="split.csv")
    with pytest.raises(DataError, match=r"does not say in which split '3\d' is, nor 9 more; 'medpfl site split' draws"):
        dataset.cases(Problems())
    first = written(tmp_path)
    found = extend(dataset)
    assert (found.new, found.groups, found.gone) == (
        {"train": 6, "validation": 2, "test": 2},
        {"train": 24, "validation": 8, "test": 8},
        0,
    )
    assert written(tmp_path)[: len(first)] == first
    now = owners(dataset.cases(Problems()))
    assert all(drawn[split] < now[split] for split in drawn)

    dataset = declare(tmp_path, kind(tmp_path, range(1, 41)), group="patient", seed=4, file="split.csv")
    assert extend(dataset).new == {"train": 0, "validation": 0, "test": 0}
    assert owners(dataset.cases(Problems())) == now


def test_two_at_once_do_not_overwrite_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = declare(tmp_path, table(tmp_path, range(1, 31)), group="patient", file="split.csv")
    extend(dataset)
    read, refused = split_file.read_split_file, []

    def another_begins(path: Path) -> dict[str, str]:
        with pytest.raises(DataError, match="another 'medpfl site split' writes split") as error:
            extend(dataset)
        refused.append(error)
        monkeypatch.setattr(split_file, "read_split_file", read)
        return read(path)

    monkeypatch.setattr(split_file, "read_split_file", another_begins)
    assert extend(declare(tmp_path, table(tmp_path, range(1, 41)), group="patient", file="split.csv")).gone == 0
    assert refused and len(read(tmp_path / "split.csv")) == 40
    assert not list(tmp_path.glob(".split*"))


def test_a_patient_is_found_however_its_number_is_written(tmp_path: Path) -> None:
    dataset = declare(tmp_path, table(tmp_path, range(1, 4)), group="patient", file="split.csv")
    (tmp_path / "split.csv").write_text("\ufeffgroup,split\r\n001,training\r\n2.0,val\r\n3,Test\r\n4,test\r\n")
    assert owners(dataset.cases(Problems())) == {"train": {"1"}, "validation": {"2"}, "test": {"3"}}
    assert extend(dataset).gone == 1
    assert ["4", "test"] in written(tmp_path)


def test_a_file_that_a_spreadsheet_saved_with_semicolons_goes_on_with_them(tmp_path: Path) -> None:
    dataset = declare(tmp_path, table(tmp_path, range(1, 5)), group="patient", file="split.csv")
    (tmp_path / "split.csv").write_text("\ufeffgroup;split\n1;train\n2;validation\n3;test\n", encoding="utf-8")
    assert extend(dataset).new["train"] == 1
    assert (tmp_path / "split.csv").read_text() == "group;split\n1;train\n2;validation\n3;test\n4;train\n"
    assert owners(dataset.cases(Problems()))["train"] == {"1", "4"}


def test_the_command_writes_a_file_that_nobody_else_may_read(tmp_path: Path) -> None:
    declare(tmp_path, images(tmp_path, range(1, 21)), file="split.csv")  # an image without a group stands for itself
    run = CliRunner().invoke(app, ["site", "split", str(tmp_path / "site.yaml")])
    assert run.exit_code == 0, run.output
    assert "train: 12, 12 of them new" in run.output
    assert stat.S_IMODE((tmp_path / "split.csv").stat().st_mode) == 0o600
    assert read_split_file(tmp_path / "split.csv").keys() == {f"{one}.png" for one in range(1, 21)}


def test_a_link_to_a_file_that_others_may_read_stays_one(tmp_path: Path) -> None:
    declared = table(tmp_path, range(1, 21))
    shared = tmp_path / "shared.csv"
    extend(declare(tmp_path, declared, group="patient", file="shared.csv"))
    shared.chmod(0o640)
    (tmp_path / "split.csv").symlink_to("shared.csv")
    extend(declare(tmp_path, table(tmp_path, range(1, 31)), group="patient", file="split.csv"))
    assert (tmp_path / "split.csv").is_symlink() and len(read_split_file(shared)) == 30
    assert stat.S_IMODE(shared.stat().st_mode) == 0o640


def test_what_cannot_be_cut_writes_nothing(tmp_path: Path) -> None:
    declared = volumes(tmp_path, range(1, 9))
    items = json.loads((tmp_path / "list.json").read_text())["training"]
    (tmp_path / "list.json").write_text(json.dumps({"training": items[:6], "test": items[6:]}))
    with pytest.raises(DataError, match=r"it has a list of each split, so 'split\.file' has no meaning"):
        extend(declare(tmp_path, declared, group="patient", file="split.csv"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["list.json", "site.yaml"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("patient,split\n1,train\n", "expected the header 'group,split', got 'patient,split'"),
        ("", "expected the header 'group,split', got ''"),
        (
            "group,split\n1,train\n2,tset\n",
            r"split\.csv:3: expected a group and train, validation or test, got '2,tset'",
        ),
        ("group,split\n1\n", r"split\.csv:2: expected a group and train, validation or test, got '1'"),
        ("group,split\n ,test\n", r"split\.csv:2: expected a group and train, validation or test"),
        ("group,split\n1,train\n01,test\n", r"split\.csv:3: '01' is in the train split and in the test split"),
        ('group,split\n"1,train\n', "expected a CSV file as text in UTF-8"),
    ],
)
def test_a_broken_file_is_told_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    dataset = declare(tmp_path, table(tmp_path, range(1, 9)), group="patient", file="split.csv")
    (tmp_path / "split.csv").write_text(text)
    with pytest.raises(DataError, match=message):
        dataset.cases(Problems())
    with pytest.raises(DataError, match=message):
        extend(dataset)
    assert (tmp_path / "split.csv").read_text() == text


@pytest.mark.parametrize(
    ("kind", "split", "message"),
    [
        (table, {}, r"'split\.group' must name the column of their names"),
        (arrays, {}, r"'split\.group' must name the column of their names"),
        (table, {"group": "patient", "column": "part"}, "both 'column' and 'file' name the splits"),
        (table, {"stratify": True}, "'stratify' has no meaning beside 'file'"),
        (series, {"time": True}, "'time' cuts by time alone, so 'file' has no meaning"),
    ],
)
def test_what_does_not_go_with_a_file_is_refused(tmp_path: Path, kind: Any, split: Any, message: str) -> None:
    with pytest.raises(SiteFileError, match=message):
        declare(tmp_path, kind(tmp_path, range(1, 9)), file="split.csv", **split)


def test_the_command_says_which_dataset(tmp_path: Path) -> None:
    declare(tmp_path, table(tmp_path, range(1, 9)), group="patient")
    run = CliRunner().invoke(app, ["site", "split", str(tmp_path / "site.yaml")])
    assert isinstance(run.exception, SiteFileError) and "in the 'split' of one dataset, none is named" in str(
        run.exception
    )
    run = CliRunner().invoke(app, ["site", "split", str(tmp_path / "site.yaml"), "--dataset", "d"])
    assert isinstance(run.exception, DataError) and "dataset 'd': its 'split' has no 'file'" in str(run.exception)


@pytest.mark.parametrize("text", ["[" * 100_000, "\0" * 100_000, "group,split\n" + "x" * 100_000 + ",nowhere\n"])
def test_of_another_file_the_beginning_is_told(tmp_path: Path, text: str) -> None:
    """Its whole first line was: a hundred thousand brackets, or control characters."""
    (tmp_path / "split.csv").write_text(text)
    with pytest.raises(DataError, match="expected") as caught:
        read_split_file(tmp_path / "split.csv")
    assert len(str(caught.value)) < 600 and str(caught.value).isprintable()
