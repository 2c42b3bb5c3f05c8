# SPDX-License-Identifier: Apache-2.0
"""Slots are found by module path and type, on networks whose names say nothing."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from medpfl.core.errors import ConfigError
from medpfl.core.groups import (
    BATCH_NORM,
    base_and_head,
    check_slots,
    describe,
    head_of,
    of_type,
    running_statistics,
    under,
    without,
)
from medpfl.core.tied import once


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU())
        self.subnet_bn = nn.Linear(2, 2)  # "bn" in its name, and no BatchNorm
        self.head = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LayerNorm(3))


def test_under_takes_a_module_and_all_below() -> None:
    assert under(Net(), "head.0") == ["head.0.weight", "head.0.bias"]
    assert under(Net()) == list(Net().state_dict())


def test_batch_norm_is_found_by_type() -> None:
    keys = of_type(Net(), BATCH_NORM)
    assert {key.rsplit(".", 1)[0] for key in keys} == {"body.1", "head.1"}
    assert "body.1.num_batches_tracked" in keys and "subnet_bn.weight" not in keys
    assert {key.rsplit(".", 1)[0] for key in of_type(Net(), BATCH_NORM, "head")} == {"head.1"}


def test_the_head_is_the_last_layer_that_computes() -> None:
    from monai.networks.nets import UNet

    from medpfl.models.resnet import ResNet

    assert head_of(Net()) == "head.0"  # what follows it are normalisations
    resnet = ResNet(width=4).build((3, 32, 32), 5)
    assert isinstance(resnet.get_submodule(head_of(resnet)), nn.Linear)
    assert resnet.get_submodule(head_of(resnet)).out_features == 5
    unet = UNet(spatial_dims=2, in_channels=1, out_channels=7, channels=(4, 8), strides=(2,), num_res_units=1)
    last = unet.get_submodule(head_of(unet))
    assert isinstance(last, nn.Conv2d | nn.ConvTranspose2d) and last.out_channels == 7
    with pytest.raises(ConfigError, match="cannot be split into a base and a head: it has 1 layers"):
        head_of(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))


@pytest.mark.parametrize("last", [nn.LayerNorm, nn.RMSNorm])
def test_a_normalisation_that_is_defined_last_is_no_head(last: Callable[[int], nn.Module]) -> None:
    net = nn.ModuleDict({"body": nn.Linear(3, 4), "head": nn.Linear(4, 2), "norm": last(4)})
    assert head_of(net) == "head"


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("normalised", [weight_norm, spectral_norm])
def test_a_layer_whose_weights_are_computed_is_one_layer(normalised: Callable[..., nn.Module], bias: bool) -> None:
    net = nn.Sequential(normalised(nn.Linear(2, 3)), nn.ReLU(), normalised(nn.Linear(3, 2, bias=bias)))
    root = nn.ModuleDict({"model": net})
    assert head_of(net) == "2"
    assert base_and_head(root, "model") == (under(root, "model.0"), under(root, "model.2"))


def test_monai_unet_has_batch_norm_under_any_name() -> None:
    from monai.networks.nets import UNet

    net = UNet(spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8), strides=(2,), norm="batch")
    found = of_type(net, BATCH_NORM)
    expected = sum(len(m.state_dict()) for m in net.modules() if isinstance(m, nn.BatchNorm2d))
    assert len(found) == expected > 0


def test_batch_norm_of_which_layers_are_shared_is_found_under_all_names() -> None:
    net = Net()
    net.register_module("again", nn.ModuleList([net.body, nn.Linear(2, 2)]))
    root = nn.ModuleDict({"model": net})
    norms = of_type(root, BATCH_NORM)
    assert {key.rpartition(".")[0] for key in norms} == {"model.body.1", "model.head.1", "model.again.0.1"}
    statistics = ["running_mean", "running_var", "num_batches_tracked"]
    assert {key.rpartition(".")[2] for key in running_statistics(root)} == set(statistics)
    assert once(root, {"model": without(under(root), norms)})["model"]


def test_nothing_found_is_refused() -> None:
    with pytest.raises(ConfigError, match="found no BatchNorm layer"):
        of_type(nn.Sequential(nn.Linear(2, 2)), BATCH_NORM)
    with pytest.raises(ConfigError, match="no module 'decoder' in Net; its children are: body, subnet_bn, head"):
        under(Net(), "decoder")
    with pytest.raises(ConfigError, match="holds no tensors"):
        under(Net(), "body.2")


def test_slots_are_checked() -> None:
    net = Net()
    whole = under(net)
    normal = of_type(net, BATCH_NORM)
    check_slots(net, {"shared": without(whole, normal), "norm": normal})
    with pytest.raises(ConfigError, match="slot 'shared' is empty"):
        check_slots(net, {"shared": []})
    with pytest.raises(ConfigError, match="is in slot 'a' and in slot 'b'"):
        check_slots(net, {"a": whole, "b": normal})
    with pytest.raises(ConfigError, match=r"names 'tail\.weight', which the models do not hold"):
        check_slots(net, {"a": ["tail.weight"]})


def test_description_says_what_leaves_and_what_stays() -> None:
    net = nn.ModuleDict({"model": nn.Linear(3, 2), "local": nn.Linear(3, 2)})
    text = describe(net, {"model": under(net, "model"), "local": under(net, "local")}, ["model"])
    assert "slot 'model': 2 tensors, 8 values, travels" in text
    assert "slot 'local': 2 tensors, 8 values, stays" in text
    assert "private: 2 tensors, 8 values, never sent" in text


def test_description_lists_every_batch_norm_layer() -> None:
    net = nn.ModuleDict({"model": nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), "more": nn.BatchNorm2d(4)})
    text = describe(net, {"model": under(net, "model.0"), "more": under(net, "more")}, ["model", "more"])
    assert "BatchNorm1d 'model.1' (2 channels) stays" in text
    assert "BatchNorm2d 'more' (4 channels) travels" in text


def test_tied_weights_are_listed_under_both_names() -> None:
    net = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    net["b"].weight = net["a"].weight
    assert under(net, "b") == ["b.weight", "b.bias"]
    assert torch.equal(net.state_dict()["a.weight"], net.state_dict()["b.weight"])
