# SPDX-License-Identifier: Apache-2.0
"""The threat model names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ATTACKS = ROOT / "tests" / "security"


def test_every_test_that_the_threat_model_names_is_there() -> None:
    named = re.findall(r"`((?:tests/\w+/)?test_\w+\.py)::(test_\w+)`", (ROOT / "docs" / "security.md").read_text())
    assert len(named) > 30
    files = {file: ROOT / file if "/" in file else ATTACKS / file for file, _ in named}
    lost = [f"{file}::{name}" for file, name in named if f"def {name}(" not in files[file].read_text()]
    assert not lost
