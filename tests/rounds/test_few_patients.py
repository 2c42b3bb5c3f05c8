# SPDX-License-Identifier: Apache-2.0
"""A hospital with very few validation patients: how sure its choice is may reach beyond what scores can
differ, and its policy may refuse a job."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from medpfl.core.errors import PolicyRefused
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


def test_who_refuses_a_job_by_its_policy_is_named(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """With several hospitals on one machine "this hospital's policy" did not say whose."""
    last = sorted(table_sites)[-1]
    file = table_sites[last]
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "policy": {"least_samples": 100000}}))
    with pytest.raises(PolicyRefused, match=rf"^{last}: this hospital's policy \('least_samples'\)"):
        simulate(make_job(rounds=1), table_sites, tmp_path / "results", tmp_path / "home")
