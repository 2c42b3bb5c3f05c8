# SPDX-License-Identifier: Apache-2.0
"""Names that Markdown would read as something else: of metrics and models of one's own, and of values of a sweep."""

import json
import re
from pathlib import Path

from pydantic import TypeAdapter

from medpfl.compare.comparison_tables import markdown
from medpfl.compare.results import Results
from medpfl.results.compact import read_compact

STORED = Path(__file__).resolve().parents[2] / "docs" / "results" / "compare-label-skew-sgd.json.xz"
NAME = "Ditto head a|b <b>\\"


def test_a_name_with_a_bar_moves_no_number_into_another_column() -> None:
    """ "| Ditto head a|b | 0.912 |" has one cell more than its heading: "b" stood under the score."""
    content = TypeAdapter(Results).validate_json(json.dumps(read_compact(STORED)))
    named = content.rows[-1].model_copy(update={"name": NAME})
    text = markdown(content.model_copy(update={"rows": [*content.rows[:-1], named]}))
    heading = 0
    for line in text.splitlines():
        if not line.startswith("|"):
            heading = 0
            continue
        cells = len(re.findall(r"(?<!\\)(?:\\\\)*\|", line))
        heading = heading or cells
        assert cells == heading, line
    assert r"| Ditto head a\|b \<b>\\ | " in text
