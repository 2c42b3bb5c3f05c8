# SPDX-License-Identifier: Apache-2.0
"""``medpfl check-data`` as a user runs it."""

import sys
from pathlib import Path
from typing import Any

import pytest

from medpfl.cli import main


def check(path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Its exit code, and all it printed."""
    monkeypatch.setattr(sys, "argv", ["medpfl", "check-data", str(path)])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out + printed.err


def assert_told(path: Path, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """It fails, and a line of what it prints has all words."""
    code, printed = check(path, monkeypatch, capsys)
    assert code == 1, printed
    lines = [line for line in printed.splitlines() if line.startswith(("  - ", "medpfl: "))]
    assert any(all(word in line for word in words) for line in lines), printed
    assert "Traceback" not in printed
