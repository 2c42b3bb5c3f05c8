# SPDX-License-Identifier: Apache-2.0
"""Tensors that layers share are listed once and put back everywhere."""

import pytest
import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import check_slots, describe, under
from medpfl.core.tied import call_with, first_names, load_own_state, once, own_state


class Tied(nn.Module):
    """The second layer's weight is the first's, and both ways use one BatchNorm."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        norm = nn.BatchNorm1d(3)
        self.ways = nn.ModuleList(nn.Sequential(norm, nn.ReLU()) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.ways[1](self.second(self.ways[0](self.first(inputs))))
        return found


ONCE = ["first.weight", "first.bias", "second.bias"]
NORM = [f"ways.0.0.{entry}" for entry in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")]


def test_a_tensor_is_listed_under_its_first_name() -> None:
    net = Tied(0)
    assert list(own_state(net)) == [*ONCE, *NORM] and len(net.state_dict()) == 4 + 2 * 5
    assert first_names(net)["second.weight"] == "first.weight"
    assert first_names(net)["ways.1.0.running_var"] == "ways.0.0.running_var"
    untied = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    assert list(own_state(untied)) == list(untied.state_dict())


@pytest.mark.parametrize("kind", [own_state, nn.Module.state_dict])
def test_loading_gives_all_names_their_tensor_again(kind: object) -> None:
    given, taken = Tied(0), Tied(1)
    load_own_state(taken, kind(given))  # type: ignore[operator]
    assert all(torch.equal(tensor, given.state_dict()[key]) for key, tensor in taken.state_dict().items())
    assert taken.second.weight is taken.first.weight
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "first.weight"'):
        load_own_state(taken, {key: tensor for key, tensor in own_state(given).items() if key != "first.weight"})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "third"'):
        load_own_state(taken, {**own_state(given), "third": torch.zeros(1)})


def test_slots_hold_a_tensor_once() -> None:
    net = Tied(0)
    slots = {"model": under(net)}
    check_slots(net, slots)
    assert once(net, slots) == {"model": [*ONCE, *NORM]}
    assert once(net, {"norm": under(net, "ways")}) == {"norm": NORM}
    assert "private: 3 tensors, 15 values, never sent" in describe(
        net, once(net, {"norm": under(net, "ways")}), ["norm"]
    )
    with pytest.raises(
        ConfigError, match=r"must stay together: 'first\.weight' is in slot 'a' and 'second\.weight' is in slot 'b'"
    ):
        once(net, {"a": under(net, "first"), "b": under(net, "second")})
    with pytest.raises(ConfigError, match=r"'first\.weight' is private and 'second\.weight' is in slot 'b'"):
        once(net, {"b": under(net, "second")})


def test_a_call_with_other_tensors_leaves_the_network_as_it_was() -> None:
    net, other, inputs = Tied(0).eval(), Tied(1).eval(), torch.randn(4, 3)
    before = {key: tensor.clone() for key, tensor in net.state_dict().items()}
    torch.testing.assert_close(call_with(net, own_state(other), inputs), other(inputs), atol=0, rtol=0)
    moved = {key: weight * 2 for key, weight in net.named_parameters()}
    call_with(net, moved, inputs).sum().backward()
    assert all(weight.is_leaf and weight.grad is not None for weight in net.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in net.state_dict().items())
