# SPDX-License-Identifier: Apache-2.0
"""The average of several models, as one model."""

from typing import Any

import pytest
import torch
from torch import nn

from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.data.target import Target
from medpfl.methods.averaged import Averaged
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.local import Local
from medpfl.methods.moe import Gate, MoE
from medpfl.methods.references import averaged
from medpfl.methods.softpull import SoftPull
from medpfl.tasks.together import together


def test_its_probabilities_are_the_mean() -> None:
    torch.manual_seed(0)
    several, one = torch.randn(3, 5, 4, 2, 2) * 20, torch.randn(3, 5, 1) * 20
    for target in (Target.CLASS, Target.MASK):
        found = together(list(several), target).softmax(dim=1)
        torch.testing.assert_close(found, several.softmax(dim=2).mean(dim=0))
    torch.testing.assert_close(together(list(one), Target.CLASS).sigmoid(), one.sigmoid().mean(dim=0))
    torch.testing.assert_close(together(list(several), Target.LABELS).sigmoid(), several.sigmoid().mean(dim=0))
    torch.testing.assert_close(together(list(one), Target.VALUE), one.mean(dim=0))


def test_a_weighted_mean() -> None:
    torch.manual_seed(0)
    several, one = torch.randn(3, 5, 4, 2, 2) * 20, torch.randn(3, 5, 1) * 20
    weights = torch.tensor([0.5, 0.0, 0.5])
    for target, stacked in [
        (Target.CLASS, several),
        (Target.LABELS, several),
        (Target.CLASS, one),
        (Target.VALUE, one),
    ]:
        found = together(list(stacked), target, weights)
        torch.testing.assert_close(found, together([stacked[0], stacked[2]], target))
        torch.testing.assert_close(
            together(list(stacked), target, torch.full((3,), 1 / 3)), together(list(stacked), target)
        )
    for target, stacked in [(Target.MASK, several), (Target.CLASS, one)]:
        alone = together(list(stacked), target, torch.tensor([0.0, 1.0, 0.0]))
        expected = stacked[1].softmax(dim=1) if stacked is several else stacked[1].sigmoid()
        torch.testing.assert_close(alone.softmax(dim=1) if stacked is several else alone.sigmoid(), expected)


def test_it_predicts_with_each_models_own_networks() -> None:
    first, second = nn.Linear(3, 1), nn.Linear(3, 1)
    members = {
        "local": (Local(), "local", nn.ModuleDict({"local": first})),
        "fedavg": (FedAvg(), "fedavg", nn.ModuleDict({"fedavg": second})),
    }
    method, name, networks = averaged(members, Target.VALUE)
    inputs = torch.randn(4, 3)
    torch.testing.assert_close(method.predict(name, networks, inputs), (first(inputs) + second(inputs)) / 2)
    assert list(networks) == ["m0_local", "m1_fedavg"]
    again = build(spec_of(method), Method, "method")
    assert again == method and again.members == (Local(), FedAvg())


def test_an_average_with_moe_predicts_slices_of_another_size() -> None:
    """As a new volume has them; in training they were 4 x 4."""
    mixed = nn.ModuleDict({"global": nn.Conv2d(1, 2, 1), "expert": nn.Conv2d(1, 2, 1), "gate": Gate((1, 4, 4))})
    common = nn.ModuleDict({"fedavg": nn.Conv2d(1, 2, 1)})
    members = {"personal": (MoE(), "personal", mixed), "fedavg": (FedAvg(), "fedavg", common)}
    method, name, networks = averaged(members, Target.MASK)
    slices = torch.randn(3, 1, 9, 6)
    found = method.predict(name, networks, slices)
    alone = MoE().predict("personal", mixed, slices)
    torch.testing.assert_close(found, together([alone, common["fedavg"](slices)], Target.MASK))


@pytest.mark.parametrize(
    ("members", "names", "target", "words"),
    [
        ((Local(),), ("local",), "class", "at least 2 models and their names, got 1 and 1"),
        ((Local(), Local()), ("local",), "class", "got 2 and 1"),
        ((Local(), SoftPull()), ("local", "personal"), "music", "target"),
        ((Local(), Local()), ("local", "global"), "class", "Local deploys no model 'global'; it deploys: local"),
        (({"path": "medpfl.core.mixers.Mean", "args": {}},) * 2, ("a", "b"), "class", "is no Method"),
    ],
)
def test_what_it_refuses(members: Any, names: tuple[str, ...], target: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Averaged(members=members, names=names, target=target)


def test_it_is_not_trained() -> None:
    method = Averaged(members=(Local(), FedAvg()), names=("local", "fedavg"), target="class")
    with pytest.raises(ConfigError, match="not trained"):
        method.local_round(None)  # type: ignore[arg-type]
