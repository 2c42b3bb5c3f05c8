# SPDX-License-Identifier: Apache-2.0
"""Which of several columns 'medpfl site init' takes for the one that says whose a row is, and which folder."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from dicom_series import affine_of, write_series
from hospitals import save, scan
from medpfl.data.declared import Problems
from medpfl.data.init.answers import Answers
from medpfl.data.init.volumes import Pair, _patients, from_folder
from medpfl.data.init.write import write_site_file
from medpfl.data.site_file import load_site_file


def group_of(folder: Path, **flags: str) -> str:
    answers = Answers({"site": "here", "dataset": "data", "label": "sick", **flags})
    write_site_file(folder, folder / "site.yaml", answers)
    split: dict[str, str] = yaml.safe_load((folder / "site.yaml").read_text())["datasets"]["data"]["split"]
    return split["group"]


def test_an_id_that_counts_the_rows_of_each_file_is_no_patient_beside_one(tmp_path: Path) -> None:
    """As the guess stands first in the table, a patient's rows would be in training and in test."""
    for kind in ("table", "recording"):
        folder = tmp_path / kind
        folder.mkdir()
        for part in range(2):
            whose = [f"p{(row + 7 * part) // 3}" for row in range(12)]
            columns = {"ID": range(12), "age": range(12), "patient": whose, "sick": [0, 1] * 6}
            pd.DataFrame(columns).to_csv(folder / f"{part}.csv", index=False)
        assert group_of(folder, kind=kind) == "patient"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("{0}/2019/t1.nii.gz {0}/2020/t1.nii.gz", "p1 p1 p2 p2"),
        ("imagesTr/{0}/a/t1.nii.gz imagesTr/{0}/b/t1.nii.gz", "p1 p1 p2 p2"),
        ("{0}/images/t1.nii.gz", "p1 p2"),
        ("{0}/ct/t1.nii.gz", "p1/ct p2/ct"),
        ("all/ct/{0}/2019/t1.nii.gz all/ct/{0}/2020/t1.nii.gz", "p1 p1 p2 p2"),  # all were one patient
    ],
)
def test_visits_in_a_patients_folder_are_not_patients(names: str, expected: str) -> None:
    """Nobody is asked here; each visit was another patient, in training or in test."""
    pairs = [
        Pair((Path("data", name.format(whose)),), Path("data/mask.nii.gz"))
        for whose in ("p1", "p2")
        for name in names.split()
    ]
    assert _patients(Path("data"), pairs, Answers()) == expected.split()


def test_who_is_asked_says_which_folder_is_the_patient() -> None:
    """Patients in folders of scanners, say."""
    asked: list[str] = []

    def answer(question: str, guess: str) -> str:
        asked.extend((question, guess))
        return r"^[^/]+/([^/]+)"

    pairs = [Pair((Path("data", scanner, whose, "t1.nii.gz"),), Path("m")) for scanner in "ab" for whose in "12"]
    assert _patients(Path("data"), pairs, Answers(prompt=answer)) == ["1", "2", "1", "2"]
    assert "Which part of 'a/1/t1.nii.gz' names the patient" in asked[0] and asked[1] == "^([^/]+)"


@pytest.mark.parametrize(
    ("name", "patients"),
    [
        ("{split}/p{number}_1.nii.gz", "p0 p1 p2"),
        ("{split}/images/s{number}.nii.gz", "none"),
        ("images/{split}/p{number}/t1.nii.gz", "p0 p1 p2"),
    ],
)
def test_folders_of_splits_are_no_patients(name: str, patients: str, tmp_path: Path) -> None:
    """They were three patients, of whom the one called test could be trained on."""
    folder = tmp_path / "data"
    for number, split in enumerate(("Train", "val", "test")):
        image, label = scan(number)
        file = name.format(split=split, number=number)
        label_file = file.replace("images", "labels") if "images" in file else file.replace(".nii", "_seg.nii")
        save(folder / file, image)
        save(folder / label_file, label)
    entries, text = from_folder(folder, folder / "list.json", Answers())
    items = json.loads(text)["training"]
    assert sorted((item["split"], item.get("patient", "none")) for item in items) == sorted(
        zip(("train", "val", "test"), patients.split() if patients != "none" else ["none"] * 3, strict=True)
    )
    assert entries[-1].value == {"column": "split"}
    (folder / "list.json").write_text(text)
    declared = {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}
    (folder / "here.yaml").write_text(yaml.safe_dump({"datasets": {"d": {**declared, "split": entries[-1].value}}}))
    listing = load_site_file(folder / "here.yaml", "here").datasets["d"].cases(Problems())
    assert {split: len(cases) for split, cases in listing.items()} == {"train": 1, "validation": 1, "test": 1}


@pytest.mark.parametrize("alike", [False, True])
def test_series_of_one_patient_by_their_headers(tmp_path: Path, alike: bool) -> None:
    """A patient's second series, in a folder of its own, was among the tests."""
    for number in range(12):
        values, label = scan(number)
        whose = "anonymous" if alike else f"MRN{number // 3}"

        def name(_: int, header: Any, whose: str = whose) -> None:
            header.PatientID = whose

        write_series(tmp_path / "d" / "images" / f"s{number}", values.astype(np.int16), affine_of(), name)
        save(tmp_path / "d" / "labels" / f"s{number}.nii.gz", label, affine_of())
    entries, text = from_folder(tmp_path / "d", tmp_path / "list.json", Answers())
    found = {(item["image"], item.get("patient")) for item in json.loads(text)["training"]}
    assert len({patient for _, patient in found}) == (1 if alike else 4) and "MRN" not in text
    if not alike:
        of = dict(found)
        assert len({of[f"d/images/s{number}"] for number in range(3)}) == 1
        (tmp_path / "list.json").write_text(text)
        declared = {"kind": "volumes", "datalist": "list.json", "labels": {0: "a", 1: "b"}, "split": entries[-1].value}
        (tmp_path / "here.yaml").write_text(yaml.safe_dump({"datasets": {"d": declared}}))
        listing = load_site_file(tmp_path / "here.yaml", "here").datasets["d"].cases(Problems())
        assert sum(len({case.group for case in cases}) for cases in listing.values()) == 4
    given, _ = from_folder(tmp_path / "d", tmp_path / "list.json", Answers({"patient": "file"}))
    assert given[-1].comment == "every scan counts as another patient"
