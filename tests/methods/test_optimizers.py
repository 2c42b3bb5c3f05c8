# SPDX-License-Identifier: Apache-2.0
"""The optimisers step as torch's own do, and load no compiler to do so."""

import subprocess
import sys

import pytest
import torch
from torch import nn

from medpfl.methods.optimizers import Adam, AdamW, Optimizer, Sgd

KINDS: list[tuple[Optimizer, type[torch.optim.Optimizer], dict[str, object]]] = [
    (Adam(betas=(0.8, 0.9), weight_decay=0.1), torch.optim.Adam, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    (AdamW(), torch.optim.AdamW, {"weight_decay": 0.01}),
    (Sgd(), torch.optim.SGD, {}),
    (Sgd(weight_decay=0.1), torch.optim.SGD, {"weight_decay": 0.1}),
    (Sgd(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]


def trained(network: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    inputs = torch.arange(12.0).reshape(4, 3) / 10
    for _ in range(steps):
        optimizer.zero_grad()
        network(inputs).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(("ours", "torchs", "arguments"), KINDS)
def test_steps_and_state_are_torchs_own(
    ours: Optimizer, torchs: type[torch.optim.Optimizer], arguments: dict[str, object]
) -> None:
    networks = []
    for _ in range(2):
        torch.manual_seed(0)
        networks.append(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))
    mine, theirs = networks
    optimizer = ours.build(mine.parameters(), 0.05)
    reference = torchs(theirs.parameters(), lr=0.05, fused=True, **arguments)  # type: ignore[call-arg]
    trained(mine, optimizer, 3)
    trained(theirs, reference, 3)
    again = ours.build(mine.parameters(), 0.05)
    again.load_state_dict(optimizer.state_dict())
    trained(mine, again, 2)
    trained(theirs, reference, 2)
    for name, value in theirs.state_dict().items():
        assert torch.equal(mine.state_dict()[name], value)
    groups = [[{**group, "fused": None} for group in of.state_dict()["param_groups"]] for of in (again, reference)]
    assert groups[0] == groups[1]
    for number, state in reference.state_dict()["state"].items():
        for name, value in state.items():
            mine_there = again.state_dict()["state"][number][name]
            assert torch.equal(mine_there, value) if isinstance(value, torch.Tensor) else mine_there == value


TRAINS = """
import sys
from torch import nn, ones
from medpfl.methods.optimizers import Adam, AdamW, Sgd

for kind in Adam(), AdamW(), Sgd():
    network = nn.Linear(2, 1)
    optimizer = kind.build(network.parameters(), 0.1)
    network(ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
print("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_training_loads_no_compiler() -> None:
    done = subprocess.run([sys.executable, "-c", TRAINS], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


def test_momentum_is_nothing_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where float16 leaves out the first step, the momentum began with whatever was in memory."""
    monkeypatch.setattr(torch, "empty_like", lambda like: torch.full_like(like, float("nan")))
    start, inputs = torch.ones(2, 3), torch.ones(4, 3)
    found = []
    for left_out in (True, False):
        weight = nn.Parameter(start.clone())
        optimizer = Sgd(momentum=0.9).build([weight], 0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if left_out else 1.0)
        for _ in range(2 if left_out else 1):
            weight.grad = None
            scaler.scale((inputs @ weight.T).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update(1.0)
        found.append(weight.detach())
    assert torch.equal(*found) and not torch.equal(found[0], start)


def test_a_part_that_only_a_later_loss_reaches_joins_in_with_momentum() -> None:
    first, later = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = Sgd(momentum=0.9, weight_decay=0.1).build([first, later], 0.1)
    first.sum().backward()
    optimizer.step()
    after_one = first.detach().clone()
    (first + later).sum().backward()
    optimizer.step()
    assert torch.equal(later, after_one) and not torch.equal(first, after_one)
