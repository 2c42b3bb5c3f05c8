# SPDX-License-Identifier: Apache-2.0
"""Arguments are checked whoever builds a component: FLARE's builder, ours, or a line of Python."""

import inspect
import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest
from nvflare.fuel.utils.component_builder import ComponentBuilder

from medpfl.component import build, find_class
from medpfl.core.checked import Checked, hint_of
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import NetworkProx, SoftPull
from medpfl.flare.allow import component_classes
from medpfl.methods.fedamp import FedAMP
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedrod import FedRoD
from medpfl.methods.moon import Moon
from medpfl.methods.pfednet import PFedNet
from medpfl.models.by_hospital import ByHospital
from medpfl.tasks.losses import CrossEntropy


class Flare(ComponentBuilder):
    """FLARE's builder, which wraps what a class raises."""

    def get_module_scanner(self) -> None:
        return None


def sentences(config: dict[str, Any]) -> tuple[str, str]:
    """What our builder says of a wrong component, without the place, and what FLARE's says."""
    with pytest.raises(ConfigError) as ours:
        build(config, object, "here")
    with pytest.raises(Exception) as theirs:
        Flare().build_component(config)
    return str(ours.value).removeprefix("here: "), str(theirs.value)


def test_both_builders_say_the_same_sentence() -> None:
    for path in component_classes():
        kind = find_class(path, "allow list")
        if not issubclass(kind, Checked):  # FLARE's own kinds: controllers, executor, filters
            continue
        if kind is not ByHospital:  # every name is a hospital's
            ours, theirs = sentences({"path": path, "args": {"nonsense": 1}})
            assert ours.startswith(f"unknown argument 'nonsense' of {kind.__name__}; it has: ") and ours in theirs
        wrong = {name: object() for name in inspect.signature(kind).parameters} or {"berlin": object()}
        for name, value in wrong.items():
            ours, theirs = sentences({"path": path, "args": {name: value}})
            assert ours in theirs and f" of {kind.__name__}" in ours


@pytest.mark.parametrize(
    ("path", "args", "sentence"),
    [
        ("core.mixers.SoftPull", {"lam": "0.5"}, "argument 'lam' of SoftPull must be a number, got '0.5'"),
        ("core.mixers.Mean", {"uniform": 1}, "argument 'uniform' of Mean must be true or false, got 1"),
        ("core.codecs.Chain", {"first": 3}, "argument 'first' of Chain must be a Codec, got 3"),
        ("methods.pfednet.PFedNet", {"alternate": [1]}, "PFedNet must be a list of 2 whole numbers or null, got [1]"),
        ("models.resnet.ResNet", {"depth": 19}, "argument 'depth' of ResNet must be 10, 18 or 34, got 19"),
        ("models.resnet.ResNet", {"depth": 18.0}, "argument 'depth' of ResNet must be 10, 18 or 34, got 18.0"),
        ("tasks.Tabular", {}, "argument 'dataset' of Tabular is missing"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_one_sentence(path: str, args: dict[str, Any], sentence: str) -> None:
    ours, theirs = sentences({"path": f"medpfl.{path}", "args": args})
    assert sentence in ours and ours in theirs


def test_lists_and_whole_numbers_become_what_is_declared() -> None:
    made = Flare().build_component(
        {"path": "medpfl.methods.pfednet.PFedNet", "args": {"personal": ["head"], "lr": 1, "alternate": [1, 2]}}
    )
    assert made == PFedNet(personal=("head",), lr=1.0, alternate=(1, 2)) and type(made.lr) is float
    assert hash(NetworkProx(1, graph="given", edges=[["a", "b"]]))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"'lam' of SoftPull must be a number, got True"):
        SoftPull(lam=True)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_no_argument_is_infinite_or_no_number(value: float) -> None:
    """YAML can write them (.inf, .nan); a weight or a rate like that trained every model to NaN."""
    with pytest.raises(ConfigError, match=rf"argument 'lam' of SoftPull must be a finite number, got {value}"):
        SoftPull(lam=value)
    for wrong in (lambda: Moon(mu=value), lambda: FedAMP(mu=value), lambda: FedRoD(gamma=value)):
        with pytest.raises(ConfigError, match=f"must be a finite number, got {value}"):
            wrong()
    with pytest.raises(ConfigError, match=r"argument 'weights' of CrossEntropy must be .*got"):
        CrossEntropy((1.0, value))
    with pytest.raises(ConfigError, match=f"argument 'clip_gradient' of FedAvg must be a number or null, got {value}"):
        FedAvg(clip_gradient=value)
    numbers = 0
    for kind in (find_class(path, "allow list") for path in component_classes()):
        for name in inspect.signature(kind).parameters:
            if hint_of(kind, name) is float:
                with pytest.raises(ConfigError, match=f"'{name}' of {kind.__name__} must be a finite number"):
                    kind(**{name: value})
                numbers += 1
    assert numbers > 50


@dataclass(frozen=True)
class Shaped(Checked):
    """Of every shape that components do not have yet."""

    names: list[str] | None = None
    weights: dict[str, float] | None = None
    kind: Literal["only"] = "only"
    free: Any = None


def test_shapes_of_arguments() -> None:
    names, weights = ["a"], {"a": 1.0}
    made = Shaped(names, weights)
    assert made.names is names and made.weights is weights  # nothing to change, so nothing is copied
    assert Shaped(weights={"a": 1}).weights == {"a": 1.0}
    for arguments, words in (
        ({"names": "ab"}, "'names' of Shaped must be a list of strings or null, got 'ab'"),
        ({"names": ["a", 1]}, "'names' of Shaped must be a list of strings or null"),
        ({"weights": {"a": "1"}}, "'weights' of Shaped must be a mapping of names to numbers or null"),
        ({"weights": {1: 1.0}}, "'weights' of Shaped must be a mapping of names"),
        ({"kind": "other"}, "'kind' of Shaped must be 'only', got 'other'"),
    ):
        with pytest.raises(ConfigError, match=words):
            Shaped(**arguments)  # type: ignore[arg-type]
    assert list(inspect.signature(Shaped).parameters) == ["names", "weights", "kind", "free"]
