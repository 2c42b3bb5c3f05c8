# SPDX-License-Identifier: Apache-2.0
"""A table's columns: which is to be predicted, which are numbers or categories, which names the patient."""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from medpfl.core.errors import DataError
from medpfl.core.extras import require
from medpfl.data.cells import not_utf8
from medpfl.data.init.answers import Answers, Entry, Value, as_value
from medpfl.data.init.like import own_codes, own_columns
from medpfl.data.init.splitting import are_splits, patient_column, split_column, split_entry
from medpfl.data.numbers import as_number, beyond_double, has_comma, has_point, like_thousands, with_point
from medpfl.data.parquet import bounded_pieces, cell_text, check_parquet, opened_parquet
from medpfl.data.patients import PATIENT

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".csv", ".tsv", ".tab", ".data", ".parquet", ".pq")
MISSING = ["", "?", "NA", "N/A", "n/a", "NaN", "nan", "NULL", "null", "None", "-", ".", "unknown", "missing"]
MISSING += ["n.b.", "n. b.", "k.A.", "k. A.", "keine Angabe", "nicht bekannt", "unbekannt"]
LABEL = re.compile(r"label|target|class|outcome|diagnosis|y", re.IGNORECASE)
LATER = re.compile(
    r"(.*[ _-])?(follow.?up|surviv(ed|al)|death|died|dead|outcome|discharged?|readmi\w*|event|relapse|recurrence"
    r"|time.?to|los|length.?of.?stay|vital.?status|(ü|ue)berleben\w*|tod(es\w*)?|verstorben|sterbe\w*|entlass\w*"
    r"|ereignis|rezidiv\w*|nachbeobachtung\w*|(verweil|liege)dauer)([ _-].*)?",
    re.IGNORECASE,
)
"""Names of columns that are known only when the answer is, in English and German."""
DATE = re.compile(
    r"(19|20)\d\d-?(0[1-9]|1[0-2])-?(0[1-9]|[12]\d|3[01])([ T].*)?|\d{1,2}[./]\d{1,2}[./](\d\d|\d{4})( .*)?"
)
_ROW = re.compile(r"__index_level_\d+__")
"""A column that pandas makes of the rows' numbers."""
CATEGORIES = 20  # different texts of a column that still are categories
CLASSES = 20  # different values of a column that can be predicted


def describe(files: Sequence[Path], shown: Sequence[str], answers: Answers, of_images: bool = False) -> list[Entry]:
    """The dataset's entries.

    Rule: a column whose known cells are all numbers, and no codes of many digits, is a number; one with at most 20
    different texts is a list of categories; a patient's identifier groups rows; a column to predict of more than 20
    different numbers is a number to predict, any other one classes; any other column is left out, and one that is
    mostly missing, or whose name says that it is known only with the outcome.

    Args:
        of_images: it says what is to be predicted of them, and need hold nothing to predict it from.

    Raises:
        DataError: the files are no tables.
        SiteFileError: what is needed was not answered.
    """
    import pandas as pd

    frames = [read(file) for file in files]
    header, separator = frames[0][1], frames[0][2]
    for file, (part, *_) in zip(files[1:], frames[1:], strict=True):
        if list(part.columns) != list(frames[0][0].columns):
            here, there = (", ".join(map(str, one.columns)) for one in (part, frames[0][0]))
            raise DataError(f"{file}: its columns are {here}, those of {files[0]} {there}")
    frame = pd.concat([part for part, *_ in frames], ignore_index=True)
    agreed = answers.schema.declared.get("features") if answers.schema else None
    to_predict = answers.schema.declared.get("value") if answers.schema else None
    rename: dict[str, str] = {}
    if isinstance(agreed, dict):
        wanted = [*agreed, *([str(to_predict)] if to_predict else [])]
        own = own_columns(wanted, [str(column) for column in frame.columns], answers)
        rename = {column: name for name, column in own.items() if column != name}
        frame = frame.rename(columns=rename)
    grouped = {str(column): like_thousands(_known(frame[column], MISSING)) for column in frame}
    texts: set[str] = set()
    if commas := _with_commas(frame, separator):
        texts = {str(column) for column in frame if any(map(has_point, frame[column]))}  # which are no numbers then
        frame = frame.map(with_point)
    columns = [str(column) for column in frame.columns]
    missing = [text for text in MISSING if text in ("", "?", "NA") or frame.isin([text]).to_numpy().any()]
    guess = str(to_predict) if to_predict else _named(columns, LABEL)
    label = answers.get("label", "Which column is to be predicted?", guess, columns)
    known = {column: _known(frame[column], missing) for column in columns}
    found = _sorted(known[label])
    number = bool(to_predict) or _is_number_to_predict(found, answers)
    if not number and not 2 <= len(found) <= CLASSES and not answers.classes:
        raise DataError(
            f"{files[0]}: column '{label}' has {len(found)} different values; a class to predict needs 2 to {CLASSES} "
            "(or say with --class NAME=VALUE,VALUE what they mean), and a number to predict needs numbers in every row"
        )
    names = [" ".join(str(value).split()) for value in found]  # of a class: it may hold no line break
    classes = {} if number else answers.class_values(found, names, f"column '{label}'")
    split, group = split_column(known, label), patient_column(known, label, answers)
    features, left = _features(columns, known, len(frame), {label, split, group}, texts, grouped)
    # A column of which every row has its own value keeps nothing together, and would rule out even splits.
    several = bool(group) and len(set(known[group])) < len(known[group])
    left += [f"{group} (an identifier)"] if group and not several else []
    codes: dict[str, dict[str, Value]] = {}
    if isinstance(agreed, dict):
        features, left = dict(agreed), []  # type: ignore[arg-type] # the site file is checked when it is written
        for name, kind in features.items():
            if isinstance(kind, list) and (found_codes := own_codes(name, kind, known[name], answers)):
                codes[name] = found_codes
    if not features and not of_images:
        raise DataError(f"{files[0]}: no column is left to predict '{label}' from; left out: {', '.join(left)}")
    lacking = frame[[*features, label]].isin(missing).any(axis=1).sum()
    entries = [Entry("kind", "table"), Entry("files", list(shown))]
    if separator:
        entries.append(Entry("separator", separator))
    if commas:
        entries.append(Entry("decimal", ","))
    if not header:
        entries.append(Entry("columns", columns, "the file has no header line; give the columns their names"))
    if rename:
        entries.append(Entry("rename", rename, "this table's column: the name that the hospitals agreed on"))
    if codes:
        entries.append(Entry("codes", codes, "this table's values: those that the hospitals agreed on"))
    entries.append(Entry("missing", missing, "cells that mean 'not known'"))
    if lacking:
        note = f"{lacking} of {len(frame)} rows lack a value; drop or refuse them, or impute (features alone)"
        entries.append(Entry("missing_rows", "drop", note))
    note = "number, or the list of categories; write [1, 2, 3] for numbers that are codes"
    if left:
        note += f"; left out: {', '.join(left)}"
    entries.append(Entry("features", features, note))
    if answers.schema and "units" in answers.schema.declared:
        entries.append(Entry("units", answers.schema.declared["units"], "make sure that the numbers here are in these"))
    if number:
        entries.append(Entry("value", label, f"the number to predict: {len(found)} different ones"))
    else:
        entries.append(Entry("label", {"column": label, "classes": classes}, "class: the values that mean it"))
    if split:
        return [*entries, split_entry(split, group if several else "")]
    anew = (
        ["the files' rows are cut anew, whatever their names say"] if are_splits([file.stem for file in files]) else []
    )
    if several:
        return [*entries, split_entry("", group, "; ".join(["rows of a group stay together", *anew]))]
    if not any(PATIENT.fullmatch(column) for column in columns):
        anew.append("every row counts as another patient; if not, name the patient's column as 'group'")
    return [*entries, split_entry("", "", "; ".join(anew), **({} if number else {"stratify": True}))]


def decimal_comma(commas: int, points: int, separator: str | None) -> bool:
    """Whether the decimal sign is a comma, by how many columns of numbers have it, and how many a point. With commas
    between columns "1,2" may also be a list, so that more must have it."""
    return commas > points - (separator is not None and commas > 0)


def _with_commas(frame: pd.DataFrame, separator: str | None) -> bool:
    signs = dict.fromkeys((has_comma, has_point), 0)
    for column in frame.columns:
        cells = _known(frame[column], MISSING)
        if like_thousands(cells):
            continue  # 1,096 beside 219 says nothing of decimal commas
        if len(_no_numbers(map(with_point, cells))) <= len(cells) / 2:
            for sign in signs:
                signs[sign] += any(map(sign, cells))
    return decimal_comma(signs[has_comma], signs[has_point], separator)


def _is_number_to_predict(found: Sequence[Value], answers: Answers) -> bool:
    """Whether a column is one, and no code of classes: numbers throughout, more different ones than classes can be."""
    numbers = len(found) > CLASSES and not any(isinstance(value, str) for value in found)
    return numbers and not answers.classes and not answers.schema


def read(file: Path) -> tuple[pd.DataFrame, bool, str | None]:
    """All cells as text, whether there is a header line, and the separator where the site file must name it.

    Raises:
        DataError: it is no table.
    """
    import pandas as pd

    if file.suffix.lower() in (".parquet", ".pq"):
        require("pyarrow", "parquet", f"{file}: a Parquet file", DataError)
        from pyarrow import parquet

        try:
            check_parquet(file, parquet.read_metadata(file))
            with file.open("rb") as opened, opened_parquet(opened) as table:
                # As jobs read them, whatever pandas would make an index of, such as the column of patients.
                cells: dict[str, list[str]] = {name: [] for name in table.schema_arrow.names}
                for batch in bounded_pieces(file, table, list(cells)):
                    for name, column in cells.items():
                        column += [cell_text(value) or "" for value in batch.column(name).to_pylist()]
        except (OSError, ValueError, KeyError) as error:
            raise DataError(f"{file}: cannot be read as a Parquet table: {error}") from error
        named = {name: column for name, column in cells.items() if not _ROW.fullmatch(name)}
        return pd.DataFrame(named, dtype=str), True, None
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            lines = list(text)  # as the site file's reader takes them: a cell may hold line breaks of any kind
    except UnicodeDecodeError as error:
        raise DataError(f"{file}: {not_utf8(error)}") from error
    except OSError as error:
        raise DataError(f"{file}: cannot be read as a table: {error}") from error
    first = next((line for line in lines if line.strip()), "")
    if (there := sum(bool(line.strip()) for line in lines)) < 2:
        raise DataError(f"{file}: expected a table with at least 2 lines, got {there}")
    tabs = file.suffix.lower() in (".tsv", ".tab")
    separator = "\t" if tabs else _separator(lines, first)
    if not first.count(separator):
        raise DataError(f"{file}: found no commas, semicolons, tabs or bars between columns in its first line")
    rows = _rows(lines, separator)
    lengths = {len(row) for row in rows[1:]}
    if len(rows) > 3 and len(lengths) == 1 and len(rows[0]) not in lengths:
        raise DataError(
            f"{file}: its first line has {len(rows[0])} cells and every other line {lengths.pop()}, so it does not "
            "name the columns; remove it, or put their names there"
        )
    header = not any(is_number(with_point(cell)) for cell in rows[0])
    names = rows.pop(0) if header else [f"column_{number + 1}" for number in range(len(rows[0]))]
    for number, row in enumerate(rows, start=1 + header):
        if len(row) != len(names):
            raise DataError(f"{file}: row {number}: expected {len(names)} columns, got {len(row)}")
    if len(set(names)) != len(names):
        raise DataError(f"{file}: two columns have one name: {', '.join(names)}")
    return pd.DataFrame(rows, columns=names, dtype=str), header, None if separator == "," else separator


def count_of(file: Path, column: str, cells: Sequence[str]) -> int:
    """In how many rows of a table a column has one of some cells."""
    return int(read(file)[0][column].isin(cells).sum())


def _rows(lines: Sequence[str], separator: str) -> list[list[str]]:
    """The cells of all rows that are not blank."""
    rows = csv.reader(lines, delimiter=separator, skipinitialspace=True)
    return [cells for row in rows if len(cells := [cell.strip() for cell in row]) > 1 or any(cells)]


def _separator(lines: Sequence[str], first: str) -> str:
    """What is in the first line, gives the first lines equally many cells, and most of them; of equals not the comma,
    which numbers may have."""

    def fits(separator: str) -> tuple[bool, int]:
        rows = _rows(lines[:100], separator)
        counts = {len(row) for row in (rows[:-1] if len(lines) > 100 else rows)}  # the last may go on beyond them
        return len(counts) == 1 and separator in first, first.count(separator)

    return max(";\t|,", key=fits)


def is_number(text: str) -> bool:
    number = as_number(text)
    return number is not None and math.isfinite(number)


def _is_code(text: str) -> bool:
    """Whether it has more digits than numbers are computed with."""
    return beyond_double(text, as_number(text) or 0.0) is not None


def _no_numbers(cells: Iterable[str]) -> list[str]:
    return [cell for cell in cells if not is_number(cell)]


def _known(cells: pd.Series, missing: Sequence[str]) -> list[str]:
    return [cell for cell in cells.tolist() if cell not in missing]


def _sorted(cells: Sequence[str]) -> list[Value]:
    """The different values: numbers by size, then texts; "3" and "3.0" are one."""
    values = {as_value(cell) for cell in cells}
    return sorted(
        values, key=lambda value: (isinstance(value, str), value if not isinstance(value, str) else 0, str(value))
    )


def _named(columns: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    return next((column for column in columns if pattern.fullmatch(column)), None)


def _features(
    columns: Sequence[str],
    known: dict[str, list[str]],
    rows: int,
    used: set[str],
    texts: set[str],
    grouped: dict[str, list[str]],
) -> tuple[dict[str, str | list[Value]], list[str]]:
    features: dict[str, str | list[Value]] = {}
    left: list[str] = []
    for column in columns:
        if column in used:
            continue
        cells = known[column]
        different = set(cells)
        if PATIENT.fullmatch(column):
            left.append(f"{column} (an identifier)")
        elif LATER.fullmatch(column):
            left.append(f"{column} (is it known before the outcome? Then declare it)")
        elif cells and all(map(DATE.fullmatch, cells)):
            left.append(f"{column} (dates: make an age or a number of days of them)")
        elif len(cells) < rows / 2:
            left.append(f"{column} (missing in {rows - len(cells)} of {rows} rows)")
        elif signed := grouped[column]:
            left.append(f"{column} (is '{signed[0]}' a thousand? Then write such numbers without the sign)")
        elif cells and column not in texts and all(is_number(cell) and not _is_code(cell) for cell in cells):
            features[column] = "number"  # of one value here, too: other hospitals may have others
        elif len(different) < 2:
            left.append(f"{column} (one value only: declare the categories that other hospitals have)")
        elif len(different) <= CATEGORIES:
            features[column] = _sorted(cells)
        elif (odd := _no_numbers(cells)) and len(odd) < len(cells) / 2:
            are = "cell is no number" if len(odd) == 1 else "cells are no numbers, such as"
            left.append(f"{column} ({len(odd)} of {len(cells)} {are} '{odd[0]}')")
        else:
            left.append(f"{column} ({len(different)} different texts)")
    return features, left
