# SPDX-License-Identifier: Apache-2.0
"""The cells of table files: text (CSV, TSV) and Parquet, read in pieces, with the place of each row."""

import csv
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field, field_validator

from medpfl.core.errors import DataError, meant, unreadable
from medpfl.core.extras import require
from medpfl.data import parquet
from medpfl.data.declared import Problems, Strict, canonical, distinct
from medpfl.data.numbers import not_known, with_point

if TYPE_CHECKING:
    import pandas as pd

PLACE = "\n"
"""The frames' own column: line of a text file, row of a Parquet file, from 1; a name that no file's column has."""
Where = Mapping[str, Collection[str]]
_TABS = (".tsv", ".tab")


class Written(Strict):
    """How text files with tables are written.

    ``separator``: between columns; by default a tab in .tsv and .tab, else a comma. ``decimal``: the decimal sign.
    """

    separator: str | None = Field(default=None, min_length=1, max_length=1)
    decimal: Literal[".", ","] = "."

    @field_validator("separator")
    @classmethod
    def _separates(cls, separator: str | None) -> str | None:
        if separator and separator in '\0\r\n"':
            raise ValueError("expected a comma, semicolon, tab or the like")
        return separator

    def of_cases(self) -> "Cells":
        """Of a table of cases, in which no cell means "not known" by itself."""
        return Cells(missing=[], separator=self.separator, decimal=self.decimal)


class Cells(Written):
    """How table files are written. Beside what holds for text files alone:

    ``columns``: the names, if text files have no header line. ``missing``: cells that mean "not known"; numbers among
    them count as numbers, and Parquet's nulls and NaN always do. ``rename``: a column of the files to the name that the
    hospitals agreed on, under which everything else knows it. ``codes``: of such a column, a value in the files to the
    value that they agreed on.
    """

    columns: list[str] | None = None
    missing: list[str] = Field(default=["", "?", "NA"])
    rename: dict[str, str] = Field(default={})
    codes: dict[str, dict[str | int | float, str | int | float]] = Field(default={})

    @field_validator("columns")
    @classmethod
    def _named_once(cls, columns: list[str] | None) -> list[str] | None:
        for column in columns or []:
            if columns and columns.count(column) > 1:
                raise ValueError(f"the column '{column}' is listed twice")
        return columns

    @field_validator("codes", mode="before")
    @classmethod
    def _plain(cls, codes: Any) -> Any:
        for values in codes.values() if isinstance(codes, dict) else ():
            if isinstance(values, dict):
                distinct(list(values))
                for value in values.values():
                    distinct([value])
        return codes

    @field_validator("rename")
    @classmethod
    def _renamed_once(cls, rename: dict[str, str]) -> dict[str, str]:
        agreed = list(rename.values())
        for name in agreed:
            if agreed.count(name) > 1:
                raise ValueError(f"two columns are renamed to '{name}'")
        return rename

    def check_codes(self, used: Collection[str]) -> None:
        """Raises ValueError where ``codes`` names a column that is not ``used``, whose cells would stay as they are."""
        for column in self.codes:
            if column not in used:
                agreed = self.rename.get(column)
                hint = f"; by 'rename' it is '{agreed}'" if agreed else meant(column, used)
                raise ValueError(f"'codes' names '{column}', which is no column that is used{hint}")

    def renamed(
        self, path: Path, columns: Sequence[str], needed: Collection[str] | None = None, separator: str = ""
    ) -> list[str]:
        """A file's columns by the names that the hospitals agreed on.

        Args:
            separator: what stands between columns of a text file.
            needed: agreed names of the columns that must be there; None: of all that are to be renamed.

        Raises:
            DataError: a column that is to be renamed is not there.
        """
        for column, agreed in self.rename.items():
            if column not in columns and (needed is None or agreed in needed):
                hint = meant(column, columns) or _other_separator(columns, separator)
                raise DataError(f"{path}: column '{column}', which 'rename' names, is missing{hint}")
        return [self.rename.get(column, column) for column in columns]


def shown_names(files: Sequence[str]) -> list[str]:
    """Each file's name for messages and predictions: without its folder, unless two files are named alike."""
    names = [Path(file).name for file in files]
    return [name if names.count(name) == 1 else file for name, file in zip(names, files, strict=True)]


def column_names(path: Path, form: Cells) -> list[str]:
    """A file's columns by their agreed names.

    Raises:
        DataError: the file cannot be read.
    """
    if path.suffix.lower() in parquet.SUFFIXES:
        require("pyarrow", "parquet", f"{path}: a Parquet file", DataError)
        from pyarrow.parquet import read_schema

        try:
            return form.renamed(path, read_schema(path).names, ())
        except (OSError, ValueError) as error:  # pyarrow's own is one, too
            raise DataError(f"{path}: cannot be read as a Parquet table: {error}") from error
    separator = form.separator or ("\t" if path.suffix.lower() in _TABS else ",")
    columns = form.columns or [cell.strip() for cell in next(_lines(path, separator), (0, []))[1]]
    return form.renamed(path, columns, (), separator)


def read_cells(
    path: Path,
    shown: str,
    form: Cells,
    problems: Problems,
    wanted: Sequence[str],
    numbers: Collection[str] = (),
    optional: Collection[str] | None = None,
    where: Where | None = None,
    as_texts: Collection[str] = (),
) -> "Iterator[pd.DataFrame]":
    """The named columns, some rows at a time: NaN where a cell is missing, and ``PLACE``.

    Args:
        shown: the file's name in the problems of rows.
        wanted: the columns.
        numbers: those of them that may come as float64, as Parquet has them; the others are texts (see ``to_numbers``).
        optional: of new rows the columns to predict, which a file without header line may lack together; files with one
            may lack all that is not wanted, also what ``rename`` names. None: of declared rows, where that is an error.
        where: column to canonical values; other rows are left out, whatever is wrong with them.
        as_texts: further columns of numbers, which come as texts.

    Raises:
        DataError: the file cannot be read, has no rows, or lacks a column.
    """
    columns = list(dict.fromkeys(wanted))
    empty = True
    pieces: Iterator[pd.DataFrame]
    if path.suffix.lower() in parquet.SUFFIXES:
        pieces = _parquet(path, form, columns, numbers, where or {}, None if optional is None else columns)
    else:
        pieces = _text(path, shown, form, problems, columns, {*numbers, *as_texts}, optional, where or {})
    for frame in pieces:
        empty = False
        yield _recoded(frame, form)
    if empty:
        raise DataError(f"{path}: it has no rows")


def _recoded(frame: "pd.DataFrame", form: Cells) -> "pd.DataFrame":
    for column, codes in form.codes.items():
        if column in frame:
            agreed = {canonical(value): str(meant) for value, meant in codes.items()}
            known = frame[column].notna()
            frame[column] = [
                agreed.get(canonical(cell), cell) if there else cell
                for cell, there in zip(frame[column], known, strict=True)
            ]
    return frame


def joined(pieces: "Iterable[pd.DataFrame]") -> "pd.DataFrame":
    """Pieces of a table below each other, with rows counted anew."""
    import pandas as pd

    return pd.concat(list(pieces), ignore_index=True)


def to_numbers(frame: "pd.DataFrame", column: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """A column as float64; NaN where a cell is missing or no number."""
    import pandas as pd

    return pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=np.float64, na_value=np.nan)


def _other_separator(columns: Sequence[str], separator: str) -> str:
    """What is said of a text file that has one column by the declared separator, and several by another one."""
    others = [one for one in ";,\t|" if separator and one != separator and len(columns) == 1 and one in columns[0]]
    return f"; 'separator' says {json.dumps(separator)}, is it {json.dumps(others[0])}?" if others else ""


def _check_columns(path: Path, columns: Sequence[str], wanted: Sequence[str], separator: str = "") -> None:
    other = _other_separator(columns, separator)
    for column in wanted:
        if columns.count(column) != 1:
            problem, hint = (
                ("is there more than once", "") if column in columns else ("is missing", meant(column, columns))
            )
            raise DataError(f"{path}: column '{column}' {problem}; the file has: {', '.join(columns)}{hint}{other}")


def _text(
    path: Path,
    shown: str,
    form: Cells,
    problems: Problems,
    wanted: list[str],
    numbers: Collection[str],
    optional: Collection[str] | None,
    where: Where,
) -> "Iterator[pd.DataFrame]":
    import pandas as pd

    separator = form.separator or ("\t" if path.suffix.lower() in _TABS else ",")
    commas = form.decimal == ","
    lines = _lines(path, separator)
    columns = form.columns or [cell.strip() for cell in next(lines, (0, []))[1]]
    if not columns:
        return
    columns = form.renamed(path, columns, None if optional is None else wanted, separator)
    _check_columns(path, columns, [*wanted, *where], separator)
    missing = not_known(form.missing, commas)
    while piece := list(islice(lines, parquet.PIECE)):
        without = [column for column in columns if column not in (optional or ())]
        if form.columns and len(piece[0][1]) == len(without):
            columns = without
        good = []
        for line, cells in piece:
            if not all(_is_one_of(cells, columns.index(column), values, commas) for column, values in where.items()):
                continue
            # pandas would cut longer rows and fill shorter ones: a comma as decimal sign would shift columns unseen.
            if len(cells) == len(columns):
                good.append((line, cells))
            else:
                problems.add(f"{shown}:{line}: expected {len(columns)} columns, got {len(cells)}")
        places = [columns.index(column) for column in wanted]
        rows = [[None if missing(cell := cells[i].strip()) else cell for i in places] for _, cells in good]
        if commas:
            strict = [column in numbers for column in wanted]
            rows = [[cell and with_point(cell, of) for cell, of in zip(row, strict, strict=True)] for row in rows]
        frame = pd.DataFrame(rows, columns=wanted, dtype=str)
        frame[PLACE] = np.array([line for line, _ in good], dtype=np.int64)
        yield frame


def _is_one_of(cells: Sequence[str], place: int, values: Collection[str], commas: bool) -> bool:
    if len(cells) <= place:
        return False
    cell = cells[place].strip()
    return canonical(with_point(cell) if commas else cell) in values


def _lines(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every line that is not blank."""
    lines: list[str] = []

    def noted(file: Iterable[str]) -> Iterator[str]:
        for number, line in enumerate(file, 1):
            if "\0" in line:  # which Python takes for a letter, so that a patient would get another name
                raise ValueError(f"line {number} holds a zero byte, as damaged files do")
            lines.append(line)
            yield line

    rows = partial(csv.reader, delimiter=separator, skipinitialspace=separator != " ")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = rows(noted(file))
            for cells in reader:
                if len(lines) > 1:  # a mark that nobody closed would hide all rows up to the next mark in one cell
                    list(rows(lines, strict=True))
                lines.clear()
                if len(cells) > 1 or (cells and cells[0].strip()):
                    yield reader.line_num, cells
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise DataError(f"{path} is a folder; name the file in it") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {not_utf8(error)}") from error
    except csv.Error as error:
        if len(lines) < 2:
            raise DataError(f"{path}: cannot be read as a table: {error}") from error
        first = reader.line_num - len(lines) + 1
        raise DataError(
            f'{path}:{first}: a cell of this line begins with a quotation mark (") and does not end with one, so that '
            "the lines below would be part of it; remove the mark, or close the cell"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}") from error


def not_utf8(error: UnicodeDecodeError) -> str:
    """What is said of a text file in another encoding, such as Latin-1."""
    return f"expected a table as text in UTF-8, got other bytes (at {error.start}); save it as UTF-8"


def _parquet(
    path: Path,
    form: Cells,
    wanted: list[str],
    numbers: Collection[str],
    where: Where,
    needed: Collection[str] | None,
) -> "Iterator[pd.DataFrame]":
    require("pyarrow", "parquet", f"{path}: a Parquet file", DataError)
    import pandas as pd
    import pyarrow as pa

    try:
        with path.open("rb") as opened, parquet.opened_parquet(opened) as file:
            schema = file.schema_arrow
            columns = form.renamed(path, schema.names, needed)
            _check_columns(path, columns, [*wanted, *where])
            there = {name: schema.names[columns.index(name)] for name in [*wanted, *where]}
            for name, column in there.items():
                parquet.check_type(path, name, schema.field(column).type)
            parquet.check_parquet(path, file.metadata, list(there.values()))
            row = 1
            for batch in parquet.bounded_pieces(path, file, list(there.values())):
                content = {
                    name: parquet.column_of(batch.column(there[name]), name in numbers, form.missing) for name in wanted
                }
                frame = pd.DataFrame(content)
                frame[PLACE] = np.arange(row, row + len(frame))
                row += len(frame)
                keep = np.ones(len(frame), dtype=bool)
                for column, values in where.items():
                    cells = batch.column(there[column]).to_pylist()
                    keep &= [canonical(parquet.cell_text(value) or "") in values for value in cells]
                yield frame[keep]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(unreadable(path, "a Parquet file", error)) from error
