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
