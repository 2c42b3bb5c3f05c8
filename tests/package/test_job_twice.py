# SPDX-License-Identifier: Apache-2.0
"""One job, simulated twice in one process, as a notebook's cell is run again."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch

import medpfl
from medpfl.core.mixers import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State
from small_jobs import small_job, write_table_sites
from tools import assert_same, outcome


@dataclass(frozen=True)
class ByTurns(Mixer):
    """The mean in every second round, nothing in the others. It counts the rounds, and has no ``start``."""

    _done: dict[str, int] = field(default_factory=lambda: {"rounds": 0}, init=False, repr=False, compare=False)

    def matrix(self, info: RoundInfo) -> Matrix:
        self._done["rounds"] += 1
        size = len(info.roster)
        return np.full((size, size), 1 / size) if self._done["rounds"] % 2 else np.eye(size)

    def state(self) -> dict[str, torch.Tensor]:
        return {"rounds": torch.tensor(self._done["rounds"])}

    def load_state(self, state: State) -> None:
        self._done["rounds"] = int(state["rounds"])


@pytest.mark.slow
def test_a_component_begins_anew(tmp_path: Path) -> None:
    """It went on from what it remembered of the run before: the second run of the same job had other results."""
    write_table_sites(tmp_path / "sites", ["anna", "berta"])
    job = small_job(rounds=1, mixers={"model": ByTurns()})
    for turn in ("first", "second"):
        medpfl.simulate(job, tmp_path / "sites", tmp_path / turn)
    assert_same(outcome(tmp_path / "first"), outcome(tmp_path / "second"))
