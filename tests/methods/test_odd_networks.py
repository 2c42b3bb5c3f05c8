# SPDX-License-Identifier: Apache-2.0
"""Networks of other packages: what they keep outside their tensors."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from baselines import begin
from medpfl.core.errors import ConfigError
from medpfl.core.groups import check_entries
from medpfl.deployed.model_file import predicting
from medpfl.methods.cusfl import CusFL
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedbn import FedBN
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.ifca import IFCA
from medpfl.methods.moon import Moon
from medpfl.methods.scaffold import Scaffold
from medpfl.models.contract import Architecture
from medpfl.models.extractor import Extractor
from medpfl.models.split import output_shape
from medpfl.rounds.simulate import simulate
from medpfl.tasks.tabular import Tabular
from tools import Make, assert_same, run


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


class Holding(nn.Module):
    """It holds a constant in a buffer."""

    def __init__(self, width: int, outputs: int, constant: Tensor) -> None:
        super().__init__()
        self.layer = nn.Linear(width, outputs)
        self.register_buffer("constant", constant)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layer(inputs)
        return found


class Aliased(nn.Module):
    """Two of its layers have their weights in one place in memory, by two parameters: where one was private and the
    other not, what was private left with the other, and was overwritten by what came back."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.again, self.head = nn.Linear(width, width), nn.Linear(width, width), nn.Linear(width, outputs)
        self.again.weight = nn.Parameter(self.layer.weight)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(torch.relu(self.again(torch.relu(self.layer(inputs)))))
        return found


@dataclass(frozen=True)
class Odd(Architecture):
    kind: str

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        made: dict[str, Callable[[], nn.Module]] = {
            "counting": lambda: Counting(input_shape[0], outputs),
            "told": lambda: Told(input_shape[0], outputs),
            "moving": lambda: Moving(input_shape[0], outputs, moves=True),
            "still": lambda: Moving(input_shape[0], outputs, moves=False),
            "spread": lambda: Spread(input_shape[0], outputs),
            "repeated": lambda: Holding(input_shape[0], outputs, torch.ones(1).expand(4)),
            "sparse": lambda: Holding(input_shape[0], outputs, torch.eye(4).to_sparse()),
            "aliased": lambda: Aliased(input_shape[0], outputs),
            "lazy": lambda: nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(outputs)),
        }
        return made[self.kind]()


EXTRA = "_extra_state' in the network's state is no parameter or buffer of the network, so it could neither travel nor"
LAZY = r"weight' is known only when the network first runs \(its layer is one of torch's lazy ones\): build"
REPEATED = r"several values of '.*constant' in the network's state lie at one place in memory \(expand\)"
SPARSE = "constant' in the network is a sparse tensor, which can neither travel nor be kept"
ALIASED = "again.weight' in the network lies in the memory of '.*layer.weight' and is another tensor, so that each"
REFUSED = {"aliased": ALIASED, "counting": EXTRA, "told": EXTRA, "lazy": LAZY, "repeated": REPEATED, "sparse": SPARSE}


@pytest.mark.parametrize("method", [FedAvg(), Scaffold(), IFCA(clusters=1)], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("kind", REFUSED)
def test_state_that_is_no_tensor_of_the_network_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: str, method: Any
) -> None:
    task = Tabular("blood", architecture=Odd(kind))
    with pytest.raises(ConfigError, match=REFUSED[kind]):
        begin(make_job(mixers=dict(method.components()), method=method, task=task), table_sites, tmp_path)


class Spread(nn.Module):
    """Several positions a case, of which a BatchNorm layer keeps no statistics."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(width, 8), nn.BatchNorm1d(4, track_running_stats=False)
        self.head = nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(self.norm(self.layer(inputs).reshape(-1, 4, 2)).flatten(1))
        return found


def test_what_depends_on_the_cases_beside_it_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The table's score was of all test cases together, and ``medpfl predict`` said something else of each."""
    method, task = FedAvg(), Tabular("blood", architecture=Odd("spread"))
    with pytest.raises(ConfigError, match="BatchNorm layer 'norm' of the network Spread keeps no running statistics"):
        begin(make_job(mixers=dict(method.components()), method=method, task=task), table_sites, tmp_path)


class Moving(nn.Module):
    """It subtracts the mean of what it has seen, which it holds outside its state."""

    def __init__(self, width: int, outputs: int, moves: bool) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs)
        self.moves = moves
        self.register_buffer("mean", torch.zeros(4), persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.norm(self.layer(inputs))
        mean = self.get_buffer("mean")
        if self.training and self.moves:
            mean.mul_(0.9).add_(0.1 * found.detach().mean(dim=0) + 0.1)
        elif not self.moves and not bool(mean.any()):
            mean.add_(0.25)
        answer: Tensor = self.head(found - mean)
        return answer


@pytest.mark.parametrize("method", [FedAvg(), FedBN()], ids=lambda one: type(one).__name__)
def test_what_training_moves_outside_the_state_is_refused(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, method: Any
) -> None:
    """Deployed models predicted without it, otherwise than they were scored. A constant may be there."""

    def play(kind: str) -> None:
        task = Tabular("blood", architecture=Odd(kind))
        run(make_job(mixers=dict(method.components()), method=method, task=task), table_sites, tmp_path / kind)

    play("still")
    with pytest.raises(ConfigError, match=r"training changes '\w+\.mean', a buffer that is not in the network's state"):
        play("moving")


class Remembering(nn.Module):
    """It computes a constant when it first runs, and keeps it, as rotary embeddings of transformers do."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.norm, self.head = nn.Linear(width, 4), nn.BatchNorm1d(4), nn.Linear(4, outputs)
        self.scale: Tensor | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = torch.linspace(0.5, 1.5, 4)
        found: Tensor = self.head(self.norm(self.layer(inputs)) * self.scale)
        return found


@dataclass(frozen=True)
class Remembers(Architecture):
    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        return Remembering(input_shape[0], outputs)


@pytest.mark.parametrize("method", [FedAvg(), FedAP(), IFCA()], ids=lambda one: type(one).__name__)
def test_a_network_may_first_run_where_it_is_not_trained(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, method: Any
) -> None:
    """In statistics, in a choice between networks, or in validation where a run goes on."""
    job = make_job(
        mixers=dict(method.components()), method=method, task=Tabular("blood", architecture=Remembers()), rounds=2
    )
    whole = run(job, table_sites, tmp_path / "whole")
    simulate(job, table_sites, tmp_path / "cut" / "results", tmp_path / "cut" / "home", stop_after=1)
    assert_same(run(job, table_sites, tmp_path / "cut"), whole)


class Uncertain(nn.Module):
    """Its dropout is never off, as where several answers to a case are to say how sure a network is."""

    def __init__(self, width: int, outputs: int) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(width, 8), nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.head(nn.functional.dropout(torch.tanh(self.layer(inputs)), 0.5, training=True))
        return found


@dataclass(frozen=True)
class Doubts(Architecture):
    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        return Uncertain(input_shape[0], outputs)


def test_a_network_that_draws_in_evaluation_is_scored_the_same_by_a_run_that_goes_on(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Its scores, and with them the best round, went by what had been drawn in the process before."""
    method, task = FedAvg(), Tabular("blood", architecture=Doubts())
    job = make_job(mixers=dict(method.components()), method=method, task=task, rounds=2)
    whole = run(job, table_sites, tmp_path / "whole")
    simulate(job, table_sites, tmp_path / "cut" / "results", tmp_path / "cut" / "home", stop_after=1)
    assert_same(run(job, table_sites, tmp_path / "cut"), whole)


class Telling(nn.Module):
    """What it gives is no tensor of two axes, or of another number of outputs."""

    def __init__(self, width: int, outputs: int, kind: str) -> None:
        super().__init__()
        self.layer, self.head, self.kind = nn.Linear(width, 4), nn.Linear(4, 5 if kind == "five" else outputs), kind

    def forward(self, inputs: Tensor) -> Any:
        found: Tensor = self.head(torch.relu(self.layer(inputs)))
        return {"dict": {"logits": found}, "list": [found], "flat": found[:, 0], "five": found}[self.kind]


@dataclass(frozen=True)
class Tells(Architecture):
    kind: str

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        return Telling(input_shape[0], outputs, self.kind)


GIVES = "a network must give a tensor, batch x outputs x ..., and this one gives a "
TOLD = {
    "dict": f"{GIVES}dict; in",
    "list": f"{GIVES}list",
    "flat": rf"{GIVES}tensor of the shape \[8\]; in",
    "five": "5 o",
}


@pytest.mark.parametrize("kind", TOLD)
def test_what_gives_something_else_is_told_so(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """They ended with Python's errors, and with too many outputs at the end of the job, as a damaged file."""
    task, method = Tabular("blood", architecture=Tells(kind)), FedAvg(batch_size=8)
    with pytest.raises(ConfigError, match=TOLD[kind]):
        run(make_job(mixers=dict(method.components()), method=method, task=task), table_sites, tmp_path)


@dataclass(frozen=True)
class NormalisedOfOld(Architecture):
    """As many TCNs have it: torch's layers keep the weight beside their parameters."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        layers = [nn.Linear(input_shape[0], 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, outputs)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return nn.Sequential(*(nn.utils.weight_norm(one) if isinstance(one, nn.Linear) else one for one in layers))


COPYING = [FedAP(), Moon(), CusFL(split="2", projection=3)]


@pytest.mark.parametrize("method", COPYING, ids=lambda one: type(one).__name__)
def test_a_network_whose_weights_are_computed_can_be_copied(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, method: Any
) -> None:
    task = Tabular("blood", architecture=NormalisedOfOld())
    run(make_job(mixers=dict(method.components()), method=method, task=task, rounds=1), table_sites, tmp_path)


@dataclass(frozen=True)
class Normalised(Architecture):
    spectral: bool

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        normalised = spectral_norm if self.spectral else weight_norm
        return nn.Sequential(nn.Linear(input_shape[0], 4), nn.ReLU(), normalised(nn.Linear(4, outputs)))


@pytest.mark.parametrize("network", [Normalised(True), Normalised(False), NormalisedOfOld()], ids=str)
def test_fedrod_refuses_a_head_that_cannot_be_zero(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, network: Architecture
) -> None:
    """Its own one became NaN."""
    task, method = Tabular("blood", architecture=network), FedRoD()
    with pytest.raises(ConfigError, match="with zero, which the weights of its last layer cannot be: they are normal"):
        begin(make_job(mixers=dict(method.components()), method=method, task=task), table_sites, tmp_path)


def test_a_network_whose_parts_are_looked_for_can_be_trained() -> None:
    network = Remembering(3, 2)
    assert output_shape(network, (3,)) == (2,)
    network(torch.ones(4, 3)).sum().backward()
    network = Remembering(3, 2)
    assert list(predicting(FedAvg(), "fedavg", nn.ModuleDict({"fedavg": network}), (3,))) == ["fedavg"]
    network(torch.ones(4, 3)).sum().backward()
    parts = Extractor(Remembering(3, 2), "norm", (3,))
    parts(torch.ones(4, 3)).sum().backward()


def test_entries_may_lie_side_by_side_in_memory() -> None:
    """As the weights of recurrent layers do on a GPU; or between each other."""
    memory = torch.arange(12.0)
    network = nn.Linear(2, 2)
    network.register_buffer("first", memory[:4].view(2, 2).t())
    network.register_buffer("even", memory[4::2])
    network.register_buffer("odd", memory[5::2])
    check_entries(network)
    network.register_buffer("late", memory[9:10].view(torch.uint8)[:2])
    with pytest.raises(ConfigError, match="'late' in the network lies in the memory of 'odd'"):
        check_entries(network)
