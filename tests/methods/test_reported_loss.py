# SPDX-License-Identifier: Apache-2.0
"""The training loss that hospitals report is the task's, so that the methods' curves can be compared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baselines import begin
from every_method import EVERY, PICTURES, with_images
from hospitals import change_yaml
from medpfl.core.mixers import Identity, Mean, Mixer, SoftPull
from medpfl.data.site_file import load_site_file
from medpfl.methods.contract import Method
from medpfl.methods.ditto import Ditto
from medpfl.methods.fedprox import FedProx
from medpfl.methods.l2gd import L2GD
from medpfl.methods.moon import Moon
from medpfl.methods.scaffold import Scaffold
from small_jobs import for_few
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


def test_mh_pflid_s_loss_is_of_the_cases_of_its_injection(tmp_path: Path) -> None:
    """Its last batch decides whether so few cases may be told of, not that of the distillation, which comes after."""
    file = for_few(with_images(tmp_path / "anna", 24))
    change_yaml(file, lambda content: content["policy"].update(least_scored=3, least_hospitals=1))
    count = len(PICTURES.load(load_site_file(file, "anna")).splits["train"])
    training = {"steps": 2, "epochs": 2, "batch_size": count - 2}
    job = replace(EVERY["MHpFLID"].job(**training), min_clients=1)
    coordinator, runners = begin(job, {"anna": file}, tmp_path)
    reply = exchange(runners, coordinator.rounds.train_messages(1, ["anna"]))["anna"]
    assert reply.header.loss == {"personal": None}
