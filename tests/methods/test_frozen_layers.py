# SPDX-License-Identifier: Apache-2.0
"""Layers that start weights freeze: what is said of them, and what beside their weights must stand still."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from baselines import begin, play
from medpfl import store
from medpfl.core.errors import ConfigError
from medpfl.core.frozen import count_weights
from medpfl.core.mixers import Mean, Mixer
from medpfl.data.samples import SiteData
from medpfl.deployed.model_file import load_deployed
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.start import Start, Started
from medpfl.privacy import DPSGD
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job
from tools import normed, run

SLOTS: dict[str, Mixer] = {"fedavg": Mean()}


class Centred(nn.Module):
    """A layer of somebody's own, which takes away a running mean of what its weights make of the inputs."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.linear(inputs)
        if self.training:
            self.mean.lerp_(outputs.detach().mean(dim=0), 0.1)
        return outputs - self.mean


def first_layers() -> dict[str, nn.Module]:
    torch.manual_seed(3)
    return {
        "running mean": Centred(),
        "spectral": nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4), n_power_iterations=1),
        "older spectral": nn.utils.spectral_norm(nn.Linear(3, 4)),
        "batch norm": nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)),
    }


@pytest.mark.parametrize("kind", list(first_layers()))
def test_what_a_frozen_layer_keeps_beside_its_weights_stands_still(kind: str) -> None:
    """A running mean of a layer of one's own moved in training, at each hospital otherwise, and was never sent."""
    network = nn.Sequential(first_layers()[kind], nn.ReLU(), nn.Linear(4, 1))
    tensors = {key: tensor.detach().clone() for key, tensor in network.state_dict().items()}
    Started(Start("known", frozen=("0",)), tensors).put_into(network)
    inputs = torch.randn(9, 3)
    before = network.eval()(inputs).detach()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.0)
    for _ in range(3):
        network.train()(torch.randn(20, 3) + 1).square().mean().backward()
        optimizer.step()
    after = network.state_dict()
    assert [key for key in tensors if not torch.equal(tensors[key], after[key])] == []
    assert torch.equal(network.eval()(inputs), before)


def declare(sites: dict[str, Path], network: nn.Module) -> None:
    for site, file in sites.items():
        content = {**yaml.safe_load(file.read_text()), "checkpoints": {"known": f"{site}.safetensors"}}
        file.write_text(yaml.safe_dump(content))
        store.save(file.with_name(f"{site}.safetensors"), network.state_dict(), {"kind": "checkpoint"})


def with_norm() -> nn.Module:
    torch.manual_seed(5)
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 1))
    network(torch.randn(20, 3))  # so that its statistics are not those of a new layer
    return network


def method(*frozen: str, **more: Any) -> FedAvg:
    return FedAvg(lr=0.05, batch_size=8, start=Start("known", frozen=frozen), **more)


@pytest.mark.slow
def test_a_model_s_file_and_card_count_frozen_weights(table_sites: dict[str, Path], tmp_path: Path) -> None:
    """They counted what was trained alone, and the same network had as many parameters as layers were left."""
    network = with_norm()
    declare(table_sites, network)
    job = small_job(mixers=dict(SLOTS), method=method("0"), task=normed(), rounds=1)
    run(job, table_sites, tmp_path)
    model = tmp_path / "home" / "anna" / "small" / "models" / "fedavg-last.safetensors"
    count = sum(weights.numel() for weights in network.parameters())
    deployed = load_deployed(model)
    assert deployed.meta.parameters == count == sum(one.numel() for one in deployed.networks.parameters())
    assert f"; {count} parameters" in model.with_suffix(".md").read_text()


def test_shared_frozen_weights_count_once() -> None:
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
    network[1].weight = network[0].weight
    count = count_weights(network)
    tensors = {key: tensor.clone() for key, tensor in network.state_dict().items()}
    Started(Start("known", frozen=("0", "1")), tensors).put_into(network)
    assert count_weights(network) == count == 9 + 3 + 3 + 4


@dataclass(frozen=True)
class Split(Tabular):
    """BatchNorm "0.1" in a block of its own, and group norm after it."""

    def network(self, data: SiteData) -> nn.Module:
        first = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        return nn.Sequential(first, nn.ReLU(), nn.Linear(4, 4), nn.GroupNorm(1, 4), nn.Linear(4, 1))


def test_noise_for_single_cases_goes_with_frozen_batch_norm(table_sites: dict[str, Path], tmp_path: Path) -> None:
    """It was refused: the layer mixed the cases of a batch, or kept statistics of them. Frozen it does neither."""
    task = Split(dataset="blood", hidden=(4,))
    torch.manual_seed(5)
    network = task.network(SiteData({}, [], None))
    declare(table_sites, network)
    noise = {"privacy": DPSGD(noise_multiplier=1.0), "optimizer": "sgd"}
    for number, frozen in enumerate([(), ("0.0",)]):
        job = small_job(mixers=dict(SLOTS), method=method(*frozen, **noise), task=task)
        with pytest.raises(ConfigError, match=r"its layer '0.1' \(BatchNorm1d\) mixes the cases of a batch"):
            begin(job, table_sites, tmp_path / str(number))
    coordinator, runners = begin(
        small_job(mixers=dict(SLOTS), method=method("0", **noise), task=task), table_sites, tmp_path
    )
    sent = play(coordinator, runners, 1)
    assert sorted(sent["anna"]["fedavg"]) == [f"fedavg.{n}.{kind}" for n in (2, 3, 4) for kind in ("bias", "weight")]
    held = runners["anna"].models["fedavg"].state_dict()
    assert all(torch.equal(held[key], tensor) for key, tensor in network.state_dict().items() if key.startswith("0."))
    assert not torch.equal(held["4.weight"], network.state_dict()["4.weight"])
