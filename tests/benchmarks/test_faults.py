# SPDX-License-Identifier: Apache-2.0
"""What is written of faults; the faults themselves need a federation (``python -m benchmarks faults``)."""

import json
from pathlib import Path

from benchmarks.faults import FAULTS, Found, as_results, table_of

WORDS = list(FAULTS)


def found(number: int, ended: list[str], same: bool, told: list[str]) -> Found:
    return Found(WORDS[number], ended, same, told, 1.6)


def test_a_silent_loss_is_the_only_verdict_that_says_nothing() -> None:
    assert found(0, ["FINISHED:COMPLETED"], True, []).verdict == "the same result"
    assert found(0, ["FINISHED:COMPLETED"], False, ["anna: gone (round 2)"]).verdict.endswith("it is told")
    assert found(0, ["FINISHED:COMPLETED"], False, []).verdict == "ANOTHER RESULT, AND NOTHING SAYS SO"
    assert found(0, [], False, ["TimeoutError: late"]).verdict == "NOT MEASURED"


def test_a_file_keeps_what_was_not_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    file.write_text(json.dumps(as_results([found(2, ["FINISHED:COMPLETED"], True, []), found(0, [], False, [])], None)))
    alike = ["anna: resumed (round 3)", "berta: resumed (round 3)"]
    results = as_results([found(0, ["FINISHED:ABORTED", "FINISHED:COMPLETED"], True, alike)], file)
    rows = table_of(results).splitlines()[2:]
    assert rows == [
        f"| {WORDS[0]} | ABORTED, then COMPLETED | the same result | anna, berta: resumed (round 3) | 2 |",
        f"| {WORDS[2]} | COMPLETED | the same result | nothing | 2 |",
    ]
