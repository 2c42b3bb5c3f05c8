# SPDX-License-Identifier: Apache-2.0
"""Networks of other packages whose state is not what their tensors are: nobody could copy a model into them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baselines import begin
from medpfl.core.errors import ConfigError
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.ifca import IFCA
from medpfl.methods.scaffold import Scaffold
from medpfl.models.contract import Architecture
from medpfl.tasks.tabular import Tabular
from tools import Make


class Counting(nn.Module):
    """It counts its batches in what torch calls extra state."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(width, outputs), 0

    def get_extra_state(self) -> Tensor:
        return torch.tensor(self.calls)

    def set_extra_state(self, state: Tensor) -> None:
        self.calls = int(state)

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.layer(inputs)
        return found


class Told(Counting):
    def get_extra_state(self) -> Any:
        return {"calls": self.calls}


@dataclass(frozen=True)
class Odd(Architecture):
    kind: str

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        made: dict[str, Callable[[], nn.Module]] = {
            "counting": lambda: Counting(input_shape[0], outputs),
            "told": lambda: Told(input_shape[0], outputs),
            "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(outputs)),
        }
        return made[self.kind]()


EXTRA = "_extra_state' in the network's state is no parameter or buffer of the network, so it could neither travel nor"
LAZY = r"weight' is known only when the network first runs \(its layer is one of torch's lazy ones\): build"
REFUSED = {"counting": EXTRA, "told": EXTRA, "lazy": LAZY}


@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), IFCA(clusters=1)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("kind", REFUSED)
def test_state_that_is_no_tensor_of_the_network_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: str, method: Any
) -> None:
    task = Tabular("blood", architecture=Odd(kind))
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        begin(make_job(mixers=dict(method.components()), method=method, task=task), table_sites, tmp_path)
