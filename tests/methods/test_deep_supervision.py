# SPDX-License-Identifier: Apache-2.0
"""Methods that do more with a network's outputs than to hand them to the loss train one with deep supervision, too."""

from pathlib import Path

import pytest

from medpfl.core.mixers import Mean, Mixer
from medpfl.demo.phantom import write_phantoms
from medpfl.methods.contract import Method
from medpfl.methods.cusfl import CusFL
from medpfl.methods.moe import MoE
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.models.dynunet import DynUNet
from medpfl.tasks.segmentation import Segmentation
from tools import Make, run


@pytest.fixture(scope="module")
def phantoms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("phantoms")
    return {site: folder / f"{site}.yaml" for site in write_phantoms(folder)[2:]}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [MoE, CusFL, PerFedAvg])
def test_it_trains(kind: type[Method], make_job: Make, phantoms: dict[str, Path], tmp_path: Path) -> None:
    method = kind(steps=2, lr=1e-3, batch_size=8)
    network = DynUNet((2, 4, 4), deep_supervision=True, norm="batch")
    task = Segmentation("organ", size=(16, 16), spacing=(12.0, 12.0, 24.0), architecture=network)
    mixers: dict[str, Mixer] = dict.fromkeys(method.components(), Mean())
    result = run(make_job(rounds=1, mixers=mixers, method=method, task=task), phantoms, tmp_path)
    scores = [line["metrics"]["dice"] for line in result["test"]]
    assert len(scores) == 2 * 2 * len(method.deploys) and all(0 <= score <= 1 for score in scores)
