# SPDX-License-Identifier: Apache-2.0
"""3-D segmentation by patches on FLARE: the numbers of ``simulate``, in memory, in a file and from the cache."""

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
    """FedSM: its selector looks at the cases' centres, its models train on patches, both are tested on whole cases.

    First the hospitals prepare their volumes and keep them, then they take them from the cache, then they have none.
    """
    sites = write_volume_sites(tmp_path / "sites")
    plain = {site: file.read_text() for site, file in sites.items()}
    for site, file in sites.items():
        file.write_text(plain[site] + yaml.safe_dump({"storage": {"cache": str(tmp_path / "hidden-place")}}))

    def job() -> Job:
        mixers = {"local": Identity(), "global": Mean(), "personal": SoftPull(lam=0.5), "selector": ServerAdam(lr=0.03)}
        return make_job(2, mixers, FedSM(batch_size=3, lr=0.01, selector_steps=2), VOLUMES)

    harness = Harness(job(), sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    kept = {path: path.stat().st_ino for path in (tmp_path / "hidden-place").rglob("*.case")}
    assert len(kept) == 20
    for _, _, message in [*harness.wire, *harness.down]:
        assert not any(word in message for word in (b"hidden-place", b"medpfl-prepared", b".case"))
        assert not any(path.stem.encode() in message for path in kept)
    expected = run(job(), sites, tmp_path / "simulated")  # of what is in the cache now
    assert {path: path.stat().st_ino for path in kept} == kept
    assert_same(outcome(harness.results), expected)
    for site, file in sites.items():
        file.write_text(plain[site] + yaml.safe_dump({"storage": {"memory_gb": 1e-9}}))
    assert_same(run(job(), sites, tmp_path / "in a file"), expected)
    assert {line["site"] for line in expected["test"]} == set(sites)
