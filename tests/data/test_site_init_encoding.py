# SPDX-License-Identifier: Apache-2.0
"""What ``medpfl site init`` says of tables in another encoding than UTF-8."""

from pathlib import Path

import pytest

from medpfl.core.errors import DataError
from medpfl.data.init.answers import Answers
from medpfl.data.init.write import write_site_file


def test_it_is_to_be_saved_as_utf8(tmp_path: Path) -> None:
    """As every other command says it; Python's words of codecs tell a steward nothing."""
    table = tmp_path / "befunde.csv"
    table.write_bytes("Alter;Körpergewicht\n61;70\n".encode("latin-1"))
    words = r"befunde.csv: expected a table as text in UTF-8, got other bytes \(at 7\); save it as UTF-8$"
    with pytest.raises(DataError, match=words):
        write_site_file(table, tmp_path / "here.yaml", Answers({"site": "here", "dataset": "data"}, {}))
