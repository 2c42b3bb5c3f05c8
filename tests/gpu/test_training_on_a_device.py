# SPDX-License-Identifier: Apache-2.0
"""Every method on a GPU: the processor's results in float32, the same bits again, memory given back, bfloat16."""

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines import assert_resumes, begin
from every_method import EVERY, write_both
from medpfl.core.devices import training_device
from medpfl.methods.optimizers import Adam
from medpfl.models.resnet import ResNet
from medpfl.privacy import DPSGD
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.tasks import Classification
from tools import require_gpu, round_of

QUICK = {"FedAvg", "FedSM"}
"""On the processor the rest tells nothing that the methods' own tests do not."""
EVERYWHERE = pytest.mark.parametrize(
    ("name", "device"),
    [(name, "cpu") for name in sorted(QUICK)] + [pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in EVERY],
    indirect=["device"],
)
FAR = {"KTpFL"}
"""Whose rounds choose among alternatives, so that a difference in the last digit can become a large one."""
CHOSEN = ("mix.weights",)
"""Of Auto: which models predict together. Its own and its tuned one are equal in the first round, where the last digit
decides a tie; nothing is trained differently for it."""


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def trained(name: str, sites: dict[bool, dict[str, Path]], folder: Path, **training: Any) -> dict[str, torch.Tensor]:
    """Every tensor of both hospitals after two rounds, on the CPU."""
    small = EVERY[name]
    coordinator, runners = begin(small.job(**training), sites[small.images], folder)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    for runner in runners.values():
        assert {tensor.device.type for tensor in runner.models.state_dict().values()} == {training_device().type}
    return {
        f"{site} {key}": tensor.cpu().clone()
        for site, runner in runners.items()
        for key, tensor in runner.models.state_dict().items()
    }


@contextmanager
def rounded_otherwise() -> Iterator[None]:
    """The processor as another device: what its layers give differs in the last two bits."""
    generator, functional = torch.Generator().manual_seed(1), torch.nn.functional

    def changed(layer: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*args: Any, **named: Any) -> torch.Tensor:
            outputs = layer(*args, **named)
            return outputs * (1 + (torch.rand(outputs.shape, generator=generator) - 0.5) * 2**-21)

        return run

    with pytest.MonkeyPatch.context() as patch:
        for name in ("linear", "conv2d"):
            patch.setattr(functional, name, changed(getattr(functional, name)))
        yield


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param(name, "cpu", marks=[] if name in QUICK else [pytest.mark.slow]) for name in EVERY]
    + [pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in EVERY],
    indirect=["device"],
)
def test_a_device_gives_what_the_processor_gives(
    name: str, device: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With SGD. Adam's step is lr * m / sqrt(v): the bias before a BatchNorm has no gradient but the rounding's, whose
    sign alone decides then, and moves by up to lr either way."""
    with rounded_otherwise() if device == "cpu" else nullcontext():
        found = trained(name, sites, tmp_path / "device", precision="fp32", optimizer="sgd")
    monkeypatch.setenv("MEDPFL_DEVICE", "cpu")
    expected = trained(name, sites, tmp_path / "cpu", precision="fp32", optimizer="sgd")
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        if tensor.is_floating_point() and name not in FAR and not key.endswith(CHOSEN):
            assert (found[key] - tensor).norm() <= 2e-2 * tensor.norm() + 1e-3, key
        assert found[key].isfinite().all()


@EVERYWHERE
def test_a_run_repeats_itself_on_a_device(
    name: str, device: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    first, second = (trained(name, sites, tmp_path / str(turn)) for turn in (1, 2))
    assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())


@pytest.mark.slow
@EVERYWHERE
def test_a_job_that_was_killed_goes_on_as_if_it_was_not(
    name: str, device: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    small = EVERY[name]
    assert_resumes(lambda: small.job(rounds=3), sites[small.images], tmp_path)


@EVERYWHERE
def test_half_the_digits_train_nearly_alike(
    name: str, device: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    whole = trained(name, sites, tmp_path / "whole", precision="fp32", optimizer="sgd")
    half = trained(name, sites, tmp_path / "half", precision="bf16", optimizer="sgd")
    for key, tensor in half.items():
        assert tensor.isfinite().all(), key
        if tensor.is_floating_point() and name not in FAR and not key.endswith(CHOSEN):
            assert (whole[key] - tensor).norm() <= 0.1 * whole[key].norm() + 0.05, key


@pytest.mark.cuda
@pytest.mark.parametrize(
    ("name", "privacy"), [("FedAvg", DPSGD(noise_multiplier=1e-6)), ("PerFedAvg", None), ("Ditto", None)]
)
def test_images_train_on_a_gpu_whoever_makes_the_gradients(
    name: str,
    privacy: DPSGD | None,
    sites: dict[bool, dict[str, Path]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's fused optimisers take gradients in the order of their weights only."""
    require_gpu()
    monkeypatch.setenv("MEDPFL_NOISE_SEED", "1")
    task = Classification("skin", size=(36, 36), architecture=ResNet(width=8, depth=10, pool=False, norm="instance"))
    found = {}
    for device in ("cuda", "cpu"):
        monkeypatch.setenv("MEDPFL_DEVICE", device)
        job = EVERY[name].job(optimizer=Adam(eps=0.1), precision="fp32", privacy=privacy)
        coordinator, runners = begin(replace(job, task=task), sites[True], tmp_path / device)
        round_of(coordinator, runners, 1)
        found[device] = runners["anna"].models.state_dict()
    for key, tensor in found["cpu"].items():
        torch.testing.assert_close(found["cuda"][key].cpu(), tensor, atol=1e-4, rtol=1e-3)


def living(device: str) -> int:
    """Bytes of the device's tensors: as its allocator counts them, and of the processor of those that Python knows."""
    gc.collect()
    if device == "cuda":
        looks = []
        for _ in range(5):  # torch's thread for the gradients lets the last ones go a moment after their step
            looks.append(torch.cuda.memory_allocated())
            time.sleep(0.01)
        return min(looks)
    storages = {}
    for tensor in (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)):
        assert tensor.grad_fn is None, f"the graph of a step lives on: {tensor.grad_fn}"
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
    return sum(storages.values())


@pytest.mark.parametrize(
    ("name", "device"),
    [pytest.param(name, "cpu", marks=[] if name in QUICK else [pytest.mark.slow]) for name in EVERY if "," not in name]
    + [pytest.param(name, "cuda", marks=pytest.mark.cuda) for name in EVERY],
    indirect=["device"],
)
def test_memory_comes_back_after_every_task_of_a_round(
    name: str, device: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Statistics, validation and training, further exchanges: after two rounds no more lives on than did before them.
    Two, because some methods do every other round something else."""
    found: dict[int, list[int]] = {}
    handle = SiteRunner.handle

    def watched(self: SiteRunner, message: Any) -> Any:
        reply = handle(self, message)
        found.setdefault(message.header.round, []).append(living(device))
        return reply

    small = EVERY[name]
    coordinator, runners = begin(small.job(rounds=6), sites[small.images], tmp_path)
    monkeypatch.setattr(SiteRunner, "handle", watched)
    gc.collect()
    gc.freeze()  # what was there before is not looked at; nor is it from now on: to go through all again takes seconds
    for number in (1, 2, 3, 4, 5):
        round_of(coordinator, runners, number)
    assert max(found[4] + found[5]) <= max(found[2] + found[3]), found


@pytest.mark.cuda
def test_a_gpu_s_memory_comes_back(
    sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_gpu()
    monkeypatch.setenv("MEDPFL_DEVICE", "cuda")
    for name in EVERY:  # once, so that what libraries keep for later is there before
        trained(name, sites, tmp_path / "once" / name)
    gc.collect()
    before = torch.cuda.memory_allocated()
    for name in EVERY:
        trained(name, sites, tmp_path / "again" / name)
        gc.collect()
        assert torch.cuda.memory_allocated() <= before + 2**16, name
