# SPDX-License-Identifier: Apache-2.0
"""Methods with components, exchanges and private parts of their own, over FLARE: as ``simulate``, bit for bit."""

from pathlib import Path

import pytest
import torch

from in_process import Harness
from medpfl import store
from medpfl.core.mixers import ClusterMean, ControlVariates, Mean, Mixer, NetworkProx, SoftPull
from medpfl.job import Job
from medpfl.methods.contract import Method
from medpfl.methods.ditto import Ditto
from medpfl.methods.ifca import IFCA
from medpfl.methods.l2gd import L2GD
from medpfl.methods.pfednet import PFedNet
from medpfl.methods.scaffold import Scaffold
from small_jobs import SITES
from tools import Make, assert_same, normed, outcome, run

pytestmark = pytest.mark.harness

CASES: list[tuple[Method, dict[str, Mixer]]] = [
    (Scaffold(lr=0.05, batch_size=8, optimizer="sgd"), {"model": Mean(), "control": ControlVariates()}),
    (Ditto(lr=0.05, batch_size=8), {"global": Mean()}),
    (IFCA(lr=0.05, batch_size=8), {"cluster0": ClusterMean(), "cluster1": ClusterMean()}),
    (L2GD(lr=0.05, batch_size=8, optimizer="sgd", p=0.2), {"mixed": SoftPull(lam=0.5)}),
    (
        PFedNet(lr=0.05, batch_size=8, alternate=(2, 2)),
        {"shared": Mean(uniform=True), "personal": NetworkProx(tau=0.05, s=0.5, neighbours=1)},
    ),
]


@pytest.mark.parametrize(("method", "mixers"), CASES, ids=[type(method).__name__ for method, _ in CASES])
def test_over_flare_equals_simulate(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, method: Method, mixers: dict[str, Mixer]
) -> None:
    def job() -> Job:
        return make_job(rounds=2, method=method, mixers=mixers, task=normed(), seed=1)  # L2GD: round 2 is one of heads

    harness = Harness(job(), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(job(), table_sites, tmp_path / "simulated"))
    for site in SITES:  # what never travelled, too
        theirs = tmp_path / "simulated" / "home" / site / "small" / "models"
        found = {path.name: store.read(path)[0] for path in theirs.glob("*.safetensors")}
        assert found
        for name, tensors in found.items():
            kept, _ = store.read(tmp_path / "flare" / site / "medpfl" / "small" / "models" / name)
            assert kept.keys() == tensors.keys()
            assert all(torch.equal(kept[key], value) for key, value in tensors.items()), f"{site}: {name}"
