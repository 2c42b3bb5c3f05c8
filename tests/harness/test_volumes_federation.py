# SPDX-License-Identifier: Apache-2.0
"""3-D segmentation by patches on FLARE: the numbers of ``simulate``, in memory and in a file."""

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from in_process import Harness
from medpfl.core.mixers import Identity, Mean, ServerAdam, SoftPull
from medpfl.job import Job
from medpfl.methods.fedsm import FedSM
from small_volumes import VOLUMES, write_volume_sites
from tools import assert_same, outcome, run

pytestmark = [pytest.mark.harness, pytest.mark.slow]


def test_patches_of_volumes_equal_simulate_wherever_they_lie(make_job: Callable[..., Job], tmp_path: Path) -> None:
    """FedSM: its selector looks at the cases' centres, its models train on patches, both are tested on whole cases."""
    sites = write_volume_sites(tmp_path / "sites")

    def job() -> Job:
        mixers = {"local": Identity(), "global": Mean(), "personal": SoftPull(lam=0.5), "selector": ServerAdam(lr=0.03)}
        return make_job(2, mixers, FedSM(batch_size=3, lr=0.01, selector_steps=2), VOLUMES)

    harness = Harness(job(), sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    expected = run(job(), sites, tmp_path / "simulated")
    assert_same(outcome(harness.results), expected)
    for file in sites.values():
        file.write_text(file.read_text() + yaml.safe_dump({"storage": {"memory_gb": 1e-9}}))
    assert_same(run(job(), sites, tmp_path / "in a file"), expected)
    assert {line["site"] for line in expected["test"]} == set(sites)
