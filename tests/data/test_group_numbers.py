# SPDX-License-Identifier: Apache-2.0
"""A patient whose number is 12 in one file, 012 in another and 12.0 in a third is one patient, in one split."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

from medpfl.core.errors import DataError
from medpfl.data.contract import Listing
from medpfl.data.declared import Problems
from medpfl.data.site_file import load_site_file
from medpfl.data.splits import Groups

WRITTEN = (str, "{:03}".format, "{}.0".format)
"""How three programs write a patient's number."""
PATIENTS = range(1, 13)
LABEL: dict[str, Any] = {"column": "sick", "classes": {"no": [0], "yes": [1]}}


def table(folder: Path) -> dict[str, Any]:
    for place, write in enumerate(WRITTEN):
        frame = pd.DataFrame({"patient": map(write, PATIENTS), "age": range(12), "sick": [0, 1] * 6})
        frame.to_csv(folder / f"{place}.csv", index=False)
    return {"kind": "table", "files": ["0.csv", "1.csv", "2.csv"], "features": {"age": "number"}, "label": LABEL}


def series(folder: Path) -> dict[str, Any]:
    for place, write in enumerate(WRITTEN):
        for patient in PATIENTS:
            frame = pd.DataFrame({"patient": [write(patient)] * 4, "x": range(4), "sick": [patient % 2] * 4})
            frame.to_csv(folder / f"{place}-{patient}.csv", index=False)
    return {"kind": "series", "files": "*.csv", "channels": ["x"], "label": LABEL, "window": {"length": 4}}


def images(folder: Path) -> dict[str, Any]:
    rows = [(f"{place}-{one}", write(one), one % 2) for place, write in enumerate(WRITTEN) for one in PATIENTS]
    for name, _, _ in rows:
        Image.fromarray(np.zeros((2, 2), np.uint8)).save(folder / f"{name}.png")
    pd.DataFrame(rows, columns=["image", "patient", "sick"]).to_csv(folder / "t.csv", index=False)
    return {"kind": "images", "files": "*.png", "table": {"file": "t.csv", "image": "image"}, "label": LABEL}


def volumes(folder: Path) -> dict[str, Any]:
    items = [
        {"image": f"{place}-{one}.nii", "label": "l.nii", "patient": float(one) if place == 2 else write(one)}
        for place, write in enumerate(WRITTEN)
        for one in PATIENTS
    ]
    (folder / "list.json").write_text(json.dumps({"training": items}))
    return {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}


def arrays(folder: Path) -> dict[str, Any]:
    patients = [write(patient) for write in WRITTEN for patient in PATIENTS]
    sick = np.array([patient % 2 for _ in WRITTEN for patient in PATIENTS])
    np.savez(folder / "a.npz", x=np.zeros((36, 2, 2), np.uint8), y=sick, patient=np.array(patients))
    classes = {"no": [0], "yes": [1]}
    return {"kind": "arrays", "file": "a.npz", "inputs": "x", "labels": "y", "classes": classes}


def listed(folder: Path, declared: dict[str, Any], **split: Any) -> Listing:
    content = {"datasets": {"d": declared | {"split": split}}}
    (folder / "site.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    dataset: Any = load_site_file(folder / "site.yaml").datasets["d"]
    found: Listing = dataset.cases(Problems())
    return found


@pytest.mark.parametrize("kind", [table, series, images, volumes, arrays])
def test_a_patient_is_in_one_split_however_its_number_is_written(tmp_path: Path, kind: Any) -> None:
    cases = listed(tmp_path, kind(tmp_path), group="patient")
    owners = {split: {int(float(case.group)) for case in some} for split, some in cases.items()}
    assert sum(map(len, owners.values())) == len(PATIENTS) == len({case.group for s in cases.values() for case in s})
    assert set.union(*owners.values()) == set(PATIENTS)


@pytest.mark.parametrize("patient", [np.array([1, 1, 2, 2, np.nan, np.nan, 3]), np.array([*"1122", "", " ", "3"])])
def test_rows_of_an_array_whose_patient_is_not_known_are_no_patient(tmp_path: Path, patient: Any) -> None:
    declared = arrays(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.zeros((7, 2, 2), np.uint8), y=np.array([0, 1, 0, 1, 0, 1, 0]), patient=patient)
    with pytest.raises(DataError, match=r"x\[4\]: array 'patient' has no value; every row needs a group"):
        listed(tmp_path, declared, group="patient")


def test_a_patient_in_two_splits_of_a_list_is_refused_however_its_number_is_written(tmp_path: Path) -> None:
    declared = volumes(tmp_path)
    lists = {"training": [{"image": "a.nii", "label": "l.nii", "patient": "012"}]}
    lists["test"] = [{"image": "b.nii", "label": "l.nii", "patient": 12}]
    (tmp_path / "list.json").write_text(json.dumps(lists))
    with pytest.raises(DataError, match="'012' is in the train split and in the test split"):
        listed(tmp_path, declared, group="patient")


def test_other_names_are_as_they_are() -> None:
    groups = Groups()
    names = [
        "1.5",
        "1.50",
        "1e1",
        "10",
        "a1",
        "a01",
        "",
        "-1",
        "1.2.840",
        "12345678901234567890",
        "12345678901234567891",
    ]
    assert [groups.named(name) for name in names] == names
    assert [groups.named(name) for name in ("0", "00", "0.0", " 10 ", "010.")] == ["0", "0", "0", "10", "10"]


def test_a_misspelt_field_of_patients_in_a_datalist_is_refused(tmp_path: Path) -> None:
    """Each scan would be a patient of its own, and a patient with several of them in two splits."""
    declared = volumes(tmp_path)
    with pytest.raises(DataError, match=r"no item has the field 'patients', which 'split\.group' names; did you mean"):
        listed(tmp_path, declared, group="patients")
    content = json.loads((tmp_path / "list.json").read_text())
    for item in content["training"]:
        del item["patient"]
    (tmp_path / "list.json").write_text(json.dumps(content))
    cases = listed(tmp_path, declared, group="patient")  # the usual Decathlon list: one volume a patient
    assert len({case.group for some in cases.values() for case in some}) == 36
