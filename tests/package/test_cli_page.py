# SPDX-License-Identifier: Apache-2.0
"""docs/cli.md says what the command's own parser says."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_page_is_what_the_command_says() -> None:
    found = importlib.util.spec_from_file_location("cli_page", ROOT / "docs" / ".site" / "cli.py")
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "write it anew: python docs/.site/cli.py"
