# SPDX-License-Identifier: Apache-2.0
"""Which of several columns 'medpfl site init' takes for the one that says whose a row is."""

from pathlib import Path

import pandas as pd
import yaml

from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file


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
