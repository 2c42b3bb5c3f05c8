# SPDX-License-Identifier: Apache-2.0
"""Differential privacy over FLARE: as ``simulate``, bit for bit, where the noise has a fixed seed; and the hospital
whose budget is spent."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml

from encrypted import share_key
from in_process import Harness, tensors_of
from medpfl import store
from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.methods.softpull import SoftPull
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.accountant import epsilon
from medpfl.privacy.contract import Mechanism, Privacy
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
        method = SoftPull(lr=0.1, steps=2, batch_size=12, privacy=privacy)
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


def test_flare_encrypts_what_has_noise(make_job: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models of ``simulate``, up to CKKS' rounding, for every encryption is another one, and exactly its epsilon;
    ciphertexts alone are sent."""
    monkeypatch.setenv(FIXED, "5")
    sites = share_key(write_table_sites(tmp_path / "sites", ["anna", "berta"], rows=30))
    method = SoftPull(lr=0.1, steps=2, batch_size=12, optimizer="sgd", privacy=DPSGD(noise_multiplier=2.0))

    def job() -> Job:
        return make_job(1, {"model": Mean()}, method, encryption="ckks")

    harness = Harness(job(), sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    run(job(), sites, tmp_path / "simulated")
    flare, simulated = (read_summary(path) for path in (harness.results, tmp_path / "simulated" / "results"))
    assert isinstance(flare, TrainingSummary) and isinstance(simulated, TrainingSummary)
    assert flare.privacy == simulated.privacy and set(flare.privacy) == set(sites)
    for site in sites:
        file = Path(site) / "medpfl" / "small" / "models" / "personal-last.safetensors"
        ours = store.read(harness.folder / file)[0]
        theirs = store.read(tmp_path / "simulated" / "home" / site / "small" / "models" / file.name)[0]
        for key, tensor in theirs.items():
            torch.testing.assert_close(ours[key], tensor, rtol=1e-5, atol=2e-6, msg=key)
    sent = [array for _, task, payload in harness.wire if task == "train" for array in tensors_of(payload).values()]
    assert sent and {str(array.dtype) for array in sent} <= {"uint8", "int64"}
