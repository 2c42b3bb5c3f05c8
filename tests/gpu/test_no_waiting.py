# SPDX-License-Identifier: Apache-2.0
"""A step of training never makes the processor wait for the GPU: no number is read from it, nothing is copied back."""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from baselines import begin
from every_method import EVERY, write_both
from medpfl.core.moments import InputMoments
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods import optimizers as ours
from medpfl.methods.batches import Batch
from medpfl.methods.contract import Hospital, Site
from medpfl.methods.fedap.feature_statistics import batch_norm_layers
from medpfl.methods.fedsm.selecting import seen
from medpfl.methods.pfednet.sketches import sketch
from medpfl.privacy.lots import RecordNoise
from medpfl.privacy.noise import Stream
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.tasks import Survival, Tabular
from medpfl.tasks.losses.contract import Loss
from medpfl.tasks.losses.entropy import CrossEntropy, Focal
from medpfl.tasks.losses.marginal import Marginal
from medpfl.tasks.losses.overlap import DiceCE, DiceFocal, Tversky
from medpfl.tasks.losses.regions import RegionDiceCE
from tools import require_gpu, round_of

pytestmark = pytest.mark.slow

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


def elsewhere(runner: SiteRunner, device: str, noise: RecordNoise | None = None) -> Hospital:
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
        noise=noise,
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


@pytest.mark.parametrize("name", ["FedAvg", "Ditto", "SoftPull"])
def test_steps_with_noise_read_nothing_from_their_device(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case's gradient, clipped, and noise that is copied to the device."""
    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_get_fused_kernels_supported_devices", lambda: ["meta"])
    job = Job("small", 2, Settings(rounds=2, references=()), {}, EVERY[name].method(precision="fp32"), Tabular("blood"))
    _, runners = begin(job, sites[False], tmp_path)  # BatchNorm cannot train on single cases
    runner, noise = runners["anna"], RecordNoise(1.0, 1.0, (), Stream("ab" * 32))
    site = Site(elsewhere(runner, "meta", noise), runner.method, 1)
    with CopiesAhead():
        runner.method.local_round(site)
    assert sum(each.steps for each in noise.mechanisms()) > 1
    with pytest.raises(RuntimeError, match="meta"):
        float(site.last_loss)


def test_statistics_of_a_network_read_nothing_from_their_device_until_they_are_told(
    sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    _, runners = begin(EVERY["FedAP"].job(), sites[False], tmp_path)
    site = Site(elsewhere(runners["anna"], "meta"), runners["anna"].method, 1)
    network = next(iter(site.models.values())).eval()
    with InputMoments(batch_norm_layers(network)) as watched, CopiesAhead(), torch.inference_mode():
        for inputs in site.training_inputs(4):
            network(inputs)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        watched.result()


@pytest.mark.parametrize("name", ["moments", "covariance", "labels"])
def test_sketches_of_the_data_are_made_where_the_data_lie(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    _, runners = begin(EVERY["PFedNet"].job(), sites[False], tmp_path)
    runner = runners["anna"]
    expected = sketch(name, runner.rounds.site(runner.method, 1))
    found = sketch(name, Site(elsewhere(runner, "meta"), runner.method, 1))
    assert found and all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


def test_the_selector_s_signatures_read_nothing_from_their_device(
    sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    _, runners = begin(EVERY["FedSM"].job(), sites[EVERY["FedSM"].images], tmp_path)
    site = Site(elsewhere(runners["anna"], "meta"), runners["anna"].method, 1)
    with CopiesAhead():
        found = seen(site, 100)
    assert found.signatures.device.type == "meta" and len(found.signatures) == len(found.places) > 0


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


def test_survival_s_loss_reads_nothing_from_its_device() -> None:
    """Not whether the batch has an event, nor whether times are tied."""
    outputs = torch.zeros(4, 1, device="meta", requires_grad=True)
    with CopiesAhead():
        Survival(dataset="d", horizons=(1.0,)).loss(outputs, torch.zeros(4, 2, device="meta")).backward()
    assert outputs.grad is not None


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
