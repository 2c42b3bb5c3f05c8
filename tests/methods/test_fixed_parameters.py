# SPDX-License-Identifier: Apache-2.0
"""What a network itself holds fixed (parameters whose ``requires_grad`` is False) no method moves."""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from every_method import EVERY, PICTURES, write_both
from medpfl import store
from medpfl.core.codecs import STC
from medpfl.core.frozen import training_only
from medpfl.data.samples import SiteData
from medpfl.job import Job
from medpfl.job.codecs import Codecs
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.privacy import ClippedNoise
from medpfl.rounds.simulate import simulate
from medpfl.tasks import Classification
from medpfl.tasks.tabular import Tabular
from tools import NormedTabular, normed, pieces, ready, round_of

VALUE = 0.75
ORDER = torch.arange(20)
USED = torch.tensor([True, False, True])


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


@dataclass(frozen=True)
class Counted(NormedTabular):
    """Among its fixed parameters are whole numbers, and a mask."""

    def network(self, data: SiteData) -> nn.Module:
        network = super().network(data)
        network.register_parameter("order", nn.Parameter(ORDER.clone(), requires_grad=False))
        network.register_parameter("used", nn.Parameter(USED.clone(), requires_grad=False))
        return network


MOVING = ["APFL", "Ditto", "FedAMP", "FedProx", "PFedMe", "Scaffold"]


@pytest.mark.parametrize("name", MOVING)
def test_fixed_whole_numbers_and_masks_stay(sites: dict[bool, dict[str, Path]], tmp_path: Path, name: str) -> None:
    """With a mask those that compute with differences of weights ended with an error of torch's."""
    arguments = {"alpha": 0.1, "alpha_lr": 0.0} if name == "APFL" else {}
    job = replace(EVERY[name].job(**arguments), task=Counted(dataset=normed().dataset, hidden=normed().hidden))
    coordinator, runners = pieces(job, sites[False], tmp_path)
    ready(coordinator, runners)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    for runner in runners.values():
        state = runner.models.state_dict()
        for key, expected in (("order", ORDER), ("used", USED)):
            found = [tensor for name, tensor in state.items() if name.endswith(f".{key}")]
            assert found and all(torch.equal(tensor, expected) for tensor in found)


@dataclass(frozen=True)
class FixedPlain(Tabular):
    """Without BatchNorm, of which ``ClippedNoise`` would not hide the statistics."""

    def network(self, data: SiteData) -> nn.Module:
        return fix(super().network(data))


NOISE = ClippedNoise(clip=1.0, noise_multiplier=0.5, delta=0.001)
LOSSY = Codecs(to_site=STC(p=1.0), from_site=STC(p=1.0))


@pytest.mark.parametrize(("noise", "codecs"), [(NOISE, None), (None, LOSSY)], ids=["noise", "codecs"])
def test_neither_noise_nor_a_codec_moves_fixed_parameters(
    sites: dict[bool, dict[str, Path]], tmp_path: Path, noise: ClippedNoise | None, codecs: Codecs | None
) -> None:
    """Noise made 0.75 of a fixed number 0.1 or 1.5 in two rounds, and STC 0.8."""
    method, task = FedAvg(batch_size=6, steps=2, privacy=noise), FixedPlain(dataset=normed().dataset, hidden=(4,))
    job = Job("small", 2, Settings(rounds=2, references=(), finetune=0), {}, method, task, codecs=codecs)
    simulate(job, sites[False], tmp_path / "results", tmp_path / "home")
    found = store.read(tmp_path / "results" / "slots" / "fedavg.safetensors")[0]
    fixed = {key: float(tensor) for key, tensor in found.items() if key.endswith(".fixed")}
    assert fixed == pytest.approx(dict.fromkeys(fixed, VALUE), abs=1e-6) and len(fixed) == 2


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
