# SPDX-License-Identifier: Apache-2.0
"""A run of a comparison whose process ends without a sentence of ours: what the comparison says may be the matter."""

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


_SEVERAL_LINES = """
import atexit, sys
atexit.register(print, "[W warning.cpp:1] leaving without a word of goodbye", file=sys.stderr)
raise RuntimeError("CUDA error: out of memory\\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\\n  (or not)")
"""


def test_of_an_error_of_several_lines_the_first_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was the last line of the log, which says to compile with TORCH_USE_CUDA_DSA, or is a warning at the end."""
    (tmp_path / "several_lines_stub.py").write_text(_SEVERAL_LINES)
    monkeypatch.syspath_prepend(tmp_path)
    part = tmp_path / "run.part"
    part.mkdir()
    told = run_in_process("several_lines_stub", str(part))
    assert told == f"RuntimeError: CUDA error: out of memory (all of it: {part / 'log.txt'})"
