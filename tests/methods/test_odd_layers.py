# SPDX-License-Identifier: Apache-2.0
"""Networks whose layers are shared, run several times, are called by keyword, or hold other numbers than float32."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baselines import begin
from every_method import EVERY, write_both
from medpfl.core.errors import ConfigError
from medpfl.core.moments import InputMoments
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.methods.cusfl import CusFL
from medpfl.methods.dsfl import DSFL
from medpfl.methods.fedap import FedAP
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.moe import MoE
from medpfl.methods.moon import Moon
from medpfl.methods.pfednet import PFedNet
from medpfl.models.contract import Architecture
from medpfl.models.extractor import Extractor
from medpfl.models.split import watched
from medpfl.rounds.simulate import simulate
from medpfl.tasks import Classification
from tools import pieces, ready, round_of

INPUTS = torch.linspace(-1, 1, 2 * 3 * 9 * 7).reshape(2, 3, 9, 7)


class Net(nn.Module):
    """Convolution, BatchNorm, ReLU, mean over the positions, linear."""

    def __init__(self, channels: int, outputs: int, affine: bool = True) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 4, 3, padding=1)
        self.norm: nn.Module = nn.BatchNorm2d(4, affine=affine)
        self.head = nn.Linear(4, outputs)

    def features(self, inputs: Tensor) -> Tensor:
        return torch.relu(self.norm(self.first(inputs)))

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.features(inputs).mean((2, 3)))


class ByKeyword(Net):
    def forward(self, inputs: Tensor) -> Any:
        return self.head(input=torch.relu(self.norm(input=self.first(inputs))).mean((2, 3)))


class Pooled(Net):
    """What it gives is the mean of the maps of its last layer, a convolution."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs)
        self.head = nn.Conv2d(4, outputs, 1)

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.features(inputs)).mean((2, 3))


class Repeated(Net):
    """Its middle runs three times."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs)
        self.norm, self.middle = nn.Identity(), nn.Conv2d(4, 4, 3, padding=1)  # nothing tells training from evaluation
        self.head = nn.Linear(4, outputs)

    def forward(self, inputs: Tensor) -> Any:
        found = self.features(inputs)
        for _ in range(3):
            found = self.middle(found)
        return self.head(found.mean((2, 3)))


class InPlace(Repeated):
    """An activation writes into what its middle gives."""

    def forward(self, inputs: Tensor) -> Any:
        return self.head(self.middle(self.features(inputs)).relu_().mean((2, 3)))


class OneActivation(nn.Module):
    """The same activation after every layer, as in EfficientNet and in many networks of one's own."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, 4, 3, 2, 1), nn.Conv2d(4, 8, 3, 2, 1)
        self.activation, self.head = nn.ReLU(), nn.Linear(8, outputs)

    def forward(self, inputs: Tensor) -> Any:
        found = self.activation(self.second(self.activation(self.first(inputs))))
        return self.head(found.mean((2, 3)))


class Shared(nn.Module):
    """One convolution is in two of its parts."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__()
        shared = nn.Conv2d(channels, channels, 3, padding=1)
        self.one = nn.Sequential(shared, nn.ReLU())
        self.other = nn.ModuleList([shared, nn.Conv2d(channels, 4, 1), nn.Conv2d(4, 4, 1)])
        self.head = nn.Linear(4, outputs)

    def forward(self, inputs: Tensor) -> Any:
        found = self.one(inputs)
        for layer in self.other:
            found = layer(found)
        return self.head(found.mean((2, 3)))


class Typed(Net):
    """It computes in another type than float32."""

    def __init__(self, channels: int, outputs: int, kind: torch.dtype) -> None:
        super().__init__(channels, outputs)
        self.kind = kind
        self.to(kind)

    def forward(self, inputs: Tensor) -> Any:
        return super().forward(inputs.to(self.kind))


class Turned(Net):
    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs)
        self.phase = nn.Parameter(torch.ones(4, 1, 1, dtype=torch.complex64))
        self.register_buffer("constant", torch.ones(4, 1, 1, dtype=torch.complex64), persistent=False)

    def features(self, inputs: Tensor) -> Tensor:
        return torch.real(super().features(inputs) * self.phase * self.get_buffer("constant"))


class Constant(Turned):
    """A constant outside the state may be complex, as those of rotary embeddings are."""

    def __init__(self, channels: int, outputs: int) -> None:
        super().__init__(channels, outputs)
        self.phase = nn.Parameter(torch.ones(4, 1, 1))


class Telling(Net):
    """What it gives is no tensor, when it is trained or always."""

    def __init__(self, channels: int, outputs: int, always: bool) -> None:
        super().__init__(channels, outputs)
        self.always = always

    def forward(self, inputs: Tensor) -> Any:
        found = super().forward(inputs)
        return {"logits": found} if self.always else (found, found) if self.training else found


MADE: dict[str, Callable[[int, int], nn.Module]] = {
    "by keyword": ByKeyword,
    "pooled": Pooled,
    "repeated": Repeated,
    "in place": InPlace,
    "one activation": OneActivation,
    "complex": Turned,
    "complex constant": Constant,
    "float64": lambda channels, outputs: Typed(channels, outputs, torch.float64),
    "float16": lambda channels, outputs: Typed(channels, outputs, torch.float16),
    "bfloat16": lambda channels, outputs: Typed(channels, outputs, torch.bfloat16),
    "not affine": lambda channels, outputs: Net(channels, outputs, affine=False),
    "dict": lambda channels, outputs: Telling(channels, outputs, always=True),
    "tuple": lambda channels, outputs: Telling(channels, outputs, always=False),
}


@dataclass(frozen=True)
class Odd(Architecture):
    kind: str

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        return MADE[self.kind](input_shape[0], outputs)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_both(tmp_path_factory.mktemp("sites"))[True]


def job_of(method: Method, kind: str, size: int = 12) -> Job:
    task = Classification("skin", size=(size, size), architecture=Odd(kind))
    return Job("odd", 2, Settings(rounds=2, references=(), finetune=0), {}, method, task)


def play(method: Method, kind: str, sites: dict[str, Path], folder: Path, size: int = 12) -> None:
    simulate(job_of(method, kind, size), sites, folder / "results", folder / "home")


def small(kind: type[Method], **args: Any) -> Method:
    return kind(batch_size=6, lr=0.01, **args)


@pytest.mark.parametrize("kind", ["repeated", "in place"])
def test_cusfls_teacher_and_pupil_are_compared_after_the_same_pass_of_a_layer(
    sites: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """The teacher's features were those of the layer's first pass, and the pupil's those of its last; or the teacher's
    those before an activation in place, and the pupil's those after it."""
    method = small(CusFL, split="middle", projection=None, optimizer="sgd", steps=1)
    coordinator, runners = pieces(job_of(method, kind), sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    coordinator.close()
    found = {site: float(runner.models["alignment"].get_buffer("loss")) for site, runner in runners.items()}
    assert found == pytest.approx(dict.fromkeys(sites, 0.0), abs=1e-6)  # they are the same network still


def test_where_cusfl_splits_a_network_with_one_activation(sites: dict[str, Path], tmp_path: Path) -> None:
    """After the activation, the last module to give the smallest map; it first runs after the first layer, and there
    the teacher ended: it taught nothing of the rest of the network, in silence."""
    coordinator, runners = pieces(job_of(small(CusFL), "one activation"), sites, tmp_path)
    ready(coordinator, runners)
    coordinator.close()
    held = next(iter(runners.values())).models["federated"].state_dict()
    assert {key.split(".")[2] for key in held if key.startswith("extractor.")} == {"first", "second"}


@pytest.mark.parametrize("path", ["one", "other.1", "other.2"])
def test_an_extractor_keeps_a_layer_that_has_two_places(path: str) -> None:
    """In the second of them there was nothing, and its features were others than the network's, in silence."""
    torch.manual_seed(0)
    network = Shared(3, 2).eval()
    extractor = Extractor(network, path, (3, 9, 7)).eval()
    with watched(network, path) as seen:
        network(INPUTS)
    assert torch.equal(extractor(INPUTS), seen[0])


def test_a_layer_of_the_head_that_has_two_names_does_not_keep_a_network_from_being_split() -> None:
    class Twins(Net):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.again = self.head

        def forward(self, inputs: Tensor) -> Any:
            return self.again(self.head(self.features(inputs).mean((2, 3))))

    assert not [key for key in Extractor(Twins(), "norm", (3, 9, 7)).state_dict() if "head" in key or "again" in key]


@pytest.mark.parametrize("kind", ["float64", "float16"])
@pytest.mark.parametrize("method", [small(CusFL, split="norm"), small(MHpFLID, epochs=1, bodies={"default": "norm"})])
def test_a_teacher_learns_of_a_network_that_computes_in_another_type(
    sites: dict[str, Path], tmp_path: Path, method: Method, kind: str
) -> None:
    play(method, kind, sites, tmp_path, size=36)


@pytest.mark.parametrize("method", [small(FedRoD), small(Moon), small(FedAP)], ids=lambda method: type(method).__name__)
def test_layers_may_be_called_by_the_name_of_their_argument(
    sites: dict[str, Path], tmp_path: Path, method: Method
) -> None:
    play(method, "by keyword", sites, tmp_path)


def test_what_enters_a_layer_is_watched_however_it_is_called() -> None:
    found = []
    for kind in (Net, ByKeyword):
        torch.manual_seed(0)
        network = kind(3, 2).eval()
        with InputMoments({"norm": network.norm, "head": network.head}) as watching:
            network(INPUTS)
        found.append(watching.result())
    assert found[0].keys() == found[1].keys() and all(torch.equal(one, found[1][key]) for key, one in found[0].items())


def test_fedrod_refuses_a_head_of_whose_outputs_the_network_makes_others(
    sites: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(
        ConfigError, match=r"Pooled, 'head', gives \[3, 12, 12\] of a case where the network gives \[3\]"
    ):
        play(small(FedRoD), "pooled", sites, tmp_path)


@pytest.mark.parametrize("kind", [FedAvg, DSFL])
def test_complex_numbers_are_refused(sites: dict[str, Path], tmp_path: Path, kind: type[Method]) -> None:
    """A network that does not travel was trained with them, or ended with an error of torch's; a constant outside the
    state may hold some."""
    args = EVERY["DSFL"].args if kind is DSFL else {}
    with pytest.raises(ConfigError, match="phase' in the network holds complex numbers, which can neither be mixed"):
        begin(job_of(small(kind, **args), "complex"), sites, tmp_path)
    play(small(kind, **args), "complex constant", sites, tmp_path)


def test_bfloat16_weights_are_refused(sites: dict[str, Path], tmp_path: Path) -> None:
    """They trained in one process, and on FLARE the first round failed at every hospital."""
    with pytest.raises(ConfigError, match="in the network is bfloat16, which FLARE's arrays cannot carry"):
        begin(job_of(small(FedAvg), "bfloat16"), sites, tmp_path)


ON_OUTPUTS = [small(FedRoD), small(MoE), small(DSFL, public="shared")]


@pytest.mark.parametrize("method", ON_OUTPUTS, ids=lambda method: type(method).__name__)
def test_what_is_no_tensor_is_told_by_methods_that_look_at_it(
    sites: dict[str, Path], tmp_path: Path, method: Method
) -> None:
    """They ended with errors of Python's. Several outputs in training are taken as a list of them is."""
    with pytest.raises(ConfigError, match=r"a network must give a tensor, .* and this one gives a dict"):
        play(method, "dict", sites, tmp_path / "dict")
    play(method, "tuple", sites, tmp_path / "tuple")


def test_local_statistics_move_where_a_layer_holds_nothing_else(sites: dict[str, Path], tmp_path: Path) -> None:
    """In PFedNet's alternation they stood still in both exchanges, so that nothing was normalised."""
    method = small(PFedNet, alternate=(1, 1), local_statistics=True)
    coordinator, runners = pieces(job_of(method, "not affine"), sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    coordinator.close()
    means = [runner.models["model"].get_buffer("norm.running_mean") for runner in runners.values()]
    assert all(bool(mean.any()) for mean in means) and not torch.equal(*means)
