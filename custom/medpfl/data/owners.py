# SPDX-License-Identifier: Apache-2.0
"""Columns whose name says that they tell whose a case is, for the data check; each with the cells of the cases."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from medpfl.data.cells import Cells, column_names, read_cells
from medpfl.data.declared import Problems
from medpfl.data.patients import PATIENT
from medpfl.data.patterns import Found, find_files, placeholders

Owners = Iterator[tuple[str, list[str]]]


def of_names(folder: Path, files: Sequence[str]) -> Owners:
    """The placeholders of files, with what stands for them."""
    found: list[Found] = find_files(folder, files, Problems(keep=True))
    for column in sorted(filter(PATIENT.fullmatch, placeholders(files))):
        yield column, [file.fields[column] for file in found if column in file.fields]


def of_tables(files: Sequence[Path], form: Cells, only: str = "") -> Owners:
    """The columns of tables, or one of them.

    Raises:
        DataError: a table cannot be read.
    """
    for column in [only] if only else filter(PATIENT.fullmatch, column_names(files[0], form)):
        pieces = (piece for file in files for piece in read_cells(file, file.name, form, Problems(keep=True), [column]))
        yield column, [str(cell) for piece in pieces for cell in piece[column].dropna()]


def of_recordings(files: Sequence[Path], form: Cells) -> Owners:
    """The columns of tables that are a recording each: a cell once for each file in which it stands.

    Raises:
        DataError: a table cannot be read.
    """
    for column in filter(PATIENT.fullmatch, column_names(files[0], form) if files else ()):
        each = [{cell for _, cells in of_tables([file], form, column) for cell in cells} for file in files]
        yield column, [cell for cells in each for cell in cells]
