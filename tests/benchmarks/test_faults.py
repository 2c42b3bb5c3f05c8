# SPDX-License-Identifier: Apache-2.0
"""What is written of faults; the faults themselves need a federation (``python -m benchmarks faults``)."""

import json
from pathlib import Path

import pytest

from benchmarks.faults import FAULTS, Found, as_results, chosen, table_of
from medpfl.core.errors import MedPFLError

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


def test_faults_that_do_not_exist_are_none_that_were_survived(tmp_path: Path) -> None:
    """A misspelt word started a federation, did nothing to it and ended as if all had gone well."""
    assert list(chosen("checkpoint", None)) == [words for words in WORDS if "checkpoint" in words]
    assert list(chosen("", None)) == WORDS
    with pytest.raises(MedPFLError, match="--only: no fault's words hold 'checkpiont'; there are: a hospital's job"):
        chosen("checkpiont", None)
    other = tmp_path / "mixing.json"
    other.write_text('{"bench": "mixing"}')
    with pytest.raises(MedPFLError, match=r"mixing\.json: expected a result of the benchmark 'faults'"):
        chosen("checkpoint", other)  # before an hour of faults, not after the first
    chosen("checkpoint", tmp_path / "new.json")
