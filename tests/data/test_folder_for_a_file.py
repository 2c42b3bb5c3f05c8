# SPDX-License-Identifier: Apache-2.0
"""A folder where a file is expected: of volumes, images and recordings a folder can be predicted."""

from pathlib import Path

import pytest

from medpfl.core.errors import DataError
from medpfl.data.arrays.npz import Npz
from medpfl.data.cells import Cells, read_cells
from medpfl.data.declared import Problems


def test_a_table_and_arrays_are_a_file_each(tmp_path: Path) -> None:
    """It said "cannot be read as a table: [Errno 21] Is a directory"."""
    (tmp_path / "admissions").mkdir()
    with pytest.raises(DataError, match=r"admissions is a folder; name the file in it$"):
        list(read_cells(tmp_path / "admissions", "admissions", Cells(), Problems(), ["age"]))
    with pytest.raises(DataError, match=r"admissions is a folder; name the file in it$"):
        Npz(tmp_path / "admissions")
