# SPDX-License-Identifier: Apache-2.0
"""What a finished run of a comparison left, damaged since: one sentence that names the file and says what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from medpfl.compare.patients import CASES, read_all, read_cases
from medpfl.compare.run_results import TrainedRun
from medpfl.compare.runner import RESULT, read_run
from medpfl.core.errors import MedPFLError
from medpfl.tasks.tabular import Tabular

TASK = Tabular(dataset="blood", hidden=(4,))
DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "half": lambda content: content[: len(content) // 2],
    "a byte less": lambda content: content[:-1],
    "another beginning": lambda content: b"\xff" + content[1:],
    "other bytes inside": lambda content: content[:60] + bytes(byte ^ 0x41 for byte in content[60:90]) + content[90:],
    "no archive": lambda content: b"\x93NUMPY garbage",
    "JSON": lambda content: b"{}",
}


def write_cases(folder: Path, **more: Any) -> Path:
    arrays = {
        "test/anna/answers/SoftPull": np.linspace(0, 1, 2000, dtype=np.float32).reshape(-1, 2),
        "test/anna/patient": np.arange(1000),
        "test/anna/targets": np.arange(1000) % 2,
    }
    with open(folder / CASES, "wb") as file:
        np.savez_compressed(file, **{**arrays, **more})  # type: ignore[arg-type]
    return folder / CASES


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_answers_are_told_in_a_sentence(tmp_path: Path, kind: str) -> None:
    """An empty file ended the command with "Aborted."; half a file with a traceback; of others it said to trust it."""
    path = write_cases(tmp_path)
    assert read_cases(tmp_path, TASK)["SoftPull"]["anna"]["test"].answers.shape == (1000, 2)
    path.write_bytes(DAMAGE[kind](path.read_bytes()))
    with pytest.raises(MedPFLError) as caught:
        read_cases(tmp_path, TASK)
    told = str(caught.value)
    assert str(path) in told and told.endswith("; remove its folder to repeat that run")
    assert "\n" not in told and "trust" not in told and len(told) < 500


def test_a_swept_value_may_hold_a_slash(tmp_path: Path) -> None:
    """Of "Mine part net/0" the run was called damaged, however often it was repeated."""
    whole = np.linspace(0, 1, 2000, dtype=np.float32).reshape(-1, 2)
    write_cases(tmp_path, **{"test/anna/answers/Mine part net/0": whole, "test/anna/threshold/Mine part net/0": 0.5})
    assert set(read_cases(tmp_path, TASK)) == {"SoftPull", "Mine part net/0"}


@pytest.mark.parametrize("more", [{"stranger": np.zeros(3)}, {"test/berta/answers/SoftPull": np.zeros(3)}], ids=str)
def test_foreign_answers_are_told_in_a_sentence(tmp_path: Path, more: dict[str, Any]) -> None:
    path = write_cases(tmp_path, **more)
    with pytest.raises(MedPFLError, match=r"; remove its folder to repeat that run$") as caught:
        read_cases(tmp_path, TASK)
    assert str(path) in str(caught.value)


def test_answers_that_one_run_has_lost_are_missed(tmp_path: Path) -> None:
    """The intervals were those of the other seeds, beside the gains of all of them, without a word."""
    folders = [tmp_path / name for name in ("0123", "4567")]
    for folder in folders:
        folder.mkdir()
    assert read_all(folders, TASK) is None  # of before: no run has kept them
    for folder in folders:
        write_cases(folder)
    assert [list(cases) for cases in read_all(folders, TASK) or ()] == [["SoftPull"], ["SoftPull"]]
    (folders[1] / CASES).unlink()
    with pytest.raises(MedPFLError) as caught:
        read_all(folders, TASK)
    assert str(caught.value) == f"{folders[1] / CASES} is missing; remove its folder to repeat that run"


@pytest.mark.parametrize("content", [b"\xff\xfe\x80", b"{", json.dumps([]).encode()], ids=repr)
def test_a_damaged_result_is_told_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    run: Any = SimpleNamespace(digest="0123")
    path = tmp_path / "runs" / "0123" / RESULT
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    with pytest.raises(MedPFLError, match=r"; remove its folder to repeat that run$") as caught:
        read_run(tmp_path, run, TrainedRun)
    assert str(path) in str(caught.value)
