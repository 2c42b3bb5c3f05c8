# SPDX-License-Identifier: Apache-2.0
"""The networks that methods may be given: shapes, determinism, training, and a body for MH-pFLID to end."""

from typing import Any

import pytest
import torch

from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.conv_pool import ConvPool
from medpfl.models.dnet import DNet
from medpfl.models.light import MobileNetV2, ShuffleNetV2, SqueezeNet
from medpfl.models.residual import ResidualNet
from medpfl.models.resnet import ResNet
from medpfl.models.sequence import RNN, TCN, SeriesTransformer
from medpfl.models.split import body_shape, find_body, output_shape
from medpfl.models.unet import FCN, BasicUNet, UNet, UNetPlusPlus

CLASSIFIERS: list[Architecture] = [
    ResidualNet(),
    ResidualNet(blocks=(1, 1), width=8),
    ResidualNet(groups=4),
    ResidualNet(squeeze=True),
    SqueezeNet(),
    MobileNetV2(),
    ShuffleNetV2(),
    ConvPool(),
    DNet(),
]
SERIES: list[Architecture] = [TCN(), SeriesTransformer(), RNN()]
DENSE: list[Architecture] = [UNet(), UNet(residual_units=2), UNetPlusPlus(), FCN(), BasicUNet()]
ALL = [
    *((architecture, (3, 64, 48), (3, 5)) for architecture in CLASSIFIERS),
    *((architecture, (9, 128), (3, 5)) for architecture in SERIES),
    *((architecture, (3, 64, 48), (3, 5, 64, 48)) for architecture in DENSE),
]
IDS = [str(architecture) for architecture, _, _ in ALL]


@pytest.mark.parametrize(("architecture", "shape", "expected"), ALL, ids=IDS)
@pytest.mark.slow
@pytest.mark.convolutions
def test_network(architecture: Architecture, shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    networks = []
    for _ in range(2):
        torch.manual_seed(3)
        networks.append(architecture.build(shape, 5))
    one, other = (network.state_dict() for network in networks)
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    network = networks[0]
    inputs = torch.randn(3, *shape)
    outputs = network(inputs)
    assert outputs.shape == expected
    outputs.square().mean().backward()
    # MONAI's UNet++ has three further last layers, for deep supervision, that nothing uses here.
    used = [
        p
        for name, p in network.named_parameters()
        if not name.startswith(tuple(f"network.final_conv_0_{i}" for i in (1, 2, 3)))
    ]
    assert all(p.grad is not None and torch.isfinite(p.grad).all() for p in used)
    whole = network.eval()(inputs)  # in evaluation, a sample's result does not depend on the others
    torch.testing.assert_close(network(inputs[1:2]), whole[1:2], atol=1e-5, rtol=1e-4)
    body = find_body(network, shape)
    assert len(body_shape(network, body, shape)) == len(shape)
    assert build(spec_of(architecture), Architecture, "here") == architecture


@pytest.mark.parametrize("architecture", [ResNet(), *CLASSIFIERS, *DENSE], ids=str)
@pytest.mark.slow
def test_the_order_in_memory_changes_speed_alone(architecture: Architecture) -> None:
    """Results stay, and so does the order of the weights, which files and messages need."""
    network = architecture.build((3, 64, 48), 5).double().eval()
    inputs = torch.randn(2, 3, 64, 48).double()
    outputs = network(inputs)
    outputs.sum().backward()
    for weights in network.parameters():
        assert weights.is_contiguous() and (weights.grad is None or weights.grad.is_contiguous())
    network._forward_pre_hooks.clear()
    torch.testing.assert_close(network(inputs), outputs)


@pytest.mark.parametrize("architecture", DENSE, ids=str)
def test_lengths_that_it_says_to_take(architecture: Architecture) -> None:
    assert architecture.multiple is not None
    shape = (3, 3 * architecture.multiple, 2 * architecture.multiple)
    assert output_shape(architecture.build(shape, 2), shape) == (2, *shape[1:])


def test_grouping_and_gates_change_the_size() -> None:
    sizes = [
        sum(p.numel() for p in architecture.build((3, 64, 48), 2).parameters()) for architecture in CLASSIFIERS[:4]
    ]
    plain, short, grouped, gated = sizes
    assert short < grouped < plain < gated


def test_causal_means_causal() -> None:
    network = TCN(channels=(4, 4)).build((2, 40), 2).eval()
    series = torch.randn(1, 2, 40)
    later = series.clone()
    later[..., 25:] += 1
    blocks = network[:-3]  # type: ignore[index]
    assert torch.equal(blocks(series)[..., :25], blocks(later)[..., :25])
    assert not torch.equal(blocks(series)[..., 25:], blocks(later)[..., 25:])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ResidualNet(blocks=()), r"blocks must be 1 to 5 numbers of at least 1, got \[\]"),
        (lambda: ResidualNet(width=6, groups=4), "groups must divide its width, got groups 4, width 6"),
        (lambda: ResidualNet().build((7,), 2), r"ResidualNet takes inputs C x H x W, got inputs of shape \(7,\)"),
        (lambda: MobileNetV2(widths=(7,)), r"MobileNetV2's widths must be 1 to 5 even numbers .*got \[7\]"),
        (lambda: TCN(kernel=1), "TCN's channels must be at least 1 and its kernel 2"),
        (lambda: SeriesTransformer(heads=3), "heads divide width"),
        (lambda: SeriesTransformer().build((1, 9), 2), "needs 16 steps, got 9"),
        (lambda: RNN(width=3), "RNN's width must be even"),
        (lambda: RNN().build((1, 5), 2), "needs 8 time steps, got 5"),
        (lambda: UNet(channels=(4,)), "at least 2 levels are needed"),
        (lambda: UNet(channels=(0, 8)), r"channels must be at least 1, got \[0, 8\]"),
        (lambda: UNet(residual_units=-1), "residual_units must be at least 0, got -1"),
        (lambda: UNetPlusPlus(features=(4,)), "must be 6 numbers"),
        (lambda: UNetPlusPlus(features=(2, 2, 1, 2, 2, 2)), "the third to the fifth of at least 2, got"),
        (lambda: FCN(widths=()), "FCN's widths must be 1 or more"),
    ],
)
def test_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make()
