# SPDX-License-Identifier: Apache-2.0
"""Names of one's own on a comparison's pages: such as Markdown would read as something else, and one of two classes."""

import json
import re
from pathlib import Path

from pydantic import TypeAdapter

from medpfl.compare.collect import made_of
from medpfl.compare.comparison_tables import markdown
from medpfl.compare.entries import Entry
from medpfl.compare.report import mixings_of
from medpfl.compare.results import Mixing, Results
from medpfl.core.mixers import SoftPull
from medpfl.methods import softpull
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


def test_methods_of_two_packages_with_one_name_have_a_matrix_each() -> None:
    """The second's was taken for another row of the first, and the list of methods showed both alike."""
    row = TypeAdapter(Results).validate_json(json.dumps(read_compact(STORED))).rows[0]
    rows = []
    for package, own in (("ours", 0.9), ("theirs", 0.6)):
        method = type("Mine", (softpull.SoftPull,), {"__module__": package, "__qualname__": "Mine"})()
        made = made_of(Entry(package, method, {"model": SoftPull(lam=own)}))
        assert made.method.startswith(f"{package}.Mine(") and made.slots == {"model": f"SoftPull(lam={own})"}
        mixing = Mixing(split=None, seed=0, slots={"model": [[own, 1 - own], [1 - own, own]]})
        rows.append(row.model_copy(update={"name": package, "made": [made_of(Entry(package, method, {}))],
                                           "mixing": mixing}))  # fmt: skip
    rows.append(rows[0].model_copy(update={"name": "ours (global)"}))
    assert [one.title.partition(",")[0] for one in mixings_of(rows)] == ["ours", "theirs"]
