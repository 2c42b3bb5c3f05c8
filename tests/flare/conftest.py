# SPDX-License-Identifier: Apache-2.0
"""Cells that the files of this folder share."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from cells import Cells


@pytest.fixture(scope="session")
def cells() -> Iterator["Cells"]:
    from cells import Cells

    made = Cells()
    yield made
    made.stop()
