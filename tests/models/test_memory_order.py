# SPDX-License-Identifier: Apache-2.0
"""Networks that hold images channels last: no memory is damaged on processors without AVX-512, no result is another."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baselines import begin, held
from every_method import EVERY, write_both
from medpfl.methods.optimizers import Adam
from medpfl.models.memory_order import channels_last, unsafe
from medpfl.models.resnet import ResNet
from medpfl.privacy import DPSGD
from medpfl.tasks import Classification
from tools import round_of

# Under glibc's heap checker: before the rule, oneDNN's AVX2 kernels ended this process in nearly all of the cases.
WORST = """
import torch
from medpfl.models.memory_order import channels_last
torch.set_num_threads(1)
for entering in range(1, 10):
    for leaving in (2, 8, 20):
        for length in (8, 16):
            layer = channels_last(torch.nn.Sequential(torch.nn.Conv2d(entering, leaving, 1, stride=2, bias=False)))
            images = torch.randn(2, entering, length, length)
            for _ in range(5):
                mine = images.clone().requires_grad_()
                layer(mine).sum().backward()
                assert (mine.grad[:, :, 1::2] == 0).all()
print("whole")
"""


@pytest.mark.slow
def test_strided_convolutions_of_few_channels_leave_memory_whole() -> None:
    checked = {"ONEDNN_MAX_CPU_ISA": "AVX2", "LD_PRELOAD": "libc_malloc_debug.so.0", "MALLOC_CHECK_": "3"}
    done = subprocess.run([sys.executable, "-c", WORST], env={**os.environ, **checked}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "whole\n"), done.stderr[-500:]


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (torch.nn.Conv2d(4, 8, 1, stride=2), True),
        (torch.nn.Conv2d(7, 8, (1, 3), stride=(2, 1)), True),
        (torch.nn.Conv2d(8, 8, 1, stride=2), False),
        (torch.nn.Conv2d(4, 8, 1), False),
        (torch.nn.Conv2d(4, 8, 3, stride=2), False),
        (torch.nn.ConvTranspose2d(4, 8, 1, stride=2), False),
        (torch.nn.Linear(4, 8), False),
    ],
)
def test_which_layers_are_unsafe(layer: torch.nn.Module, expected: bool) -> None:
    assert unsafe(layer) is expected


def test_only_unsafe_layers_get_their_images_in_the_plain_order() -> None:
    seen = {}
    network = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.Conv2d(4, 8, 1, stride=2))
    network.append(torch.nn.Conv2d(8, 8, 1))
    for name, module in channels_last(network).named_children():
        module.register_forward_pre_hook(
            lambda _, args, name=name: seen.update({name: args[0].is_contiguous(memory_format=torch.channels_last)})
        )
    network(torch.randn(2, 3, 8, 8))
    assert seen == {"0": True, "1": False, "2": False}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_both(tmp_path_factory.mktemp("sites"))[True]


PLAIN = Classification("skin", size=(36, 36), architecture=ResNet(width=8, depth=10, pool=False, norm="instance"))
"""Its convolutions are wider than a position; and single cases can train it, as record-level privacy has it."""


NOISED = DPSGD(noise_multiplier=0.01)


@pytest.mark.parametrize(
    ("name", "privacy"),
    [("FedAvg", None), ("FedAvg", NOISED), ("Ditto", NOISED), ("PerFedAvg", None), ("PerFedAvg, Hessian-free", None)],
)
def test_the_order_changes_no_result(
    name: str, privacy: DPSGD | None, sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gradients that torch does not gather itself come in the order of the images, and torch's fused optimisers take
    a gradient for one in the order of its weight: on a processor in silence, each entry of another weight."""
    monkeypatch.setenv("MEDPFL_NOISE_SEED", "1")
    found = []
    for order in ("last", "plain"):
        if order == "plain":
            monkeypatch.setattr("medpfl.models.resnet.channels_last", lambda network: network)
        job = replace(EVERY[name].job(optimizer=Adam(eps=0.1), precision="fp32", privacy=privacy), task=PLAIN)
        coordinator, runners = begin(job, sites, tmp_path / order)
        round_of(coordinator, runners, 1)
        found.append(held(runners["anna"], "global" if name == "Ditto" else next(iter(runners["anna"].models))))
    last, plain = found
    for key, tensor in plain.items():
        torch.testing.assert_close(last[key], tensor, atol=2e-6, rtol=1e-5, msg=lambda said, key=key: f"{key}: {said}")
