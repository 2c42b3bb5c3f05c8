# SPDX-License-Identifier: Apache-2.0
"""What 'medpfl site init' proposes of a Parquet table is what jobs then read of it."""

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from medpfl.check.reading import inspect
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file
from medpfl.data.site_file import load_site_file

FRAME = pd.DataFrame(
    {
        "patient_id": [f"P{row // 2}" for row in range(40)],
        "age": range(40),
        "smokes": pd.array([None if row == 7 else row % 3 == 0 for row in range(40)], dtype="boolean"),
        "sick": [row % 4 == 0 for row in range(40)],
    }
)


@pytest.mark.parametrize("frame", [FRAME, FRAME.set_index("patient_id"), FRAME.iloc[::-1]], ids=["", "index", "rows"])
def test_an_index_and_truth_values_are_columns_as_any(frame: pd.DataFrame, tmp_path: Path) -> None:
    """Without the column of patients, which pandas makes an index of, each row would be a patient of its own."""
    frame.to_parquet(tmp_path / "blood.parquet")
    answers = Answers({"site": "here", "dataset": "blood", "label": "sick"})
    write_site_file(tmp_path / "blood.parquet", tmp_path / "site.yaml", answers)
    dataset: Any = load_site_file(tmp_path / "site.yaml").datasets["blood"]
    assert dataset.split.group == "patient_id"
    assert dataset.features == {"age": "number", "smokes": "number"}
    assert dataset.label.classes == {"0": [0], "1": [1]}
    inspection = inspect("blood", dataset)
    assert not inspection.problems and sum(split.cases for split in inspection.splits.values()) == 39
