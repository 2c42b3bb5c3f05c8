# SPDX-License-Identifier: Apache-2.0
"""Encrypted models that lie in files at the server, of hospitals that no round has asked yet."""

from pathlib import Path

import pytest

from encrypted import share_key
from medpfl.rounds.memory import WANTED
from medpfl.rounds.simulate import simulate
from tools import Make, outcome


@pytest.mark.slow
def test_a_copy_that_nobody_has_mixed_yet_lies_in_no_file(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network has no whole numbers, so that the server knows nothing of such a copy: the job ended there with a
    traceback. It is trained, and goes on after a restart, as in memory."""
    sites = share_key(table_sites)
    found = {}
    for memory in ("1000", "0"):
        monkeypatch.setenv(WANTED, memory)
        job = make_job(rounds=3, hospitals_per_round=2, encryption="ckks")
        for stop in (1, None):
            coordinator = simulate(
                job, sites, tmp_path / memory / "results", tmp_path / memory / "home", stop_after=stop
            )
            assert coordinator.copies.shelf.on_disk == (memory == "0")
        found[memory] = outcome(tmp_path / memory / "results")
    assert found["0"]["scores"] and len(found["0"]["scores"]) == len(found["1000"]["scores"])
    for one, other in zip(found["0"]["scores"], found["1000"]["scores"], strict=True):
        assert one["metrics"] == pytest.approx(other["metrics"], abs=1e-3)
