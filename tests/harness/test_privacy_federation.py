# SPDX-License-Identifier: Apache-2.0
"""Differential privacy over FLARE: as ``simulate``, bit for bit, where the noise has a fixed seed; and the hospital
whose budget is spent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from in_process import Harness
from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.methods.softpull import SoftPull
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.accountant import epsilon
from medpfl.privacy.base import Mechanism, Privacy
from medpfl.privacy.noise import FIXED
from medpfl.results.files import read_summary
from medpfl.results.schema import TrainingSummary
from small_jobs import write_table_sites
from tools import assert_same, outcome, run

pytestmark = [pytest.mark.harness, pytest.mark.slow]
Make = Callable[..., Job]


@pytest.mark.parametrize(
    "privacy", [DPSGD(noise_multiplier=2.0), ClippedNoise(clip=0.5, noise_multiplier=8.0)], ids=lambda one: one.level
)
def test_flare_adds_the_noise_that_simulate_adds(
    privacy: Privacy, make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FIXED, "5")
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"], rows=30)
    limit = epsilon([Mechanism(4.0, 1.0, 1)], 1e-5) * 1.01  # of updates: one round
    content = {**yaml.safe_load(sites["clara"].read_text()), "policy": {"most_epsilon": limit}}
    if privacy.level == "update":
        sites["clara"].write_text(yaml.safe_dump(content))

    def job() -> Job:
        method = SoftPull(lr=0.1, steps=2, batch_size=6, privacy=privacy)
        return make_job(2, {"model": Mean()}, method, min_clients=2, seed=3)

    harness = Harness(job(), sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(job(), sites, tmp_path / "simulated"))
    flare, simulated = (read_summary(path) for path in (harness.results, tmp_path / "simulated" / "results"))
    assert isinstance(flare, TrainingSummary) and isinstance(simulated, TrainingSummary)
    assert flare.privacy == simulated.privacy and set(flare.privacy) == set(sites)
    assert flare.events == simulated.events
    spent = [(event.site, event.round) for event in flare.events if "('most_epsilon')" in event.event]
    assert spent == ([("clara", 2)] if privacy.level == "update" else [])
