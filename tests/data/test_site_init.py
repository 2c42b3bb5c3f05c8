# SPDX-License-Identifier: Apache-2.0
"""``medpfl site init``: what it writes loads, passes the data check and trains; what it cannot know it asks."""

import importlib.resources
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image
from typer.testing import CliRunner

from dicom_series import write_series
from hospitals import AFFINE, SHAPE, save, scan, write_table, write_volumes
from medpfl.check.reading import inspect
from medpfl.cli import app
from medpfl.core.errors import DataError, MedPFLError, SiteFileError
from medpfl.data.init.answers import Answers, as_value, parse_classes
from medpfl.data.init.like import like
from medpfl.data.init.write import write_site_file
from medpfl.data.preparation import Spec
from medpfl.data.schema import schema_of
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target
from medpfl.job import Job
from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.tabular import Tabular
from tools import write_job


def init(place: Path, output: Path, classes: list[str] | None = None, **flags: str) -> dict[str, Any]:
    """The declared dataset, as ``--yes`` and the flags give it; its data are sound."""
    answers = Answers({"site": "here", "dataset": "data", **flags}, parse_classes(classes or []))
    write_site_file(place, output, answers)
    (inspection,) = [inspect(name, dataset) for name, dataset in load_site_file(output, "here").datasets.items()]
    assert not inspection.problems and inspection.splits["train"].cases
    content: dict[str, Any] = yaml.safe_load(output.read_text())
    assert content["site"] == "here"
    dataset: dict[str, Any] = content["datasets"]["data"]
    return dataset


def medpfl(*arguments: object, answers: str | None = None) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], input=answers, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def write_folder(folder: Path, name: Callable[[int], str], label: Callable[[int], str], count: int = 6) -> Path:
    for number in range(count):
        image, labels = scan(number)
        save(folder / name(number), image)
        save(folder / label(number), labels)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("test", ["test", "testing"])
def test_a_decathlon_list_is_used_as_it_is(tmp_path: Path, test: str) -> None:
    write_volumes(tmp_path / "data")
    (tmp_path / "data" / "site.yaml").unlink()
    path = tmp_path / "data" / "list.json"
    content = json.loads(path.read_text()) | {"labels": {"0": "background", "1": "liver"}}
    content[test] = content.pop("test") + content.pop("validation")
    path.write_text(json.dumps(content))
    found = init(tmp_path / "data", tmp_path / "site.yaml")
    assert found == {"kind": "volumes", "datalist": "data/list.json", "labels": {0: "background", 1: "liver"}}


@pytest.mark.parametrize(
    ("name", "label", "patients"),
    [
        ("images/p{0:02d}.nii.gz", "labels/p{0:02d}.nii.gz", None),
        ("imagesTr/liver_{0}_0000.nii.gz", "labelsTr/liver_{0}.nii.gz", None),
        ("scan{0}.nii.gz", "scan{0}_seg.nii.gz", None),
        ("images/p{1}_v{0}.nii.gz", "labels/p{1}_v{0}.nii.gz", "p{1}"),
        ("sub-{1}/v{0}.nii.gz", "sub-{1}/v{0}_mask.nii.gz", "sub-{1}"),
        ("pat{0}/ct.nii.gz", "pat{0}/segmentation.nii.gz", "pat{0}"),
    ],
)
def test_a_folder_of_nifti_files(tmp_path: Path, name: str, label: str, patients: str | None) -> None:
    """{0}: the scan; {1}: the patient, who has two scans."""
    write_folder(
        tmp_path / "data", lambda n: name.format(n, n // 2), lambda n: label.format(n, n // 2)
    )  # fmt: skip
    found = init(tmp_path / "data", tmp_path / "site.yaml")
    assert found["labels"] == {0: "background", 1: "label-1"} and "label_map" not in found
    items = json.loads((tmp_path / found["datalist"]).read_text())["training"]
    assert {item["image"] for item in items} == {"data/" + name.format(n, n // 2) for n in range(6)}
    for item in items:
        image, labels = (Path(item[key]).name for key in ("image", "label"))
        assert image == labels or item["label"].replace("labelsTr", "imagesTr") != item["image"]
    expected = {patients.format(n, n // 2) for n in range(6)} if patients else {None}
    assert {item.get("patient") for item in items} == expected


def test_two_channels_and_other_codes(tmp_path: Path) -> None:
    for number in range(4):
        image, label = scan(number)
        for name in ("flair", "t1"):
            save(tmp_path / "data" / f"case{number}" / f"{name}.nii.gz", image)
        save(tmp_path / "data" / f"case{number}" / "mask.nii.gz", label * np.uint8(255))
    found = init(tmp_path / "data", tmp_path / "site.yaml", ["background=0", "tumour=255"])
    assert found["labels"] == {0: "background", 1: "tumour"} and found["label_map"] == {255: 1}
    item = json.loads((tmp_path / found["datalist"]).read_text())["training"][0]
    assert item["image"] == ["data/case0/flair.nii.gz", "data/case0/t1.nii.gz"] and item["patient"] == "case0"


def test_dicom_series_in_folders(tmp_path: Path) -> None:
    for number in range(3):
        values, label = scan(number)
        write_series(tmp_path / "data" / f"p{number}" / "ct", values.astype(np.int16), AFFINE)
        save(tmp_path / "data" / f"p{number}" / "label.nii.gz", label)
    found = init(tmp_path / "data", tmp_path / "site.yaml")
    items = json.loads((tmp_path / found["datalist"]).read_text())["training"]
    assert items[0] == {"image": "data/p0/ct", "label": "data/p0/label.nii.gz", "patient": "p0"}


def test_a_patient_by_a_regular_expression(tmp_path: Path) -> None:
    write_folder(tmp_path / "data", lambda n: f"images/a_{n // 2}_{n}.nii", lambda n: f"labels/a_{n // 2}_{n}.nii")
    found = init(tmp_path / "data", tmp_path / "site.yaml", patient=r"a_(\d+)_")
    items = json.loads((tmp_path / found["datalist"]).read_text())["training"]
    assert [item["patient"] for item in items] == ["0", "0", "1", "1", "2", "2"]


def test_a_table(tmp_path: Path) -> None:
    write_table(tmp_path)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    grades = ["1", "2", "2b"]
    lines[1:] = [f"{line},3,{grades[number % 3]},text {number}" for number, line in enumerate(lines[1:])]
    lines[0] += ",ward,grade,remark"
    lines[3] = lines[3].replace(",m,", ",n/a,")
    (tmp_path / "blood.csv").write_text("\n".join(lines) + "\n")
    found = init(tmp_path / "blood.csv", tmp_path / "new.yaml", ["well=0", "ill=1"], label="sick")
    assert found["features"] == {
        "age": "number", "sex": ["f", "m"], "crp": "number", "ward": "number", "grade": [1, 2, "2b"],
    }  # fmt: skip
    assert found["label"] == {"column": "sick", "classes": {"well": [0], "ill": [1]}}
    assert found["split"]["group"] == "patient_id" and "n/a" in found["missing"] and found["missing_rows"] == "drop"
    text = (tmp_path / "new.yaml").read_text()
    assert "remark (40 different texts)" in text
    assert (
        "# 1 of 40 rows lack a value; drop or refuse them, or impute (features alone)\n    missing_rows: drop" in text
    )


def test_columns_that_are_known_too_late_or_constant_texts_are_named_and_left_out(tmp_path: Path) -> None:
    write_table(tmp_path)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    lines = [f"{lines[0]},follow_up_days,site_code", *(f"{line},{n},H1" for n, line in enumerate(lines[1:]))]
    (tmp_path / "blood.csv").write_text("\n".join(lines) + "\n")
    found = init(tmp_path / "blood.csv", tmp_path / "new.yaml", label="sick")
    assert list(found["features"]) == ["age", "sex", "crp"]
    text = (tmp_path / "new.yaml").read_text()
    assert "follow_up_days (is it known before the outcome?" in text and "site_code (one value only" in text


@pytest.mark.parametrize(("column", "letter"), [("patient_id", "q"), ("nr", "")])
def test_an_identifier_that_is_different_in_every_row_groups_nothing(tmp_path: Path, column: str, letter: str) -> None:
    """Nor is it a feature: a number that --group named was one, where its name is none that identifiers have."""
    write_table(tmp_path)
    lines = (tmp_path / "blood.csv").read_text().splitlines()
    lines[0] = lines[0].replace("patient_id", column)
    lines[1:] = [f"{letter}{number}{line[line.index(',') :]}" for number, line in enumerate(lines[1:])]
    (tmp_path / "blood.csv").write_text("\n".join(lines) + "\n")
    found = init(tmp_path / "blood.csv", tmp_path / "new.yaml", label="sick", group=column)
    assert found["split"]["stratify"] and "group" not in found["split"]
    assert column not in found["features"]
    assert f"left out: {column} (an identifier)" in (tmp_path / "new.yaml").read_text()


def test_a_table_without_header_and_with_semicolons(tmp_path: Path) -> None:
    rows = [f"{n};{n % 7};{'yes' if n % 2 else 'no'}" for n in range(20)]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    found = init(tmp_path / "t.csv", tmp_path / "site.yaml", label="column_3")
    assert found["separator"] == ";" and found["columns"] == ["column_1", "column_2", "column_3"]
    assert found["label"]["classes"] == {"no": ["no"], "yes": ["yes"]}  # quoted, or YAML would read truth values
    assert found["split"]["stratify"]


def test_a_table_that_names_its_splits(tmp_path: Path) -> None:
    frame = pd.DataFrame({"x": range(30), "outcome": [n % 2 for n in range(30)]})
    frame["split"] = ["train"] * 15 + ["val"] * 7 + ["test"] * 8
    frame.to_csv(tmp_path / "t.tsv", sep="\t", index=False)
    found = init(tmp_path, tmp_path / "site.yaml")
    assert found["split"] == {"column": "split"} and found["label"]["column"] == "outcome"


def test_asking(tmp_path: Path) -> None:
    write_table(tmp_path)
    printed = medpfl(
        "site", "init", tmp_path / "blood.csv", "-o", tmp_path / "asked.yaml",
        answers="hospital-x\nblood\nsick\nwell\nill\n\n",
    )  # fmt: skip
    assert f"medpfl check-data {tmp_path / 'asked.yaml'}" in printed
    content = yaml.safe_load((tmp_path / "asked.yaml").read_text())
    assert content["site"] == "hospital-x"
    assert content["datasets"]["blood"]["label"] == {"column": "sick", "classes": {"well": [0], "ill": [1]}}
    assert content["datasets"]["blood"]["split"]["group"] == "patient_id"


@pytest.mark.parametrize("kind", ["nifti", "csv"])
@pytest.mark.slow
def test_from_files_to_a_trained_model(tmp_path: Path, kind: str, make_job: Callable[..., Job]) -> None:
    """site init, check-data --job, simulate: the commands one after the other, at two hospitals."""
    task: Any
    for number, site in enumerate(("anna", "berta")):
        data = tmp_path / site
        if kind == "nifti":
            write_folder(data, lambda n: f"images/s{n}.nii.gz", lambda n: f"labels/s{n}.nii.gz", 10 + number)
            task = Segmentation(dataset="data", size=(8, 8), spacing=(2.0, 2.0, 4.0), architecture=UNet((4, 8)))
            flags = ["--class", "background=0", "--class", "organ=1"]
        else:
            write_table(data, 40 + 10 * number)
            data /= "blood.csv"
            task = Tabular(dataset="data")
            flags = ["--label", "sick"]
        output = tmp_path / "sites" / f"{site}.yaml"
        medpfl("site", "init", data, "-o", output, "--dataset", "data", "--yes", *flags)
        job = tmp_path / "job"
        if not job.exists():
            write_job(make_job(task=task, rounds=2), job)
        assert "The job small can run here" in medpfl("check-data", output, "--job", job)
    printed = medpfl("simulate", job, "--sites", tmp_path / "sites", "--results", tmp_path / "results")
    assert "anna" in printed and "berta" in printed
    assert (tmp_path / "results" / "report.html").exists()


def refused(place: Path, output: Path, **flags: str) -> str:
    before = sorted(output.parent.rglob("*"))
    with pytest.raises(MedPFLError) as caught:
        write_site_file(place, output, Answers({"site": "here", "dataset": "data", **flags}))
    assert sorted(output.parent.rglob("*")) == before, "nothing is left behind"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_would_not_load_is_not_left_behind(tmp_path: Path) -> None:
    write_table(tmp_path)
    with pytest.raises(SiteFileError, match=r"label\.classes'.*at least 2"):
        write_site_file(
            tmp_path / "blood.csv",
            tmp_path / "new.yaml",
            Answers({"site": "a", "dataset": "b", "label": "sick"}, parse_classes(["all=0,1"])),
        )
    assert not (tmp_path / "new.yaml").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path = write_table(tmp_path)
    before = path.read_text()
    assert "is not overwritten" in refused(tmp_path / "blood.csv", path, label="sick")
    assert path.read_text() == before
    write_folder(tmp_path / "data", lambda n: f"images/s{n}.nii.gz", lambda n: f"labels/s{n}.nii.gz")
    (tmp_path / "new-data.json").write_text("mine")
    assert "new-data.json is there already" in refused(tmp_path / "data", tmp_path / "new.yaml")


@pytest.mark.parametrize(
    ("name", "text", "flags", "words"),
    [
        ("t.csv", "a,b\n1,2\n3,4\n", {}, ["--label is needed", "(a, b)"]),
        ("t.csv", "a,b\n1,2\n3,4\n", {"label": "c"}, ["--label: 'c' is not there", "a, b"]),
        ("t.csv", "a,b\n1,2\n1,2\n", {"label": "b"}, ["t.csv: column 'b' has 1 different values"]),
        ("t.csv", "a,b\n1,2\n1,2,3\n", {"label": "b"}, ["t.csv: row 3: expected 2 columns, got 3"]),
        ("t.csv", "a\n1\n2\n", {"label": "a"}, ["t.csv: found no commas"]),
        ("t.csv", "", {}, ["t.csv: expected a table with at least 2 lines, got 0"]),
        ("t.csv", "id,y\n1,0\n2,1\n", {"label": "y"}, ["no column is left to predict 'y' from", "id (an identifier)"]),
        ("t.csv", "x,y\n1,0\n2,1\n", {"label": "y", "group": "z"}, ["--group: 'z' is not there"]),
        ("t.csv", "x,y\n1,0\n2,1\n", {"label": "y", "dataset": "a b"}, ["--dataset", "'a b'"]),
        ("t.doc", "x", {}, ["t.doc: expected a folder, or a file of one of the kinds"]),
        ("t.json", "{}", {}, ["t.json: expected a Decathlon datalist"]),
        ("t.npz", "x", {}, ["t.npz: cannot be read as an .npz file"]),
        ("t.parquet", "x", {}, ["t.parquet: cannot be read as a Parquet table"]),
    ],
)
def test_one_sentence(tmp_path: Path, name: str, text: str, flags: dict[str, str], words: list[str]) -> None:
    (tmp_path / name).write_text(text)
    sentence = refused(tmp_path / name, tmp_path / "site.yaml", **flags)
    for word in words:
        assert word in sentence


def test_one_sentence_about_folders(tmp_path: Path) -> None:
    output = tmp_path / "site.yaml"
    assert "no such file or folder" in refused(tmp_path / "nowhere", output)
    (tmp_path / "empty").mkdir()
    assert "found no datalist, NIfTI, DICOM" in refused(tmp_path / "empty", output)
    folder = write_folder(tmp_path / "d", lambda n: f"images/s{n}.nii.gz", lambda n: f"labels/s{n}.nii.gz")
    assert "--patient: 'x(' is not a regular expression" in refused(folder, output, patient="x(")
    assert "--patient: 'zz' is not found in" in refused(folder, output, patient="zz")
    (folder / "labels" / "s3.nii.gz").unlink()
    assert "s3.nii.gz: found no label map of the same name" in refused(folder, output)
    shutil.move(folder / "images" / "s3.nii.gz", folder / "labels" / "s9.nii.gz")
    assert "s9.nii.gz: found no image for this label map" in refused(folder, output)
    (folder / "labels" / "s9.nii.gz").unlink()
    for number in (0, 1):
        save(folder / "labels" / f"s{number}.nii.gz", np.random.default_rng(0).random(SHAPE).astype(np.float32))
    assert "expected a label map with whole numbers" in refused(folder, output)
    for name in ("a.csv", "b.npz"):
        (tmp_path / "empty" / name).write_text("x,y\n1,2\n")
    assert "several tables or .npz files (a.csv, b.npz); name one" in refused(tmp_path / "empty", output)


def test_class_flags() -> None:
    assert parse_classes(["a=0", "b=1, 2,x"]) == {"a": [0], "b": [1, 2, "x"]}
    for wrong in (["a"], ["=1"], ["a="], ["a=1", "a=2"]):
        with pytest.raises(SiteFileError, match="NAME=VALUE"):
            parse_classes(wrong)
    assert [as_value(text) for text in ("3", "3.0", "0.5", "nan", "x")] == [3, 3, 0.5, "nan", "x"]
    with pytest.raises(SiteFileError, match="holds the value 2, which no --class mentions"):
        Answers(classes={"a": [0], "b": [1]}).class_values([0, 1, 2], ["0", "1", "2"], "column 'x'")


def test_a_table_with_a_number_to_predict(tmp_path: Path) -> None:
    """It is proposed as such and loads as a task wants it, and another hospital's is mapped onto it."""
    (tmp_path / "t.csv").write_text("x,days\n" + "\n".join(f"{n % 3},{n / 2}" for n in range(50)))
    found = init(tmp_path / "t.csv", tmp_path / "new.yaml", label="days")
    assert found["value"] == "days" and "label" not in found
    assert found["split"] == {"seed": 0, "fractions": {"train": 0.6, "validation": 0.2, "test": 0.2}}
    dataset = load_site_file(tmp_path / "new.yaml").datasets["data"]
    splits = dataset.load(Spec(Target.VALUE, ("rows",))).splits
    assert sorted(splits["train"].targets[:].tolist() + splits["validation"].targets[:].tolist())[-1] <= 24.5
    assert sum(len(samples) for samples in splits.values()) == 50
    schema = schema_of("data", dataset)
    (tmp_path / "u.csv").write_text("x;Days\n" + "\n".join(f"{n};{n % 5}" for n in range(50)))
    answers = like(Answers({"site": "b"}), schema)
    write_site_file(tmp_path / "u.csv", tmp_path / "b.yaml", answers)
    other = load_site_file(tmp_path / "b.yaml").datasets["data"]
    assert schema_of("data", other) == schema


def test_a_label_with_too_many_values(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("x,y\n" + "\n".join(f"{n % 3},n{n}" for n in range(50)))
    with pytest.raises(DataError, match="column 'y' has 50 different values"):
        write_site_file(tmp_path / "t.csv", tmp_path / "s.yaml", Answers({"site": "a", "dataset": "b", "label": "y"}))


LOADED = """
import sys

from typer.testing import CliRunner

from medpfl.cli import app

for place in sys.argv[1:]:
    given = ["--site", "here", "--dataset", "data", "--patient", "file", "--label", "sick", "--yes"]
    result = CliRunner().invoke(app, ["site", "init", place, "-o", f"{place}.yaml", *given])
    assert result.exit_code == 0, result.output
print([name for name in ("torch", "monai", "matplotlib", "sklearn", "nvflare") if name in sys.modules])
"""


@pytest.mark.slow
def test_looking_at_data_loads_nothing_that_trains(tmp_path: Path) -> None:
    """Else the command takes seconds, of which the look at the data is a small part."""
    write_folder(tmp_path / "scans", "images/p{}.nii.gz".format, "labels/p{}.nii.gz".format)
    write_table(tmp_path / "table", 40)
    (table,) = (tmp_path / "table").glob("*.csv")
    done = subprocess.run(
        [sys.executable, "-c", LOADED, tmp_path / "scans", table], capture_output=True, text=True, check=False
    )
    assert (done.stdout.strip(), done.stderr) == ("[]", "")


def test_a_first_line_that_names_no_columns_is_said_to_be_that(tmp_path: Path) -> None:
    """As scikit-learn ships its tables: the number of rows and columns, and the classes, above the numbers."""
    source = Path(str(importlib.resources.files("sklearn.datasets") / "data" / "breast_cancer.csv"))
    with pytest.raises(DataError, match="its first line has 4 cells and every other line 31, so it does not name the"):
        write_site_file(source, tmp_path / "site.yaml", Answers({"site": "here", "dataset": "data"}))


def test_stray_values_of_masks_are_all_named_before_training(tmp_path: Path) -> None:
    """Of the hundred outlines of a public set of blood cells, five have stray values; the first is the 34th."""
    rng = np.random.default_rng(0)
    for number in range(40):
        mask = np.zeros((8, 8), np.uint8)
        mask[2:5, 2:6] = 255
        if number in (34, 36):
            mask[0, :2] = 3, number
        picture = Image.fromarray(rng.integers(0, 255, (8, 8, 3)).astype(np.uint8))
        (tmp_path / "cells").mkdir(exist_ok=True)
        picture.save(tmp_path / "cells" / f"{number:03}.bmp")
        Image.fromarray(mask).save(tmp_path / "cells" / f"{number:03}.png")
    with pytest.raises(SiteFileError, match="holds the values 3, 34, 36, which no --class mentions"):
        init(tmp_path / "cells", tmp_path / "site.yaml", ["background=0", "cell=255"])
    found = init(tmp_path / "cells", tmp_path / "site.yaml", ["background=0,3,34,36", "cell=255"])
    assert found["masks"]["label_map"] == {3: 0, 34: 0, 36: 0, 255: 1}
