# SPDX-License-Identifier: Apache-2.0
"""A run of a comparison whose process cannot write, not even why: the comparison says what may be the matter."""

from pathlib import Path

import pytest

from medpfl.compare.processes import run_in_process

_STUB = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
raise OSError("what nobody reads: the log cannot be written")
"""


def test_a_run_that_could_not_write_why_it_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "full_disk_stub.py").write_text(_STUB)
    monkeypatch.syspath_prepend(tmp_path)
    part = tmp_path / "run.part"
    part.mkdir()
    told = run_in_process("full_disk_stub", str(part))
    assert told == f"exit code 1, and not a word of why in {part / 'log.txt'}: is the disk full?"
