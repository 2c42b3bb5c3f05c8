# SPDX-License-Identifier: Apache-2.0
"""What a network itself holds fixed (parameters whose ``requires_grad`` is False) no method moves."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from every_method import EVERY, PICTURES, write_both
from medpfl.core.frozen import training_only
from medpfl.data.samples import SiteData
from medpfl.tasks import Classification
from tools import NormedTabular, normed, pieces, ready, round_of

VALUE = 0.75


def fix(network: nn.Module) -> nn.Module:
    """Its first and its last layer multiply what they give by a number that is a fixed parameter."""
    layers = [module for module in network.modules() if isinstance(module, nn.Conv2d | nn.Linear)]
    for layer in (layers[0], layers[-1]):
        layer.register_parameter("fixed", nn.Parameter(torch.tensor(VALUE), requires_grad=False))
        layer.register_forward_hook(lambda module, given, found: found * module.fixed)
    return network


@dataclass(frozen=True)
class FixedTabular(NormedTabular):
    def network(self, data: SiteData) -> nn.Module:
        return fix(super().network(data))


@dataclass(frozen=True)
class FixedPictures(Classification):
    def network(self, data: SiteData) -> nn.Module:
        return fix(super().network(data))


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def as_fixed(images: bool) -> FixedTabular | FixedPictures:
    if images:
        return FixedPictures(PICTURES.dataset, size=PICTURES.size, architecture=PICTURES.architecture)
    return FixedTabular(dataset=normed().dataset, hidden=normed().hidden)


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_fixed_parameters_stay(sites: dict[bool, dict[str, Path]], tmp_path: Path, name: str) -> None:
    small = EVERY[name]
    job = replace(small.job(), task=as_fixed(small.images))
    coordinator, runners = pieces(job, sites[small.images], tmp_path)
    ready(coordinator, runners)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    coordinator.close()
    found = {f"{site}: {k}": t for site, one in runners.items() for k, t in one.models.state_dict().items()}
    fixed = {key: float(tensor) for key, tensor in found.items() if key.endswith(".fixed")}
    assert fixed == pytest.approx(dict.fromkeys(fixed, VALUE), abs=1e-6) and len(fixed) >= 4  # means are rounded


def test_training_only_leaves_flags_as_they_were() -> None:
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    network[0].bias.requires_grad_(False)

    def flags() -> dict[str, bool]:
        return {name: weight.requires_grad for name, weight in network.named_parameters()}

    before = flags()
    with training_only(network, {"0.weight", "0.bias"}):
        assert [name for name, trained in flags().items() if trained] == ["0.weight"]
    assert flags() == before
    with pytest.raises(ZeroDivisionError), training_only(network):
        assert not any(flags().values())
        raise ZeroDivisionError
    assert flags() == before
