# SPDX-License-Identifier: Apache-2.0
"""Parquet tables: refused by what they say of themselves before they are decoded, and read a piece at a time."""

import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from medpfl.core.errors import DataError
from medpfl.data.numbers import as_number, not_known
from medpfl.data.untrusted import check_growth, check_values

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".parquet", ".pq")
PIECE = 50_000
"""Rows read at a time: texts of all rows of a long recording would take gigabytes."""
_DELTA, _PIECE_BYTES = "DELTA_BYTE_ARRAY", 2**28
"""A way in which Parquet holds texts: each as what is new in it; and bytes of such texts to read at a time."""


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
    rows = max(1, min(PIECE, _PIECE_BYTES // max([1, *longest])))
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


def check_type(path: Path, column: str, kind: Any) -> None:
    from pyarrow import types

    inner = kind.value_type if types.is_dictionary(kind) else kind
    if not (_text_type(kind) or _numeric(inner) or types.is_null(inner)):
        raise DataError(f"{path}: column '{column}' is of type {kind}; expected numbers, texts or truth values")


def _numeric(kind: Any) -> bool:
    from pyarrow import types

    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind) or types.is_boolean(kind))


def column_of(column: Any, as_numbers: bool, missing: list[str]) -> "pd.Series[Any]":
    """A column of Parquet as float64 or as texts."""
    import pandas as pd
    import pyarrow as pa

    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if as_numbers and (_numeric(column.type) or pa.types.is_null(column.type)):
        values = pd.Series(column.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))
        return values.mask(values.isin([number for text in missing if (number := as_number(text)) is not None]))
    known = not_known(missing)
    texts = [None if text is None or known(text) else text for text in map(cell_text, column.to_pylist())]
    return pd.Series(texts, dtype=str)


def cell_text(value: Any) -> str | None:
    """A cell as a text file would hold it; truth values as 0 and 1.

    pandas writes whole numbers as floats where a column has missing values: 3.0 reads as 3, like the others.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))
    return str(value).strip()
