# SPDX-License-Identifier: Apache-2.0
"""Broken site files, tables and splits."""

from pathlib import Path

import pyarrow as pa
from pyarrow import parquet

from broken_inputs.broken import Broken, Group, cut, declared, holding, of_data, replaced, site, without
from hospitals import change_yaml, write_table

TABLE, SITE = "blood.csv", "site.yaml"


def write_parquet(folder: Path) -> None:
    """The table as a Parquet file."""
    write_table(folder)
    lines = [line.split(",") for line in (folder / TABLE).read_text().split()]
    columns = dict(zip(lines[0], zip(*lines[1:], strict=True), strict=True))
    numbers = {"age": int, "crp": float, "sick": int}
    content = {name: [numbers.get(name, str)(value) for value in values] for name, values in columns.items()}
    parquet.write_table(pa.table(content), folder / "blood.parquet")
    declared(files=["blood.parquet"])(folder)


def nested(folder: Path) -> None:
    table = parquet.read_table(folder / "blood.parquet").drop_columns("crp")
    parquet.write_table(table.append_column("crp", pa.array([[1.0]] * len(table))), folder / "blood.parquet")


def parted(folder: Path) -> None:
    """A column that says the split, wrong in one row."""
    lines = (folder / TABLE).read_text().splitlines()
    parts = ["part", "train", "tets", *("train", "validation", "test") * len(lines)]
    (folder / TABLE).write_text("\n".join(f"{line},{part}" for line, part in zip(lines, parts, strict=False)) + "\n")
    declared(split={"column": "part"})(folder)


GROUPS = [
    Group(
        "Site files",
        write_table,
        of_data,
        [
            Broken("there is none", SITE, without(SITE)),
            Broken("not YAML", SITE, holding(SITE, "site: [\n")),
            Broken("not a text file", SITE, holding(SITE, b"\xff\xfe\x00")),
            Broken("a list in place of keys", SITE, holding(SITE, "- a\n")),
            Broken("a key that is there twice", SITE, replaced(SITE, "datasets:", "site: b\ndatasets:")),
            Broken("no dataset", "datasets", site(datasets={})),
            Broken("a misspelt key", "storag", site(storag={"memory_gb": 1})),
            Broken("a misspelt key of a dataset", "datasets.blood.feature", declared(feature={"age": "number"})),
            Broken("a kind of dataset that does not exist", "datasets.blood.kind", declared(kind="tables")),
            Broken("a number below its range", "storage.memory_gb", site(storage={"memory_gb": -1})),
            Broken("a text where a number belongs", "storage.memory_gb", site(storage={"memory_gb": "much"})),
            Broken(
                "a truth value where a code belongs",
                "datasets.blood.label",
                declared(label={"column": "sick", "classes": {"well": [False], "ill": [True]}}),
            ),
            Broken(
                "one code for two classes",
                "datasets.blood.label",
                declared(label={"column": "sick", "classes": {"well": [0], "ill": [0]}}),
            ),
            Broken(
                "the label is a feature, too",
                "sick",
                lambda folder: change_yaml(
                    folder / SITE, lambda content: content["datasets"]["blood"]["features"].update(sick="number")
                ),
            ),
        ],
    ),
    Group(
        "Tables (CSV)",
        write_table,
        of_data,
        [
            Broken("there is no such file", TABLE, without(TABLE)),
            Broken("empty", TABLE, holding(TABLE, "")),
            Broken("a header and no rows", TABLE, holding(TABLE, "patient_id,age,sex,crp,sick\n")),
            Broken("not a text file", TABLE, holding(TABLE, b"a,b\n\xff\xfe,1\n")),
            Broken("a column is missing", TABLE, replaced(TABLE, "crp", "CRP")),
            Broken("a column is there twice", TABLE, replaced(TABLE, "age,sex,crp", "age,sex,sex")),
            Broken("another separator", TABLE, declared(separator=";")),
            Broken("a row with too many cells", f"{TABLE}:2", replaced(TABLE, "p00,40,m", "p00,40,1,m")),
            Broken("a row with too few cells", f"{TABLE}:2", replaced(TABLE, "p00,40,m", "p00,40")),
            Broken("a word where a number belongs", f"{TABLE}:2", replaced(TABLE, "p00,40", "p00,forty")),
            Broken("a number with a decimal comma", f"{TABLE}:2", replaced(TABLE, "p00,40", 'p00,"40,5"')),
            Broken("an infinite number", f"{TABLE}:2", replaced(TABLE, "p00,40", "p00,inf")),
            Broken("an empty cell", f"{TABLE}:2", replaced(TABLE, "p00,40", "p00,")),
            Broken("a category that is not declared", f"{TABLE}:2", replaced(TABLE, "p00,40,m", "p00,40,x")),
            Broken(
                "a class that is not declared",
                TABLE,
                declared(label={"column": "sick", "classes": {"well": [0], "ill": [2]}}),
            ),
        ],
    ),
    Group(
        "Tables (Parquet)",
        write_parquet,
        of_data,
        [
            Broken("cut in the middle", "blood.parquet", cut("blood.parquet")),
            Broken("a text file with the wrong name", "blood.parquet", holding("blood.parquet", "age,sex\n")),
            Broken("a column of lists", "blood.parquet", nested),
        ],
    ),
    Group(
        "Splits",
        write_table,
        of_data,
        [
            Broken(
                "fractions that do not sum to 1", "split", declared(split={"fractions": {"train": 0.9, "test": 0.3}})
            ),
            Broken("no test split", "split", declared(split={"fractions": {"train": 0.5, "validation": 0.5}})),
            Broken("a column of patients that is not there", TABLE, declared(split={"group": "patient"})),
            Broken("a column of splits that is not there", TABLE, declared(split={"column": "part"})),
            Broken("a split with another name", f"{TABLE}:3", parted),
            Broken("fewer patients than splits", TABLE, declared(split={"group": "sex"})),
            Broken(
                "a column of splits and fractions",
                "split",
                declared(split={"column": "sex", "fractions": {"train": 0.5, "test": 0.5}}),
            ),
        ],
    ),
]
