# SPDX-License-Identifier: Apache-2.0
"""The threat model, and the tables of what was found, name tests that exist."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ATTACKS = ROOT / "tests" / "security"


@pytest.mark.parametrize("page", ["security.md", "results/attacks-and-faults.md"])
def test_every_test_that_the_page_names_is_there(page: str) -> None:
    named = re.findall(r"`((?:tests/\w+/)?test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / page).read_text())
    assert len(named) > 30
    files = {file: ROOT / file if "/" in file else ATTACKS / file for file, _ in named}
    lost = [f"{file}::{name}" for file, name in named if f"def {name}(" not in files[file].read_text()]
    assert not lost
