# SPDX-License-Identifier: Apache-2.0
"""Every method with every option of its training: it trains two rounds with it, or refuses it by a sentence."""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines import begin
from every_method import EVERY, write_both
from medpfl.component import find_class
from medpfl.core.errors import ConfigError
from medpfl.flare.allow import component_classes
from medpfl.methods.averaged import Averaged
from medpfl.methods.contract import JointModel, Method
from medpfl.methods.local import Pooled
from medpfl.methods.optimizers import AdamW, Sgd
from medpfl.methods.schedules import WarmUp
from tools import round_of

OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"optimizer": AdamW()},
    "momentum": {"optimizer": Sgd(momentum=0.9, nesterov=True)},
    "weight decay": {"optimizer": Sgd(weight_decay=0.5)},
    "a schedule": {"optimizer": "sgd", "schedule": WarmUp(rounds=0.5, then="polynomial")},
    "clip_gradient": {"optimizer": "sgd", "clip_gradient": 0.01},
    "accumulate": {"optimizer": "sgd", "accumulate": 2},
}
REFUSED = {
    ("PFedMe", "accumulate"),
    *(("Scaffold", option) for option in ("Adam", "momentum", "clip_gradient")),
    *(("L2GD", option) for option in ("Adam", "weight decay", "a schedule", "clip_gradient")),
}


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def test_no_method_is_left_out() -> None:
    kinds = {find_class(path, "") for path in component_classes() if path.startswith("medpfl.methods.")}
    trained = {
        kind for kind in kinds if issubclass(kind, Method) and not issubclass(kind, (JointModel, Pooled, Averaged))
    }
    assert {small.kind for small in EVERY.values()} == trained


def allowed(name: str) -> list[dict[str, Any]]:
    """What the method does not refuse, in two runs: with Adam, where it may, and with gradient descent."""

    def may(option: str) -> bool:
        return (name, option) not in REFUSED

    found = {"schedule": "a schedule", "clip_gradient": "clip_gradient", "accumulate": "accumulate"}
    first = {key: OPTIONS[option][key] for key, option in found.items() if may(option)}
    momentum, decay = 0.9 if may("momentum") else 0.0, 0.5 if may("weight decay") else 0.0
    second = Sgd(momentum=momentum, nesterov=momentum > 0, weight_decay=decay)
    return [
        {"optimizer": AdamW() if may("Adam") else "sgd", **first},
        {"optimizer": second, "optimizer_state": "reset", "precision": "bf16"},
    ]


def trained(name: str, sites: dict[bool, dict[str, Path]], folder: Path, **training: Any) -> dict[str, torch.Tensor]:
    """Every tensor of both hospitals after two rounds."""
    small = EVERY[name]
    coordinator, runners = begin(small.job(**training), sites[small.images], folder)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    return {f"{site} {key}": t for site, runner in runners.items() for key, t in runner.models.state_dict().items()}


@pytest.mark.parametrize(("name", "option"), sorted(REFUSED))
def test_what_its_rule_excludes_is_refused(name: str, option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{EVERY[name].kind.__name__} cannot train with {option}: "):
        EVERY[name].method(**OPTIONS[option])


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_other_option_is_followed(name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path) -> None:
    runs = [trained(name, sites, tmp_path / str(n), **given) for n, given in enumerate([{}, *allowed(name)])]
    for found in runs:
        assert all(tensor.isfinite().all() for tensor in found.values())
    for one, other in itertools.combinations(runs, 2):
        assert any(not torch.equal(tensor, other[key]) for key, tensor in one.items())
