# SPDX-License-Identifier: Apache-2.0
"""Compact result files: the same content, one line an entry."""

import gzip
import json
import lzma
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from medpfl.results.compact import compact, read_compact

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), VALUES, max_size=6))
@pytest.mark.slow
def test_the_content_stays(content: dict[str, object]) -> None:
    assert json.loads(compact(content)) == content


def test_a_line_for_each_entry(tmp_path: Path) -> None:
    content = {"score": "dice", "runs": [{"seed": 0, "values": [0.5, 1]}, {"seed": 1}], "jobs": {"a": {"s": 1}}}
    lines = compact(content).splitlines()
    assert '"score":"dice",' in lines and '{"seed":0,"values":[0.5,1]},' in lines and '"a":{"s":1}' in lines
    (tmp_path / "x.json").write_text(compact(content), encoding="utf-8")
    (tmp_path / "x.json.gz").write_bytes(gzip.compress(compact(content).encode(), mtime=0))
    (tmp_path / "x.json.xz").write_bytes(lzma.compress(compact(content).encode()))
    assert [read_compact(tmp_path / f"x.json{end}") for end in ("", ".gz", ".xz")] == [content] * 3
