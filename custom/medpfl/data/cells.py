# SPDX-License-Identifier: Apache-2.0
"""The cells of table files: text (CSV, TSV) and Parquet, read in pieces, with the place of each row."""

import csv
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from pydantic import Field, field_validator

from medpfl.core.errors import DataError, meant, unreadable
from medpfl.core.extras import require
from medpfl.data.declared import Problems, Strict, canonical
from medpfl.data.untrusted import check_growth, check_values

if TYPE_CHECKING:
    import pandas as pd

PLACE = "\n"
"""The frames' own column: line of a text file, row of a Parquet file, from 1; a name that no file's column has."""
PARQUET = (".parquet", ".pq")
Where = Mapping[str, Collection[str]]
_TABS = (".tsv", ".tab")
_DELTA, _PIECE_BYTES = "DELTA_BYTE_ARRAY", 2**28
"""A way in which Parquet holds texts: each as what is new in it; and bytes of such texts to read at a time."""
_PIECE = 50_000  # rows read at a time: texts of all rows of a long recording would take gigabytes


class Cells(Strict):
    """How table files are written.

    ``separator``: of text files; by default a tab in .tsv and .tab, else a comma. ``columns``: the names, if text
    files have no header line. ``missing``: cells that mean "not known"; Parquet's nulls and NaN always do. ``rename``:
    a column of the files to the name that the hospitals agreed on, under which everything else knows it. ``codes``: of
    such a column, a value in the files to the value that the hospitals agreed on.
    """

    separator: str | None = Field(default=None, min_length=1, max_length=1)
    columns: list[str] | None = None
    missing: list[str] = Field(default=["", "?", "NA"])
    rename: dict[str, str] = Field(default={})
    codes: dict[str, dict[str | int | float, str | int | float]] = Field(default={})

    @field_validator("separator")
    @classmethod
    def _separates(cls, separator: str | None) -> str | None:
        if separator and separator in '\0\r\n"':
            raise ValueError("expected a comma, semicolon, tab or the like")
        return separator

    @field_validator("columns")
    @classmethod
    def _named_once(cls, columns: list[str] | None) -> list[str] | None:
        for column in columns or []:
            if columns and columns.count(column) > 1:
                raise ValueError(f"the column '{column}' is listed twice")
        return columns

    @field_validator("rename")
    @classmethod
    def _renamed_once(cls, rename: dict[str, str]) -> dict[str, str]:
        agreed = list(rename.values())
        for name in agreed:
            if agreed.count(name) > 1:
                raise ValueError(f"two columns are renamed to '{name}'")
        return rename

    def renamed(self, path: Path, columns: Sequence[str]) -> list[str]:
        """A file's columns by the names that the hospitals agreed on.

        Raises:
            DataError: a column that is to be renamed is not there.
        """
        for column in self.rename:
            if column not in columns:
                hint = meant(column, columns)
                raise DataError(f"{path}: column '{column}', which 'rename' names, is missing{hint}")
        return [self.rename.get(column, column) for column in columns]


def shown_names(files: Sequence[str]) -> list[str]:
    """Each file's name for messages and predictions: without its folder, unless two files are named alike."""
    names = [Path(file).name for file in files]
    return [name if names.count(name) == 1 else file for name, file in zip(names, files, strict=True)]


def read_cells(
    path: Path,
    shown: str,
    form: Cells,
    problems: Problems,
    wanted: Sequence[str],
    numbers: Collection[str] = (),
    optional: str | None = None,
    where: Where | None = None,
) -> "Iterator[pd.DataFrame]":
    """The named columns, some rows at a time: NaN where a cell is missing, and ``PLACE``.

    Args:
        shown: the file's name in the problems of rows.
        wanted: the columns.
        numbers: those of them that may come as float64, as Parquet has them; the others are texts (see ``to_numbers``).
        optional: a column that a file without header line may lack (the label of new rows).
        where: column to canonical values; other rows are left out, whatever is wrong with them.

    Raises:
        DataError: the file cannot be read, has no rows, or lacks a column.
    """
    columns = list(dict.fromkeys(wanted))
    empty = True
    pieces = _parquet if path.suffix.lower() in PARQUET else _text
    for frame in pieces(path, shown, form, problems, columns, numbers, optional, where or {}):
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


def _check_columns(path: Path, columns: Sequence[str], wanted: Sequence[str]) -> None:
    for column in wanted:
        if columns.count(column) != 1:
            problem, hint = (
                ("is there more than once", "") if column in columns else ("is missing", meant(column, columns))
            )
            raise DataError(f"{path}: column '{column}' {problem}; the file has: {', '.join(columns)}{hint}")


def _text(
    path: Path,
    shown: str,
    form: Cells,
    problems: Problems,
    wanted: list[str],
    numbers: Collection[str],
    optional: str | None,
    where: Where,
) -> "Iterator[pd.DataFrame]":
    import pandas as pd

    lines = _lines(path, form.separator or ("\t" if path.suffix.lower() in _TABS else ","))
    columns = form.columns or [cell.strip() for cell in next(lines, (0, []))[1]]
    if not columns:
        return
    columns = form.renamed(path, columns)
    _check_columns(path, columns, [*wanted, *where])
    missing = set(form.missing)
    while piece := list(islice(lines, _PIECE)):
        if form.columns and optional in columns and len(piece[0][1]) == len(columns) - 1:
            columns = [column for column in columns if column != optional]
        good = []
        for line, cells in piece:
            if not all(_is_one_of(cells, columns.index(column), values) for column, values in where.items()):
                continue
            # pandas would cut longer rows and fill shorter ones: a comma as decimal sign would shift columns unseen.
            if len(cells) == len(columns):
                good.append((line, cells))
            else:
                problems.add(f"{path}:{line}: expected {len(columns)} columns, got {len(cells)}")
        places = [columns.index(column) for column in wanted]
        rows = [[None if (cell := cells[i].strip()) in missing else cell for i in places] for _, cells in good]
        frame = pd.DataFrame(rows, columns=wanted, dtype=str)
        frame[PLACE] = np.array([line for line, _ in good], dtype=np.int64)
        yield frame


def _is_one_of(cells: Sequence[str], place: int, values: Collection[str]) -> bool:
    return len(cells) > place and canonical(cells[place].strip()) in values


def _lines(path: Path, separator: str) -> Iterator[tuple[int, list[str]]]:
    """Line number and cells of every line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=separator, skipinitialspace=separator != " ")
            for cells in reader:
                if len(cells) > 1 or (cells and cells[0].strip()):
                    yield reader.line_num, cells
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: expected a table as text in UTF-8, got other bytes (at {error.start})") from error
    except (csv.Error, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as a table: {error}") from error


def _parquet(
    path: Path,
    shown: str,
    form: Cells,
    problems: Problems,
    wanted: list[str],
    numbers: Collection[str],
    optional: str | None,
    where: Where,
) -> "Iterator[pd.DataFrame]":
    require("pyarrow", "parquet", f"{path}: a Parquet file", DataError)
    import pandas as pd
    import pyarrow as pa

    try:
        with path.open("rb") as opened, opened_parquet(opened) as file:
            schema = file.schema_arrow
            columns = form.renamed(path, schema.names)
            _check_columns(path, columns, [*wanted, *where])
            there = {name: schema.names[columns.index(name)] for name in [*wanted, *where]}
            for name, column in there.items():
                _check_type(path, name, schema.field(column).type)
            check_parquet(path, file.metadata, list(there.values()))
            row = 1
            for batch in bounded_pieces(path, file, list(there.values())):
                content = {name: _column(batch.column(there[name]), name in numbers, form.missing) for name in wanted}
                frame = pd.DataFrame(content)
                frame[PLACE] = np.arange(row, row + len(frame))
                row += len(frame)
                keep = np.ones(len(frame), dtype=bool)
                for column, values in where.items():
                    cells = batch.column(there[column]).to_pylist()
                    keep &= [canonical(_cell(value) or "") in values for value in cells]
                yield frame[keep]
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file") from error
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(unreadable(path, "a Parquet file", error)) from error


def check_parquet(path: Path, metadata: Any, columns: Collection[str] | None = None) -> None:
    """Refuse a Parquet table before it is decoded, by what its footer says.

    Args:
        metadata: the file's, as pyarrow has it.
        columns: those that are read; None: all.

    Raises:
        DataError: it has too many cells, or a column grows out of all proportion.
    """
    sizes: dict[str, list[int]] = {}
    for chunk in _chunks(metadata):
        if columns is None or chunk.path_in_schema in columns:
            found = sizes.setdefault(chunk.path_in_schema, [0, 0])
            found[0] += chunk.total_compressed_size
            found[1] += chunk.total_uncompressed_size
    check_values(path, (metadata.num_rows, len(sizes)))
    for column, (packed, size) in sizes.items():
        check_growth(path, column, packed, size)


def opened_parquet(file: IO[bytes]) -> Any:
    """As pyarrow has it; texts that the file holds once and repeats are not repeated in memory."""
    from pyarrow import parquet

    with parquet.ParquetFile(file) as looked_at:
        texts = {field.name for field in looked_at.schema_arrow if _text_type(field.type)}
        once = texts - {chunk.path_in_schema for chunk in _chunks(looked_at.metadata) if _DELTA in chunk.encodings}
    return parquet.ParquetFile(file, read_dictionary=sorted(once))


def bounded_pieces(path: Path, file: Any, columns: list[str]) -> Iterator[Any]:
    """Some rows at a time of an opened Parquet file, as record batches; of texts it is looked first how long they are
    when they are written out, for a file holds a text once however often it occurs.

    Raises:
        DataError: a column's texts grow out of all proportion.
    """
    size, grown = path.stat().st_size, dict.fromkeys(columns, 0)
    # pyarrow has no way but to write these out; no text of them is longer than all that is told once.
    longest = [chunk.total_uncompressed_size for chunk in _chunks(file.metadata) if _DELTA in chunk.encodings]
    rows = max(1, min(_PIECE, _PIECE_BYTES // max([1, *longest])))
    for batch in file.iter_batches(rows, columns=columns):
        for name in columns:
            column = batch.column(name)
            if _text_type(column.type):
                grown[name] += _written_out(column)
                check_growth(path, name, size, grown[name])
        yield batch


def _chunks(metadata: Any) -> Iterator[Any]:
    """The column chunks of all row groups."""
    for group in (metadata.row_group(number) for number in range(metadata.num_row_groups)):
        yield from (group.column(number) for number in range(group.num_columns))


def _written_out(column: Any) -> int:
    """Bytes of a column's texts, each as often as it occurs."""
    import pyarrow as pa
    import pyarrow.compute as pc

    if pa.types.is_string_view(column.type):
        column = column.cast(pa.large_string())
    if not pa.types.is_dictionary(column.type):
        return int(pc.sum(pc.binary_length(column)).as_py() or 0)
    lengths = pc.binary_length(column.dictionary).cast(pa.int64())
    return int(pc.sum(lengths.take(column.indices)).as_py() or 0)


def _text_type(kind: Any) -> bool:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(inner) or types.is_large_string(inner) or types.is_string_view(inner))


def _check_type(path: Path, column: str, kind: Any) -> None:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    if not (_text_type(kind) or _numeric(inner) or types.is_null(inner)):
        raise DataError(f"{path}: column '{column}' is of type {kind}; expected numbers, texts or truth values")


def _numeric(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind))


def _column(column: Any, as_numbers: bool, missing: list[str]) -> "pd.Series[Any]":
    """A column of Parquet as float64 or as texts."""
    import pandas as pd
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if as_numbers and (_numeric(column.type) or pa.types.is_null(column.type)):
        values = pd.Series(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
        return values.mask(values.isin([number for text in missing if (number := _number(text)) is not None]))
    cells = pd.Series([_cell(value) for value in column.to_pylist()], dtype=str)
    return cells.mask(cells.isin(missing))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _cell(value: Any) -> str | None:
    """A cell as a text file would hold it; truth values as 0 and 1.

    pandas writes whole numbers as floats where a column has missing values: 3.0 reads as 3, like the others.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return str(value).strip()
