# SPDX-License-Identifier: Apache-2.0
"""Networks that torch compiles: the same entries, and a warning where torch cannot."""

import copy
from functools import partialmethod
from pathlib import Path

import pytest
import torch

from baselines import begin
from every_method import EVERY
from medpfl.core.errors import ConfigError
from medpfl.models.compiling import compile_in_place, wanted
from medpfl.models.resnet import ResNet
from medpfl.models.split import watched


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(3, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.layer(inputs) * 2)


@pytest.mark.slow
def test_a_network_that_cannot_be_compiled_trains_without(caplog: pytest.LogCaptureFixture) -> None:
    """torch itself says so: here it finds no C++ compiler. Gradients are those of a network that is not compiled."""
    from torch._inductor import config

    network, inputs = Small(), torch.randn(6, 3)
    plain = copy.deepcopy(network)
    plain(inputs).sum().backward()
    compile_in_place(network, "model")
    with config.patch({"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}):
        network(inputs).sum().backward()
    assert "torch cannot compile the network 'model' here, which trains without" in caplog.text
    assert network.layer.weight.grad is not None and plain.layer.weight.grad is not None
    assert torch.equal(network.layer.weight.grad, plain.layer.weight.grad)


@pytest.mark.slow
def test_the_environment_asks_for_it(
    table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEDPFL_COMPILE", "1")
    begin(EVERY["FedAvg"].job(), {name: table_sites[name] for name in ("anna", "berta")}, tmp_path)
    assert "torch does not compile its own containers" in caplog.text


@pytest.mark.slow
def test_compiling_renames_nothing() -> None:
    network = ResNet(width=2, depth=10).build((3, 36, 36), 3)
    keys = list(network.state_dict())
    compile_in_place(network, "model")
    assert list(network.state_dict()) == keys
    assert copy.deepcopy(network)._compiled_call_impl is None


def test_a_container_of_torch_s_own_is_named(caplog: pytest.LogCaptureFixture) -> None:
    compile_in_place(torch.nn.Sequential(torch.nn.Linear(3, 4)), "model")
    assert "cannot compile the network 'model' here, which trains without (torch does not compile" in caplog.text


def test_the_environment_says_0_or_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEDPFL_COMPILE", "yes")
    with pytest.raises(ConfigError, match="MEDPFL_COMPILE must be 0 or 1, got 'yes'"):
        wanted()


@pytest.mark.slow
def test_layers_of_a_compiled_network_can_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps to the hooks that it found when it compiled, so MOON, which first asks for the outputs alone, would
    be told that the head does not run."""
    monkeypatch.setattr(torch.nn.Module, "compile", partialmethod(torch.nn.Module.compile, backend="eager"))
    network, inputs = Small(), torch.randn(6, 3)
    compile_in_place(network, "model")
    expected = network(inputs)
    with watched(network, "layer") as seen:
        found = network(inputs)
    assert torch.equal(found, expected) and len(seen) == 1 and torch.equal(torch.relu(seen[0] * 2), found)
    with watched(network, "layer") as again:
        network(inputs + 1)
    assert len(seen) == 1 and len(again) == 1 and not torch.equal(again[0], seen[0])
    assert torch.equal(network(inputs), expected)
