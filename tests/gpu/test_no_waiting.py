# SPDX-License-Identifier: Apache-2.0
"""A step of training never makes the processor wait for the GPU: no number is read from it, nothing is copied back."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import require_gpu

from baselines import begin
from every_method import EVERY, write_both
from medpfl.methods.batches import Batch
from medpfl.methods.contract import Hospital, Site
from medpfl.rounds.site import SiteRunner
from tools import round_of

SGD = torch.optim.SGD
CHOOSES = {"IFCA": "cluster0"}
"""Whose rounds begin with one look at the losses, before their steps; and what is trained then."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def elsewhere(runner: SiteRunner, device: str) -> Hospital:
    """The hospital with its networks on that device, and no state of optimisers."""
    here = runner.ready
    return Hospital(
        task=here.task,
        data=here.data,
        models=here.models.to(device),
        device=torch.device(device),
        roster=here.roster,
        name=here.name,
        seed=here.seed,
        checkpoints=here.common.checkpoints,
        public=here.common.public,
    )


@pytest.mark.parametrize("name", EVERY)
def test_steps_read_nothing_from_their_device(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device "meta" every operation runs but for its numbers: whatever would wait for a GPU (``item``, ``cpu``,
    a tensor as a condition, indexing by a mask) raises there, and so does a tensor that stayed on the processor."""
    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    monkeypatch.setattr(torch.optim, "SGD", lambda *args, fused, **more: SGD(*args, **more))  # "meta" has no fused one
    small = EVERY[name]
    _, runners = begin(small.job(precision="fp32"), sites[small.images], tmp_path)
    runner = runners["anna"]
    site = Site(elsewhere(runner, "meta"), runner.method, 1)
    if name in CHOOSES:
        site.fit(CHOOSES[name])
    else:
        runner.method.local_round(site)
    assert {tensor.device.type for tensor in site.models.state_dict().values()} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):
        float(site.last_loss)


@pytest.mark.cuda
@pytest.mark.parametrize("name", EVERY)
def test_steps_do_not_wait_for_a_gpu(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch raises where the processor waits, from a batch's arrival until the next one is asked for."""

    require_gpu()
    monkeypatch.setenv("MEDPFL_DEVICE", "cuda")
    training_batches = Site.training_batches

    def watched(self: Site, *args: Any, **named: Any) -> Iterator[Batch]:
        for batch in training_batches(self, *args, **named):
            torch.cuda.set_sync_debug_mode("error")
            try:
                yield batch
            finally:
                torch.cuda.set_sync_debug_mode("default")

    small = EVERY[name]
    coordinator, runners = begin(small.job(), sites[small.images], tmp_path)
    round_of(coordinator, runners, 1)  # what libraries do once
    monkeypatch.setattr(Site, "training_batches", watched)
    round_of(coordinator, runners, 2)
