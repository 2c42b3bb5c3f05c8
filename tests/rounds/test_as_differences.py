# SPDX-License-Identifier: Apache-2.0
"""Updates as differences: what a hospital takes apart, the server puts together, and nothing else."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from medpfl.core.errors import ProtocolError
from medpfl.rounds.differences import apart, neither, statistics_of, together
from medpfl.rounds.messages import Slots


class Network(nn.Module):
    """A weight, a single number, BatchNorm and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.one = nn.Parameter(torch.randn(2, 3)), nn.Parameter(torch.tensor(0.5))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("told", torch.zeros(2))


def slots_of(network: Network, factor: float = 1.0) -> Slots:
    state = {key: value.detach() * factor for key, value in network.state_dict().items() if key != "told"}
    return {"model": {key: value.to(network.state_dict()[key].dtype) for key, value in state.items()}}


def test_what_is_taken_apart_is_put_together() -> None:
    torch.manual_seed(0)
    network = Network()
    received, sent = slots_of(network), slots_of(network, 1.25)
    gradients = {"step": {"weight": torch.tensor([1.0, -2.0])}}
    received["step"] = {"weight": torch.zeros(2)}
    differences, whole = apart({**sent, **gradients}, received, statistics_of(network), {"step"})
    assert set(whole["model"]) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert differences["model"]["one"].shape == (1,)  # FLARE's filters pass single numbers by
    torch.testing.assert_close(differences["model"]["weight"], 0.25 * received["model"]["weight"])
    torch.testing.assert_close(differences["step"]["weight"], gradients["step"]["weight"])
    found = together(differences, whole, ["model", "step"], received, {"step"})
    assert {slot: list(state) for slot, state in found.items()} == {s: list(st) for s, st in received.items()}
    for key, tensor in found["model"].items():
        torch.testing.assert_close(tensor, sent["model"][key], msg=key)
    torch.testing.assert_close(found["step"]["weight"], gradients["step"]["weight"])
    assert found["model"]["weight"].data_ptr() != received["model"]["weight"].data_ptr()  # mixing is in place


def test_what_a_filter_took_out_is_as_it_was_sent() -> None:
    sent = {"a": {"x": torch.ones(2)}, "g": {"x": torch.ones(2)}, "shown": {"x": torch.ones(2)}}
    found = together({}, {}, ["a", "g"], sent, {"g"})
    assert found["a"]["x"].tolist() == [1, 1] and found["g"]["x"].tolist() == [0, 0] and "shown" not in found
    found["a"]["x"] += 1
    assert sent["a"]["x"].tolist() == [1, 1]


Broken = Callable[[Slots, Slots], tuple[Slots, Slots, list[str]]]
ONE: dict[str, Tensor] = {"x": torch.ones(2)}


@pytest.mark.parametrize(
    ("differences", "whole", "names", "words"),
    [
        ({"b": ONE}, {}, ["b"], "slot 'b' is told as a difference, and the hospital was sent none"),
        ({"a": ONE}, {}, [], "slot 'a' is told as a difference"),
        ({"a": {"y": torch.ones(2)}}, {}, ["a"], "'a::y' is told and was not sent"),
        ({"a": ONE}, {"a": ONE}, ["a"], "'a::x' is in both parts"),
        ({"a": {"x": torch.ones(3)}}, {}, ["a"], r"expected a difference of shape \[2\], got \[3\]"),
        ({"a": {"x": torch.ones(2, 1)}}, {}, ["a"], r"got \[2, 1\]"),
        ({"a": {"x": torch.ones(2).long()}}, {}, ["a"], "whole numbers"),
    ],
)
def test_what_is_none_is_refused(differences: Slots, whole: Slots, names: list[str], words: str) -> None:
    with pytest.raises(ProtocolError, match=words):
        together(differences, whole, names, {"a": ONE})


def test_a_difference_to_nothing_and_one_that_means_nothing() -> None:
    network = Network()
    with pytest.raises(ProtocolError, match="'model::weight' was not received"):
        apart(slots_of(network), {}, statistics_of(network), ())
    assert neither(network, slots_of(network)) is None
    assert neither(network, {"public": {"told": torch.zeros(2)}}) == "public::told"
