# SPDX-License-Identifier: Apache-2.0
"""Networks whose last layer is no head: methods that split a network, or look at what enters its head, say so."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer, StatisticsDistance
from medpfl.methods.contract import Method
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedper import FedPer
from medpfl.methods.fedrep import FedRep
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.lg_fedavg import LGFedAvg
from medpfl.methods.moon import Moon
from medpfl.methods.pfednet import PFedNet
from medpfl.models.contract import Architecture
from medpfl.models.extractor import Extractor
from medpfl.models.split import find_body
from medpfl.tasks.tabular import Tabular
from tools import Make, run


class Auxiliary(nn.Module):
    """Its last layer serves something else than its predictions: nothing, or deep supervision, where training compares
    what it gives too (in MONAI's DynUNet it also runs when the network predicts)."""

    def __init__(self, width: int, outputs: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layer, self.head, self.aux = nn.Linear(width, 4), nn.Linear(4, outputs), nn.Linear(4, outputs)

    def forward(self, inputs: Tensor) -> Any:
        found = torch.relu(self.layer(inputs))
        if self.kind == "unused" or (self.kind == "supervised" and not self.training):
            return self.head(found)
        both = [self.head(found), self.aux(found)]
        return both if self.training else both[0]


@dataclass(frozen=True)
class WithAuxiliary(Architecture):
    kind: str = "unused"

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        return Auxiliary(input_shape[0], outputs, self.kind)


HEADED: list[tuple[type[Method], str]] = [
    (FedPer, "head"), (FedRep, "head"), (LGFedAvg, "head"), (PFedNet, "personal"), (Moon, ""), (FedRoD, ""),
]  # fmt: skip


@pytest.mark.parametrize("network", ["unused", "supervised", "always run"])
@pytest.mark.parametrize(("kind", "named"), HEADED)
def test_a_head_through_which_nothing_goes_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: type[Method], named: str, network: str
) -> None:
    """With FedPer the true head was sent and averaged, in silence, where deep supervision trains the last layer."""

    def play(folder: str, method: Method) -> None:
        task = Tabular("blood", architecture=WithAuxiliary(network))
        job = make_job(mixers=dict(method.components()), method=method, task=task, rounds=1)
        run(job, table_sites, tmp_path / folder)

    with pytest.raises(ConfigError, match="the head of the network Auxiliary is taken to be 'aux', which does not run"):
        play("last", kind())
    if named:
        play("named", kind(**{named: ("head",)}))


def test_what_d_fedap_compares_enters_a_head_that_predicts(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    method = FedAP(batch_norm="shared")
    mixers: dict[str, Mixer] = {"model": StatisticsDistance(statistics="head_inputs")}
    job = make_job(mixers=mixers, method=method, task=Tabular("blood", architecture=WithAuxiliary("always run")))
    with pytest.raises(ConfigError, match="the head of the network Auxiliary is taken to be 'aux', which does not run"):
        run(job, table_sites, tmp_path)


class EveryLevel(nn.Module):
    """A U-Net of two levels whose lower one has scores of its own for deep supervision, as MONAI's MedNeXt has them:
    they are computed when it predicts, too, and nothing is made of them."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.down, self.bottom = nn.Conv2d(3, 4, 3, 2, 1), nn.Conv2d(4, 5, 3, padding=1)
        self.lower = nn.Conv2d(5, outputs, 1)
        self.up, self.head = nn.ConvTranspose2d(5, 4, 2, 2), nn.Conv2d(4, outputs, 1)
        self.held: list[Tensor] = []

    def forward(self, inputs: Tensor) -> Any:
        deepest = self.bottom(self.down(inputs))
        smaller = self.lower(deepest)
        self.held = [smaller]  # as MONAI's DynUNet does
        found = self.head(self.up(deepest))
        return [found, smaller] if self.training else found


@pytest.mark.parametrize("first", [False, True])
def test_a_body_does_not_end_in_scores_of_which_nothing_is_made(first: bool) -> None:
    """CusFL's extractor ended in them: its features were a few scores, and it sent a layer that gives scores."""
    network = EveryLevel(2)
    with torch.no_grad():
        assert find_body(network, (3, 8, 8), first=first) == "bottom"
    assert network.training and all(weight.grad is None for weight in network.parameters())
    names = Extractor(network, find_body(network, (3, 8, 8), first=True), (3, 8, 8)).state_dict()
    assert {name.split(".")[1] for name in names} == {"down", "bottom"}
