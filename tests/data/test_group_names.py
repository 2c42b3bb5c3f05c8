# SPDX-License-Identifier: Apache-2.0
"""A patient's name is one name with spaces behind it or not, and with an accent as one sign or two; none is no name."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from medpfl.core.errors import DataError
from medpfl.data.contract import Listing
from medpfl.data.declared import Problems
from medpfl.data.site_file import load_site_file

NAMES = [f"Jérôme {number}" for number in range(12)]
WRITTEN = (NAMES, [unicodedata.normalize("NFD", name) for name in NAMES], [name.ljust(12) for name in NAMES])
"""As a table has them, as a folder of a Mac's archive, and as an array of texts of one length."""
LABEL = {"column": "sick", "classes": {"no": [0], "yes": [1]}}


def table(folder: Path) -> dict[str, Any]:
    for place, names in enumerate(WRITTEN):
        pd.DataFrame({"who": names, "age": range(12), "sick": [0, 1] * 6}).to_csv(folder / f"{place}.csv", index=False)
    return {"kind": "table", "files": ["0.csv", "1.csv", "2.csv"], "features": {"age": "number"}, "label": LABEL}


def recordings(folder: Path) -> dict[str, Any]:
    for place, names in enumerate(WRITTEN):
        for number, name in enumerate(names):
            file = folder / str(place) / name / "a.csv"
            file.parent.mkdir(parents=True)
            pd.DataFrame({"x": range(4), "sick": [number % 2] * 4}).to_csv(file, index=False)
    declared = {"kind": "series", "files": "*/{who}/*.csv", "channels": ["x"], "label": LABEL}
    return declared | {"window": {"length": 4}}


def arrays(folder: Path) -> dict[str, Any]:
    for place, names in enumerate(WRITTEN):
        np.savez(folder / f"{place}.npz", x=np.zeros((12, 1, 5)), sick=np.array([0, 1] * 6), who=np.array(names))
    return {"kind": "series", "files": "*.npz", "inputs": "x", "label": LABEL}


def volumes(folder: Path) -> dict[str, Any]:
    items = [
        {"image": f"{place}{number}.nii", "label": "l.nii", "who": name}
        for place, names in enumerate(WRITTEN)
        for number, name in enumerate(names)
    ]
    (folder / "list.json").write_text(json.dumps({"training": items}))
    return {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}


def listed(folder: Path, declared: dict[str, Any]) -> Listing:
    content = {"datasets": {"d": declared | {"split": {"group": "who"}}}}
    (folder / "site.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    dataset: Any = load_site_file(folder / "site.yaml").datasets["d"]
    found: Listing = dataset.cases(Problems())
    return found


@pytest.mark.parametrize("kind", [table, recordings, arrays, volumes])
def test_a_patient_is_in_one_split_however_its_name_is_written(tmp_path: Path, kind: Any) -> None:
    cases = listed(tmp_path, kind(tmp_path))
    owners = {split: {case.group for case in some} for split, some in cases.items()}
    assert sum(map(len, owners.values())) == len(NAMES) == len(set.union(*owners.values()))
    assert {unicodedata.normalize("NFC", name) for name in set.union(*owners.values())} == set(NAMES)


@pytest.mark.parametrize("nobody", ["", "  "])
def test_recordings_of_an_array_whose_patient_is_not_known_are_no_patient(tmp_path: Path, nobody: str) -> None:
    declared = arrays(tmp_path)
    names = np.array([*NAMES[:10], nobody, nobody])
    np.savez(tmp_path / "0.npz", x=np.zeros((12, 1, 5)), sick=np.array([0, 1] * 6), who=names)
    with pytest.raises(DataError, match=r"0\.npz\[10\]:0: 'who' is missing \(5 time steps\)"):
        listed(tmp_path, declared)
