# SPDX-License-Identifier: Apache-2.0
"""The data check warns of a column of patients that the site file does not name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from PIL import Image

from medpfl.check.check import check_data

PATIENTS = [f"p{number // 3}" for number in range(36)]
CLASSES = {"column": "sick", "classes": {"no": [0], "yes": [1]}}
Write = Callable[[Path], dict[str, object]]


def table(folder: Path, **columns: list[str]) -> dict[str, object]:
    content = {"age": range(36), "sick": [number % 2 for number in range(36)], **columns}
    pd.DataFrame(content).to_csv(folder / "t.csv", index=False)
    return {"kind": "table", "files": ["t.csv"], "features": {"age": "number"}, "label": CLASSES}


def parquet(folder: Path) -> dict[str, object]:
    declared = table(folder, patient_id=PATIENTS)
    pd.read_csv(folder / "t.csv").to_parquet(folder / "t.parquet")
    return {**declared, "files": ["t.parquet"]}


def pictures(folder: Path, name: str) -> None:
    for number, patient in enumerate(PATIENTS):
        file = folder / name.format(patient=patient, number=number)
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (6, 6), np.uint8)).save(file)


def named(folder: Path) -> dict[str, object]:
    pictures(folder, "{patient}/{number}.png")
    rows = pd.DataFrame({"file": [f"{number}.png" for number in range(36)], "sick": [n % 2 for n in range(36)]})
    rows.to_csv(folder / "t.csv", index=False)
    tabled = {"file": "t.csv", "image": "file"}
    return {"kind": "images", "files": "{patient}/*.png", "channels": 1, "table": tabled, "label": CLASSES}


def listed(folder: Path) -> dict[str, object]:
    pictures(folder, "{number}.png")
    names = [f"{number}.png" for number in range(36)]
    rows = pd.DataFrame({"file": names, "sick": [number % 2 for number in range(36)], "Pat.-Nr.": PATIENTS})
    rows.to_csv(folder / "t.csv", index=False)
    tabled = {"file": "t.csv", "image": "file"}
    return {"kind": "images", "files": "*.png", "channels": 1, "table": tabled, "label": CLASSES}


def arrays(folder: Path) -> dict[str, object]:
    images = np.random.default_rng(0).integers(0, 255, (36, 6, 6), np.uint8)
    np.savez(folder / "a.npz", x=images, y=np.arange(36) % 2, subject=PATIENTS)
    classes = {"no": [0], "yes": [1]}
    return {"kind": "arrays", "file": "a.npz", "inputs": "x", "labels": "y", "classes": classes}


def recordings(folder: Path) -> dict[str, object]:
    for number, patient in enumerate(PATIENTS):
        steps = np.sin(np.arange(20) * (number + 1))
        frame = pd.DataFrame({"x": steps, "sick": number % 2, "patient": patient})
        frame.to_csv(folder / f"{number}.csv", index=False)
    return {"kind": "series", "files": "*.csv", "channels": ["x"], "label": CLASSES, "window": {"length": 10}}


@pytest.mark.parametrize(
    ("write", "column"),
    [
        (lambda folder: table(folder, patient_id=PATIENTS), "patient_id"),
        (parquet, "patient_id"),
        (named, "patient"),
        (listed, "Pat.-Nr."),
        (arrays, "subject"),
        (recordings, "patient"),
    ],
)
def test_a_column_of_patients_that_nothing_names(tmp_path: Path, write: Write, column: str) -> None:
    """Each of a patient's cases passed for another patient, in training and in test, and no word was said."""
    declared = write(tmp_path)

    def told(split: Any) -> list[str]:
        content = {"datasets": {"d": {**declared, "split": split}}}
        (tmp_path / "site.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        report = check_data(tmp_path / "site.yaml", None, None, lambda what, done, count: None)
        assert report.passed
        return [warning for warning in report.warnings if "says by its name whose a case is" in warning]

    (warning,) = told({"seed": 1})
    assert warning.startswith(f"d: '{column}' says") and warning.endswith(f"declare 'group: {column}' there")
    assert not told({"group": column, "seed": 1})


def test_a_patient_a_row_needs_no_group(tmp_path: Path) -> None:
    declared = table(tmp_path, patient_id=[str(number) for number in range(36)], id=PATIENTS)
    (tmp_path / "site.yaml").write_text(yaml.safe_dump({"datasets": {"d": declared}}))
    report = check_data(tmp_path / "site.yaml", None, None, lambda what, done, count: None)
    assert not any("says by its name" in warning for warning in report.warnings)
