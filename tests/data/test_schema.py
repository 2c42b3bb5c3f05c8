# SPDX-License-Identifier: Apache-2.0
"""A schema: written from one hospital's site file, followed by another's with other names and codes."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from commands import refusal
from hospitals import change_yaml, write_site, write_table, write_volumes
from medpfl.check.check import check_data
from medpfl.cli import app
from medpfl.core.errors import SiteFileError
from medpfl.data.preparation import Spec
from medpfl.data.schema import read_schema, schema_of
from medpfl.data.site_file import load_site_file
from medpfl.data.target import Target

ROWS = Spec(Target.CLASS, ("rows",))


def medpfl(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    """Of hospital a: age in years, sex, crp."""
    a = write_table(tmp_path / "a")
    change_yaml(a, lambda site: site["datasets"]["blood"].update(units={"age": "years"}))
    medpfl("schema", a, "-o", tmp_path / "schema.yaml")
    return tmp_path / "schema.yaml"


def hospital_b(folder: Path) -> Path:
    """The same rows as at hospital a, in German and in another order; a column more, and one that is constant."""
    write_table(folder)
    lines = (folder / "blood.csv").read_text().splitlines()
    rows = [line.split(",") for line in lines[1:]]
    words = {"0": "gesund", "1": "krank", "m": "Mann", "f": "Frau"}
    german = [f"{patient},{words[sick]},{crp},{words[sex]},{age},3" for patient, age, sex, crp, sick in rows]
    (folder / "blut.csv").write_text("\n".join(["Patient_ID,Befund,CRP,Geschlecht,Alter,Station", *german]) + "\n")
    return folder / "blut.csv"


FLAGS = (
    "--label", "Befund", "--group", "Patient_ID", "--class", "well=gesund", "--class", "ill=krank",
    "--column", "age=Alter", "--column", "sex=Geschlecht", "--code", "sex:Mann=m", "--code", "sex:Frau=f",
)  # fmt: skip


def test_another_hospital_follows_it_without_editing_a_file(tmp_path: Path, schema: Path) -> None:
    table = hospital_b(tmp_path / "b")
    b = tmp_path / "b" / "site-b.yaml"
    medpfl("site", "init", table, "-o", b, "--site", "b", "--like", schema, *FLAGS, "--yes")
    assert "no problem" in medpfl("check-data", b, "--schema", schema)
    ours, theirs = (load_site_file(path).load("blood", ROWS) for path in (tmp_path / "a" / "site.yaml", b))
    assert ours.preparation and theirs.preparation
    assert ours.preparation.meaning() == theirs.preparation.meaning()
    assert ours.splits["train"].inputs[:].equal(theirs.splits["train"].inputs[:])
    assert ours.splits["train"].targets[:].equal(theirs.splits["train"].targets[:])


def test_it_holds_nothing_of_the_hospital(tmp_path: Path, schema: Path) -> None:
    a = tmp_path / "a" / "site.yaml"
    change_yaml(a, lambda site: site["datasets"]["blood"].update(rename={"crp": "crp"}, codes={"sex": {"w": "f"}}))
    content = yaml.safe_load(medpfl("schema", a))
    assert content == {
        "dataset": "blood",
        "kind": "table",
        "classes": ["well", "ill"],
        "declared": {
            "features": {"age": "number", "sex": ["m", "f"], "crp": "number"}, "units": {"age": "years"},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (FLAGS[:-6], "no column is called 'sex', which the schema has; say which it is with --column sex=COLUMN"),
        (FLAGS[:-2], "column 'sex' holds 'Frau', which is none of the schema's categories (m, f)"),
        ((*FLAGS[:6], *FLAGS[8:]), "column 'Befund' holds the value 'krank', which no --class mentions"),
        ((*FLAGS, "--column", "aeg=Alter"), "the schema has no feature 'aeg'"),
        ((*FLAGS, "--class", "wel=x"), "the schema's classes are well, ill, got 'wel'; did you mean 'well'?"),
        ((*FLAGS, "--dataset", "blut"), "the schema describes 'blood', got 'blut'"),
    ],
)
def test_what_is_lacking_is_said(
    tmp_path: Path, schema: Path, capfd: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    table = hospital_b(tmp_path / "b")
    b = tmp_path / "b" / "site-b.yaml"
    said = refusal(capfd, "site", "init", table, "-o", b, "--site", "b", "--like", schema, *flags, "--yes")
    assert words in said and not b.exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"features": {"age": "number", "sex": ["m", "f"], "CRP": "number"}},
            "'features' lacks 'crp', which the schema has; is it",
        ),
        ({"features": {"sex": ["m", "f"], "age": "number", "crp": "number"}}, "'features' are in another order"),
        (
            {"features": {"age": "number", "sex": ["f", "m"], "crp": "number"}},
            "'features.sex' is f, m; the schema has m, f",
        ),
        ({"units": {}}, "'units' is not declared; the schema has {'age': 'years'}"),
        (
            {"label": {"column": "sick", "classes": {"ill": [1], "well": [0]}}},
            "the classes are ill, well; the schema has well, ill",
        ),
    ],
)
def test_the_data_check_names_every_difference(
    tmp_path: Path, schema: Path, change: dict[str, Any], words: str
) -> None:
    path = tmp_path / "a" / "site.yaml"
    change_yaml(path, lambda site: site["datasets"]["blood"].update(change))
    report = check_data(path, None, None, lambda what, done, count: None, read_schema(schema))
    assert any(words in problem for problem in report.problems), report.problems


def test_other_kinds_have_one_too(tmp_path: Path) -> None:
    site_file = load_site_file(write_volumes(tmp_path))
    found = schema_of("organ", site_file.datasets["organ"])
    assert found.declared == {"labels": {"0": "background", "1": "organ"}}
    assert found.differences(site_file.datasets["organ"]) == []
    organ = {"kind": "volumes", "datalist": "list.json", "labels": {0: "b", 1: "organ"}}
    other = write_site(tmp_path, {"organ": organ})
    assert "the classes are b, organ" in found.differences(load_site_file(other).datasets["organ"])[0]


@pytest.mark.parametrize("kind", ["arrays", "volumes"])
def test_one_of_a_kind_that_declares_nothing_else_alike_can_be_read(tmp_path: Path, kind: str) -> None:
    """What 'medpfl schema' wrote of arrays, and of volumes with a class each, was refused as no schema."""
    label = {"column": "dx", "classes": {"well": [0], "ill": [1]}}
    dataset: dict[str, object] = {"kind": "volumes", "datalist": "list.json", "label": label}
    if kind == "arrays":
        dataset = {"kind": "arrays", "file": "a.npz", "inputs": "x", "labels": "y", "classes": label["classes"]}
    site = tmp_path / "site.yaml"
    site.write_text(yaml.safe_dump({"datasets": {"chest": dataset}}))
    assert CliRunner().invoke(app, ["schema", str(site), "-o", str(tmp_path / "schema.yaml")]).exit_code == 0
    declared = load_site_file(site).datasets["chest"]
    found = read_schema(tmp_path / "schema.yaml")
    assert found == schema_of("chest", declared) and not found.differences(declared)
    old = (tmp_path / "schema.yaml").read_text().replace("declared: {}", "declared:")
    (tmp_path / "schema.yaml").write_text(old)
    assert read_schema(tmp_path / "schema.yaml").digest == found.digest


def test_a_file_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text("dataset: blood\n")
    with pytest.raises(SiteFileError, match=r"s\.yaml: it is no dataset's schema: key 'kind' is missing"):
        read_schema(tmp_path / "s.yaml")
    with pytest.raises(SiteFileError, match="cannot read the schema"):
        read_schema(tmp_path / "none.yaml")


SEVERAL = {"columns": {"well": "w", "ill": "i"}}
OTHERWISE = {
    "one class": {"label": {"column": "sick", "classes": {"well": [0], "ill": [1]}}},
    "'several' (for each label whether the case has it)": {"several": SEVERAL},
    "one number": {"value": "days"},
    "'survival' (the time until an event, or until it had not come yet)": {"survival": {"time": "days", "event": "i"}},
}
FILES = {
    "table": {"files": ["a.csv"], "features": {"age": "number"}, "split": {"group": "p"}},
    "series": {"files": ["*.csv"], "channels": ["x"], "window": {"length": 9}, "split": {"group": "p"}},
    "images": {"files": ["*.png"], "table": {"file": "a.csv", "image": "x"}, "split": {"group": "p"}},
}
"""Of three kinds of datasets: what they all declare beside the answer."""


@pytest.mark.parametrize("kind", sorted(FILES))
def test_what_is_to_be_predicted_is_compared(tmp_path: Path, kind: str) -> None:
    """Several labels were taken for classes of the same names, and times until an event for numbers."""
    declared = {}
    for told, answer in OTHERWISE.items():
        ward = {"kind": kind, **FILES[kind], **answer}
        declared[told] = load_site_file(write_site(tmp_path, {"ward": ward})).datasets["ward"]
    for expected, ours in declared.items():
        (tmp_path / "schema.yaml").write_text(schema_of("ward", ours).as_yaml())
        schema = read_schema(tmp_path / "schema.yaml")
        for got, theirs in declared.items():
            found = schema.differences(theirs, "anna")
            if expected == got:
                assert found == []
            elif "'" in f"{expected}{got}":
                assert found[0].startswith(f"what is to be predicted at anna is {got}; the schema has {expected}")
            else:
                assert found[0].startswith("the classes are "), found


def test_the_data_check_names_the_hospital_whose_answer_is_another(tmp_path: Path, schema: Path) -> None:
    path = tmp_path / "a" / "site.yaml"
    split = {"group": "patient_id"}
    change_yaml(path, lambda site: site["datasets"]["blood"].update(several=SEVERAL, label=None, split=split))
    report = check_data(path, None, None, lambda what, done, count: None, read_schema(schema))
    assert any("blood: what is to be predicted at here is 'several'" in problem for problem in report.problems)


def test_digests_are_what_they_were(tmp_path: Path) -> None:
    """Jobs name them: what a schema says of the answer is not in them."""
    ward = {"kind": "table", **FILES["table"], "several": SEVERAL}
    digest = "33e5eb36da810738cd063ac12770878b17b8b4b4d290dc7da783000317ad2a3b"
    assert schema_of("ward", load_site_file(write_site(tmp_path, {"ward": ward})).datasets["ward"]).digest == digest


@pytest.mark.parametrize(
    ("schema", "flags", "words"),
    [
        (
            "kind: table\nclasses: [a, b]\nanswer: several\n",
            (),
            "has several labels to predict, which 'site init' does",
        ),
        (
            "kind: table\nanswer: survival\n",
            (),
            "propose a site file without --like, write 'survival' in place of what",
        ),
        ("kind: series\ndeclared: {channels: [age]}\n", (), "the schema has a number of such data to predict, which"),
        (
            "kind: table\ndeclared: {features: {age: number}, value: stay}\n",
            ("--class", "well=0"),
            "--class: the schema has no classes, for a number is to be predicted, got 'well'",
        ),
    ],
)
def test_a_schema_without_classes_is_told_as_such(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], schema: str, flags: tuple[str, ...], words: str
) -> None:
    (tmp_path / "schema.yaml").write_text(f"dataset: ward\n{schema}")
    (tmp_path / "ward.csv").write_text("age,stay\n50,1\n51,2\n")
    b = tmp_path / "b.yaml"
    given = ("--site", "b", "--like", tmp_path / "schema.yaml", "--yes", *flags)
    assert words in refusal(capfd, "site", "init", tmp_path / "ward.csv", "-o", b, *given)
    assert not b.exists()
