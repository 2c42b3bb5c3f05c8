# SPDX-License-Identifier: Apache-2.0
"""Compact result files: the same content, one line an entry."""

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medpfl.results.compact import compact, read_compact

SHORT = st.floats(allow_nan=False, allow_infinity=False).map(lambda value: float(f"{value:.8g}"))
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | SHORT | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=6))
@pytest.mark.slow
def test_the_content_stays(content: dict[str, object]) -> None:
    assert json.loads(compact(content)) == content


def test_numbers_have_eight_digits() -> None:
    """Measured ones; whole numbers (seeds, bytes) stay as they are."""
    assert json.loads(compact({"a": [0.1 + 0.2, 2 / 3], "b": {"c": 123456789.4}, "n": 12345678901})) == {
        "a": [0.3, 0.66666667],
        "b": {"c": 123456790.0},
        "n": 12345678901,
    }


def test_a_line_for_each_entry(tmp_path: Path) -> None:
    content = {"score": "dice", "runs": [{"seed": 0, "values": [0.5, 1]}, {"seed": 1}], "jobs": {"a": {"s": 1}}}
    lines = compact(content).splitlines()
    assert '"score":"dice",' in lines and '{"seed":0,"values":[0.5,1]},' in lines and '"a":{"s":1}' in lines
    (tmp_path / "x.json").write_text(compact(content), encoding="utf-8")
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(compact(content).encode(), mtime=0))
    assert read_compact(tmp_path / "x.json") == read_compact(tmp_path / "x.json.gz") == content
