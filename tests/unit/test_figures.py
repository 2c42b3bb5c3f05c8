# SPDX-License-Identifier: Apache-2.0
"""A comparison's learning curves: which are drawn, and that no two look alike."""

import re
from typing import Any

from medpfl.compare.figures import _lines, curves


def _row(name: str, *runs: list[float]) -> dict[str, Any]:
    return {"name": name, "curve": runs[0], "curves": list(runs)}


def test_equal_curves_are_drawn_once_and_under_the_references_name() -> None:
    same, other = [0.1, 0.5, 0.6], [0.2, 0.4, 0.7]
    rows = [_row("Ditto", other), _row("Ditto (global)", same), _row("FedAvg", same), _row("MoE (global)", same)]
    text = curves([*rows, _row("untrained", [])], {"score": "dice", "target": None})
    names = [row["name"] for row in rows]
    assert [name for name in names if f"<!-- {name} -->" in text] == ["Ditto", "FedAvg"]
    assert "<!-- untrained -->" not in text


def test_curves_that_agree_in_one_run_only_are_both_drawn() -> None:
    rows = [_row("FedPer", [0.1, 0.5], [0.2, 0.6]), _row("FedRep", [0.1, 0.5], [0.2, 0.7])]
    text = curves(rows, {"score": "balanced_accuracy", "target": 0.5})
    assert len(re.findall("<!-- (FedPer|FedRep) -->", text)) == 2


def test_no_two_of_thirty_methods_look_alike() -> None:
    lines = list(_lines([_row(f"method {number}", [0.5]) for number in range(30)] + [_row("Local", [0.5])]))
    assert len({(str(colour), style) for colour, style in lines}) == 31
    assert lines[-1][1] == "--"
