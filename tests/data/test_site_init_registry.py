# SPDX-License-Identifier: Apache-2.0
"""``medpfl site init`` of tables as registrars write them: German names, texts among numbers, a Mac's file names."""

import unicodedata
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml
from PIL import Image

from medpfl.check.reading import inspect
from medpfl.data.init.answers import Answers
from medpfl.data.init.like import like
from medpfl.data.init.tables import LATER, PATIENT
from medpfl.data.init.write import write_site_file
from medpfl.data.schema import schema_of
from medpfl.data.site_file import load_site_file

HEADER = "Pat.-Nr.;Alter;CRP (mg/l);Hämoglobin;Überlebenszeit;Befund"


def proposed(place: Path, prompt: Any = None, **flags: str) -> tuple[dict[str, Any], str]:
    """The proposed dataset and the whole text."""
    output = place.parent / "site.yaml"
    write_site_file(place, output, Answers({"site": "here", "dataset": "data", **flags}, {}, prompt))
    text = output.read_text(encoding="utf-8")
    return yaml.safe_load(text)["datasets"]["data"], text.replace("\n", " ")


def write_registry(path: Path, header: str = HEADER) -> Path:
    """Sixty rows of thirty patients; CRP is below its limit in three, haemoglobin not determined in two."""
    rows = [header]
    for row in range(60):
        crp = "<0,5" if row % 20 == 0 else f"{row + 1},{row % 10}"
        hb = "n.b." if row % 30 == 1 else f"1{row % 6},{row % 10}"
        rows.append(f"{1000 + row // 2};{40 + row};{crp};{hb};{row * 9};{'krank' if row % 4 < 2 else 'gesund'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(rows) + "\n", encoding="utf-8-sig")
    return path


@pytest.mark.parametrize("name", ["Patienten-Nr", "Pat.-Nr.", "PatID", "PatientenID", "Patientennummer", "ID_Patient"])
def test_a_patients_number_keeps_the_rows_together(tmp_path: Path, name: str) -> None:
    """By a name that was not known it was a feature, and a patient's rows lay in training and test."""
    table = write_registry(tmp_path / "data" / "labor.csv", HEADER.replace("Pat.-Nr.", name))
    found, _ = proposed(table, label="Befund")
    assert found["split"]["group"] == name and name not in found["features"]


@pytest.mark.parametrize("name", ["patient_id", "Subject", "pid", "MRN", "id", "person number", "Participant-Code"])
def test_names_of_patients_that_were_known_still_are(name: str) -> None:
    assert PATIENT.fullmatch(name)


@pytest.mark.parametrize("name", ["PAT", "Patientenalter", "number", "patient_age", "code", "Nr", "idx"])
def test_other_names_are_no_patients(name: str) -> None:
    assert not PATIENT.fullmatch(name)


@pytest.mark.parametrize(
    "name",
    [
        "Überlebenszeit",
        "Ueberlebenszeit",
        "Sterbedatum",
        "Todesursache",
        "Verweildauer",
        "Rezidiv",
        "Tage_bis_Ereignis",
        "Vitalstatus",
        "Datum_Entlassung",
        "vital_status",
        "survival_days",
        "los",
    ],
)
def test_what_is_known_only_with_the_outcome_is_left_out_in_german_too(name: str) -> None:
    assert LATER.fullmatch(name)


@pytest.mark.parametrize("name", ["Methode", "Alter", "Todd", "Entladung", "Vitamin D"])
def test_other_german_names_are_features(name: str) -> None:
    assert not LATER.fullmatch(name)


def test_a_column_of_numbers_and_a_few_texts_is_named_with_these(tmp_path: Path) -> None:
    """That it has 60 different texts told nobody that three cells below the limit cost the column. The decimal comma
    went unseen, too, where all such columns hold a text."""
    found, text = proposed(write_registry(tmp_path / "data" / "labor.csv"), label="Befund")
    assert found["decimal"] == "," and found["missing"] == ["", "?", "NA", "n.b."]
    assert found["features"] == {"Alter": "number", "Hämoglobin": "number"}
    assert "CRP (mg/l) (3 of 60 cells are no numbers, such as '<0,5')" in text
    assert "Überlebenszeit (is it known before the outcome? Then declare it)" in text


def test_where_no_column_names_the_patient_it_is_asked_for(tmp_path: Path) -> None:
    asked = []

    def prompt(question: str, guess: str) -> str:
        asked.append(question)
        return "Kennzeichen" if "names the patient" in question else guess

    table = write_registry(tmp_path / "data" / "labor.csv", HEADER.replace("Pat.-Nr.", "Kennzeichen"))
    found, _ = proposed(table, prompt, label="Befund")
    assert any("names the patient" in question for question in asked)
    assert found["split"]["group"] == "Kennzeichen" and "Kennzeichen" not in found["features"]


def test_where_nobody_can_be_asked_the_file_says_what_a_row_counts_as(tmp_path: Path) -> None:
    table = write_registry(tmp_path / "data" / "labor.csv", HEADER.replace("Pat.-Nr.", "Kennzeichen"))
    found, text = proposed(table, label="Befund")
    assert "group" not in found["split"] and "every row counts as another patient" in text


@pytest.mark.parametrize(
    "form", ["202001{:02d}", "2020-01-{:02d}", "{:02d}.01.2020", "2020-01-{:02d} 08:30", "1/{}/20"]
)
def test_dates_are_no_features(tmp_path: Path, form: str) -> None:
    """Those of eight digits were numbers: 20200131 and 20200201 are 70 apart."""
    rows = [f"{row};{40 + row};{form.format(1 + row % 28)};{'krank' if row % 3 else 'gesund'}" for row in range(60)]
    path = tmp_path / "data" / "labor.csv"
    path.parent.mkdir()
    path.write_text("\n".join(["PatID;Alter;Aufnahme;Befund", *rows]) + "\n", encoding="utf-8")
    found, text = proposed(path, label="Befund")
    assert found["features"] == {"Alter": "number"}
    assert "Aufnahme (dates: make an age or a number of days of them)" in text
    assert "every row counts" not in text, "the patients' column shows that it is so"


def write_images(folder: Path, form: Literal["NFC", "NFD"] = "NFC", mode: str = "L") -> Path:
    """Twelve radiographs of six patients in a folder, and their table; one has no finding."""
    (folder / "bilder").mkdir(parents=True)
    rows = ["Bild;PatientenID;Befund"]
    for number in range(12):
        name = f"Müller_{number // 2}_{number % 2}.png"
        pixels = np.random.default_rng(number).integers(0, 255, (12, 10), dtype=np.uint8)
        Image.fromarray(pixels).convert(mode).save(folder / "bilder" / unicodedata.normalize(form, name))
        finding = "" if number == 5 else ("Pneumonie", "unauffällig")[number // 2 % 2]
        rows.append(f"{name};{number // 2};{finding}")
    (folder / "befunde.csv").write_text("\n".join(rows) + "\n", encoding="utf-8-sig")
    return folder


@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_a_table_names_images_whatever_form_their_umlauts_have(tmp_path: Path, form: Literal["NFC", "NFD"]) -> None:
    """A Mac's archives hold the letter and its dots apart (NFD), spreadsheets one letter (NFC)."""
    found, text = proposed(write_images(tmp_path / "data", form), label="Befund")
    assert found["table"]["image"] == "Bild" and found["split"]["group"] == "PatientenID"
    (inspection,) = [inspect(*one) for one in load_site_file(tmp_path / "site.yaml", "here").datasets.items()]
    assert not inspection.problems
    assert sum(split.cases for split in inspection.splits.values()) == 11, "all but the one without a finding"
    assert found["table"]["where"] == {"Befund": ["Pneumonie", "unauffällig"]}
    assert "those without a value of 'Befund' are left out: 1" in text


def test_colour_files_follow_a_schema_of_grey_images(tmp_path: Path) -> None:
    """JPEG files of radiographs often say that they are colour; the schema was then refused, and nothing helped."""
    write_images(tmp_path / "one" / "data")
    proposed(tmp_path / "one" / "data", label="Befund")
    (dataset,) = load_site_file(tmp_path / "one" / "site.yaml", "here").datasets.values()
    write_images(tmp_path / "other" / "data", mode="RGB")
    answers = like(Answers({"site": "here", "label": "Befund"}, {}), schema_of("data", dataset))
    write_site_file(tmp_path / "other" / "data", tmp_path / "other" / "site.yaml", answers)
    (dataset,) = load_site_file(tmp_path / "other" / "site.yaml", "here").datasets.values()
    assert not inspect("data", dataset).problems
    assert yaml.safe_load((tmp_path / "other" / "site.yaml").read_text())["datasets"]["data"]["channels"] == 1


def test_a_value_below_the_limit_is_not_called_missing(tmp_path: Path) -> None:
    """Listed under 'missing', as the answer proposed, the smallest values became the median."""
    proposed(write_registry(tmp_path / "data" / "labor.csv"), label="Befund")
    path = tmp_path / "data" / "site.yaml"
    path.write_text(path.read_text(encoding="utf-8").replace("Alter: number", "CRP (mg/l): number"), encoding="utf-8")
    (dataset,) = load_site_file(path, "here").datasets.values()
    problem, *_ = inspect("data", dataset).problems
    words = "expected a number, got '<0,5' (this is no missing value: write a number in its place, such as the limit"
    assert words in problem
