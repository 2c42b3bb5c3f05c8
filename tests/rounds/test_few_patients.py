# SPDX-License-Identifier: Apache-2.0
"""A hospital with very few validation patients: how sure its choice is may reach beyond what scores can differ."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest

from medpfl.deployed.choice import Choice
from medpfl.job import Job
from medpfl.rounds.hospital import choosing
from medpfl.rounds.simulate import simulate


@pytest.mark.slow
def test_its_answer_counts_all_the_same(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = choosing.choose

    def wide(*arguments: object) -> Choice:
        found = real(*arguments)  # type: ignore[arg-type]
        return dataclasses.replace(found, interval=(-1.7, 1.2)) if math.isfinite(found.gain) else found

    monkeypatch.setattr(choosing, "choose", wide)
    coordinator = simulate(make_job(rounds=1), table_sites, tmp_path / "results", tmp_path / "home")
    assert not [event.event for event in coordinator.record.events if "refused" in event.event]
