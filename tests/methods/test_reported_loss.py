# SPDX-License-Identifier: Apache-2.0
"""The training loss that hospitals report is the task's, so that the methods' curves can be compared."""

from pathlib import Path
from typing import Any

import pytest

from baselines import begin
from medpfl.core.mixers import Identity, Mean, Mixer, SoftPull
from medpfl.methods.contract import Method
from medpfl.methods.ditto import Ditto
from medpfl.methods.fedprox import FedProx
from medpfl.methods.l2gd import L2GD
from medpfl.methods.moon import Moon
from medpfl.methods.scaffold import Scaffold
from tools import Make, exchange

SETTINGS: dict[str, Any] = {"lr": 0.05, "batch_size": 100, "steps": 1, "optimizer": "sgd"}


@pytest.mark.parametrize(
    ("method", "mixers"),
    [
        (Ditto(lam=3.0, **SETTINGS), {"global": Mean()}),
        (FedProx(mu=3.0, **SETTINGS), {"model": Mean()}),
        (L2GD(p=0.5, **SETTINGS), {"mixed": SoftPull(lam=0.5)}),
        (Moon(mu=3.0, **SETTINGS), {"model": Mean()}),
        (Scaffold(**SETTINGS), Scaffold().components()),
    ],
    ids=lambda one: type(one).__name__ if isinstance(one, Method) else None,
)
def test_the_first_step_reports_what_local_training_does(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, method: Method, mixers: dict[str, Mixer]
) -> None:
    job = make_job(mixers={"local": Identity(), **mixers}, method=method, seed=3)  # round 1 is none of L2GD's heads
    coordinator, runners = begin(job, table_sites, tmp_path)
    for reply in exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined)).values():
        found, local = (reply.header.loss[name] for name in (next(iter(method.deploys)), "local"))
        assert found == pytest.approx(local, abs=1e-6)
