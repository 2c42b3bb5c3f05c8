# SPDX-License-Identifier: Apache-2.0
"""Broken inputs of every kind: one clear sentence each, and the one that docs/broken-inputs.md shows."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("SimpleITK", reason="needs the extra 'imaging'")
pytest.importorskip("highdicom", reason="needs the extra 'dicom'")

from broken_inputs.broken import Broken, Group
from broken_inputs.listing import GROUPS, line, sound, told
from medpfl.check.grouping import grouped
from medpfl.cli import main

pytestmark = pytest.mark.slow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "broken-inputs.md"
ROWS = [(group, row) for group in GROUPS for row in group.rows]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sound")


@pytest.mark.parametrize(("group", "row"), ROWS, ids=[f"{group.title}: {row.what}" for group, row in ROWS])
def test_one_clear_sentence(group: Group, row: Broken, scratch: Path) -> None:
    answers = told(group, row, scratch)
    assert len(answers) == 1, answers
    answer = answers[0]
    assert row.names in answer and len(answer) < 400, answer
    assert answer.isprintable() and not re.search(r"\b[A-Z]\w*(Error|Exception)\b|Traceback|0x[0-9a-f]{6}", answer)
    section = PAGE.read_text(encoding="utf-8").split(f"## {group.title}\n")[1].split("\n## ")[0]
    assert line(row.what, answers) in section.splitlines(), f"{line(row.what, answers)}\nrun ./tests/broken-inputs"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_what_is_sound_passes(group: Group, scratch: Path) -> None:
    """Or every test above would pass on anything."""
    assert group.answers(sound(group, scratch)) == []


def test_the_page_shows_nothing_else() -> None:
    shown = [text for text in PAGE.read_text(encoding="utf-8").splitlines() if text.endswith("`` |")]
    assert len(shown) == len(ROWS) >= 60


def test_the_command_says_the_same(scratch: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """The exit code is 1, and nothing but sentences is printed."""
    group = next(group for group in GROUPS if group.title == "Tables (CSV)")
    row = next(row for row in group.rows if row.what == "a class that is not declared")
    answers = told(group, row, scratch)
    monkeypatch.chdir(scratch / "hospital")
    monkeypatch.setattr(sys, "argv", ["medpfl", "check-data", "site.yaml"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().out
    assert ended.value.code == 1
    assert f"  - {answers[0]}" in printed.splitlines() and "Problems: 1" in printed


def test_only_what_is_alike_is_told_once() -> None:
    found = [
        "a.csv:2: expected 5 columns, got 6",
        "b.csv:7: column 'age': expected a number, got 'x'",
        *(f"a.csv:{row}: expected 5 columns, got 4" for row in range(3, 9)),
    ]
    assert grouped(found) == [
        "a.csv:2: expected 5 columns, got 6; 6 more like it: a.csv:3, a.csv:4, a.csv:5, ...",
        "b.csv:7: column 'age': expected a number, got 'x'",
    ]
    assert grouped([]) == [] and grouped(found[:2]) == found[:2]
