# SPDX-License-Identifier: Apache-2.0
"""Columns that say by their name whose a case is, and that the site file does not name as its group."""

from collections.abc import Iterator

from medpfl.core.errors import DataError
from medpfl.data.contract import Dataset


def unnamed_owners(name: str, dataset: Dataset) -> Iterator[str]:
    """A warning for each such column in which cases share a value; a plain "id" is none, for it may number anything."""
    if dataset.split.group:
        return
    try:
        for column, cells in dataset.owners():
            known = [cell for cell in cells if cell.strip()]
            if column.lower() != "id" and len(set(known)) < len(known):
                yield (
                    f"{name}: '{column}' says by its name whose a case is, and several cases share a value; 'split' "
                    "does not name it, so that each case counts as another patient, and one patient's may be in "
                    f"training and in test: declare 'group: {column}' there"
                )
    except DataError:
        return  # what cannot be read is a problem, and told as that
