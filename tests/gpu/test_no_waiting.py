# SPDX-License-Identifier: Apache-2.0
"""A step of training never makes the processor wait for the GPU: no number is read from it, nothing is copied back."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import require_gpu
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baselines import begin
from every_method import EVERY, write_both
from medpfl.methods import optimizers as ours
from medpfl.methods.batches import Batch
from medpfl.methods.contract import Hospital, Site
from medpfl.rounds.site import SiteRunner
from medpfl.tasks.losses.contract import Loss
from medpfl.tasks.losses.entropy import CrossEntropy, Focal
from medpfl.tasks.losses.marginal import Marginal
from medpfl.tasks.losses.overlap import DiceCE, DiceFocal, Tversky
from medpfl.tasks.losses.regions import RegionDiceCE
from tools import round_of

SGD = torch.optim.SGD
CHOOSES = {"IFCA": "cluster0"}
"""Whose rounds begin with one look at the losses, before their steps; and what is trained then."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


class CopiesAhead(TorchFunctionMode):
    """Refuses what copies from memory that is not locked, for which the processor waits: a tensor made of numbers on
    the device, and an index that lies on the processor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func is torch.tensor:
            assert str(named.get("device", "cpu")) == "cpu", "made of numbers on the device"
        if func is Tensor.__getitem__ and args[0].device.type != "cpu":
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            assert not any(isinstance(part, list) for part in parts), "indexed by a list"
            tensors = [part for part in parts if isinstance(part, Tensor)]
            assert all(part.device.type != "cpu" for part in tensors), "indexed from the processor"
        return func(*args, **named)


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
    monkeypatch.setattr(ours, "_EagerSgd", lambda *args, fused, **more: SGD(*args, **more))  # "meta" has no fused one
    small = EVERY[name]
    _, runners = begin(small.job(precision="fp32"), sites[small.images], tmp_path)
    runner = runners["anna"]
    site = Site(elsewhere(runner, "meta"), runner.method, 1)
    with CopiesAhead():
        if name in CHOOSES:
            site.fit(CHOOSES[name])
        else:
            runner.method.local_round(site)
    assert {tensor.device.type for tensor in site.models.state_dict().values()} == {"meta"}
    with pytest.raises(RuntimeError, match="meta"):
        float(site.last_loss)


@pytest.mark.parametrize(
    ("loss", "outputs"),
    [
        *(
            (loss, outputs)
            for loss in (CrossEntropy(), Focal(), DiceCE(), DiceFocal(), Tversky())
            for outputs in (1, 3)
        ),
        (CrossEntropy((1.0, 2.0, 3.0)), 3),
        (Marginal(DiceCE(), (2,)), 3),
        (RegionDiceCE(((1, 2), (2,))), 2),
    ],
)
def test_losses_read_nothing_from_their_device(loss: Loss, outputs: int) -> None:
    network = torch.zeros(2, outputs, 8, 8, device="meta", requires_grad=True)
    with CopiesAhead():
        loss(network, torch.zeros(2, 8, 8, dtype=torch.uint8, device="meta")).backward()
    assert network.grad is not None


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
