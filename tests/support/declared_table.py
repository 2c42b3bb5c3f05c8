# SPDX-License-Identifier: Apache-2.0
"""A table of a data frame and what a site file declares of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from medpfl.data.site_file import load_site_file
from medpfl.data.table.declare import Table, TableData, read_table

DECLARED: dict[str, Any] = {
    "kind": "table",
    "files": ["t.csv"],
    "missing_rows": "impute",
    "features": {"age": "number", "cp": ["a", "b", "c"]},
    "label": {"column": "sick", "classes": {"no": [0], "yes": [1]}},
}


def declare(folder: Path, declared: Mapping[str, Any]) -> Table:
    """The dataset of a new site file."""
    (folder / "site.yaml").write_text(yaml.safe_dump({"datasets": {"t": dict(declared)}}, sort_keys=False))
    return load_site_file(folder / "site.yaml").dataset("t", Table)


def read(folder: Path, frame: pd.DataFrame, declared: Mapping[str, Any]) -> TableData:
    """The same, read, with ``frame`` as its file ``t.csv``."""
    frame.to_csv(folder / "t.csv", index=False)
    return read_table(declare(folder, declared))
