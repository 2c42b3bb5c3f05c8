# SPDX-License-Identifier: Apache-2.0
"""Networks that torch compiles: the same entries, and a warning where torch cannot."""

import copy
from pathlib import Path

import pytest
import torch

from baselines import begin
from every_method import Small, write_both
from medpfl.core.errors import ConfigError
from medpfl.methods.fedavg import FedAvg
from medpfl.models.compiling import compile_in_place, wanted
from medpfl.models.resnet import ResNet
from tools import round_of


@pytest.mark.slow
def test_a_network_that_cannot_be_compiled_trains_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """torch itself says so: here it finds no C++ compiler. The rounds are those of networks that were not compiled."""
    from torch._inductor import config

    sites = write_both(tmp_path)[True]
    found = {}
    for asked in ("0", "1"):
        monkeypatch.setenv("MEDPFL_COMPILE", asked)
        with config.patch({"cpp.cxx": ("/nowhere/g++",), "force_disable_caches": True}):
            coordinator, runners = begin(Small(FedAvg, images=True).job(), sites, tmp_path / asked)
            round_of(coordinator, runners, 1)
        found[asked] = runners["anna"].models.state_dict()
    assert "torch cannot compile the network" in caplog.text and "which trains without" in caplog.text
    assert list(found["0"]) == list(found["1"])
    assert all(torch.equal(tensor, found["1"][key]) for key, tensor in found["0"].items())


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
