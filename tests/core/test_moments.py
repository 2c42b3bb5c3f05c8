# SPDX-License-Identifier: Apache-2.0
"""Statistics of what enters a network's layers: equal to those of all data at once, however they are cut."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.moments import InputMoments, Moments


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    offset=st.floats(-1e6, 1e6),
    spread=st.floats(1e-3, 1e3),
    seed=st.integers(0, 10_000),
)
@pytest.mark.slow
def test_streaming_equals_one_pass(sizes: list[int], offset: float, spread: float, seed: int) -> None:
    """To 1e-12 of the values' scale, also where the mean is far from 0 and the variance small."""
    rng = np.random.default_rng(seed)
    values = offset + spread * rng.normal(size=(3, sum(sizes)))
    moments = Moments()
    for part in np.split(values, np.cumsum(sizes)[:-1], axis=1):
        moments.add(torch.from_numpy(part)[None])
    scale = abs(offset) + spread
    np.testing.assert_allclose(moments.mean, values.mean(axis=1), rtol=0, atol=1e-12 * scale)
    np.testing.assert_allclose(moments.variance, values.var(axis=1), rtol=1e-12, atol=1e-12 * scale * spread)


@given(
    batches=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    channels=st.integers(1, 300),
    height=st.integers(1, 9),
    width=st.integers(1, 9),
    offset=st.floats(-1e3, 1e3),
)
@pytest.mark.slow
def test_channels_last_makes_no_difference(
    batches: list[int], channels: int, height: int, width: int, offset: float
) -> None:
    generator = torch.Generator().manual_seed(channels)
    parts = [offset + torch.randn(b, channels, height, width, generator=generator).double() for b in batches]
    one, other = Moments(), Moments()
    for part in parts:
        one.add(part.flatten(2))
        other.add(part.contiguous(memory_format=torch.channels_last).flatten(2))
    exact = torch.cat(parts).movedim(1, 0).flatten(1)
    for moments in (one, other):
        torch.testing.assert_close(moments.mean, exact.mean(1), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(moments.variance, exact.var(1, correction=0), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("block", [1, 130, 2**24])
def test_values_of_a_gpu_are_added_up_there_to_the_same(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks, and beside values of the processor. 16 bits are added up by torch wherever they lie."""
    monkeypatch.setattr("medpfl.core.moments._BLOCK", block)
    generator = torch.Generator().manual_seed(0)
    parts = [(3 + torch.randn(size, 2, 25, generator=generator)).half() for size in (4, 1, 7)]
    moments = Moments()
    for number, part in enumerate(parts):
        moments.add(part.float() if number == 1 else part)
        if number:
            assert moments.count == sum(len(each) * 25 for each in parts[: number + 1])
    exact = torch.cat(parts).double().movedim(1, 0).flatten(1)
    for _ in range(2):  # to read it changes nothing
        torch.testing.assert_close(moments.mean, exact.mean(1), rtol=1e-13, atol=0)
        torch.testing.assert_close(moments.variance, exact.var(1, correction=0), rtol=1e-12, atol=0)


def test_constant_and_half_precision_values() -> None:
    moments = Moments()
    moments.add(torch.full((3, 2, 7), 0.1))
    assert (moments.variance >= 0).all() and moments.variance.max() < 1e-20
    for kind in (torch.float32, torch.float16, torch.bfloat16):  # numba has no 16 bits: torch adds those up
        values = torch.randn(4, 2, 50, generator=torch.Generator().manual_seed(0)).to(kind)
        moments = Moments()
        for part in values.split(3):
            moments.add(part)
        exact = values.double().movedim(1, 0).flatten(1)
        torch.testing.assert_close(moments.mean, exact.mean(1), rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(moments.variance, exact.var(1, correction=0), rtol=1e-12, atol=0)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(108, 5), nn.BatchNorm1d(5))
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(5, 2)).double().eval()


LAYERS = ("1", "5", "7")


def images(count: int = 37) -> Tensor:
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def moments_of(net: nn.Module, inputs: Tensor, size: int) -> dict[str, Tensor]:
    layers = {path: net.get_submodule(path) for path in LAYERS}
    with InputMoments(layers) as watched, torch.inference_mode():
        for start in range(0, len(inputs), size):
            net(inputs[start : start + size])
    return watched.result()


def test_the_inputs_of_convolutional_and_linear_layers() -> None:
    """Against activations computed layer by layer: convolution over batch and space, linear over the batch."""
    net, inputs = network(), images()
    found = moments_of(net, inputs, 10)
    with torch.inference_mode():
        first = net[0](inputs)
        second = net[4](net[3](net[2](net[1](first))))
        third = net[6](net[5](second))
    for path, values in (("1", first.movedim(1, 0).flatten(1)), ("5", second.T), ("7", third.T)):
        torch.testing.assert_close(found[f"{path}.mean"], values.mean(1), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(found[f"{path}.variance"], values.var(1, correction=0), rtol=1e-12, atol=1e-13)
    assert {key: len(tensor) for key, tensor in found.items() if "mean" in key} == {
        "1.mean": 3,
        "5.mean": 5,
        "7.mean": 5,
    }


@pytest.mark.parametrize("size", [1, 2, 12, 36, 37, 100])
def test_neither_the_batch_size_nor_the_order_matters(size: int) -> None:
    """36 leaves a last batch of a single sample, whose unbiased variance would be NaN."""
    inputs = images()
    reference = moments_of(network(), inputs, 7)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(size))
    for key, values in moments_of(network(), inputs[order], size).items():
        torch.testing.assert_close(values, reference[key], rtol=1e-12, atol=1e-13)


def test_scaled_inputs_scale_the_statistics() -> None:
    """x -> 4x before a network without biases: means 4 times, variances 16 times."""
    net = nn.Sequential(nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3)).double().eval()
    found = []
    for factor in (1.0, 4.0):
        with InputMoments({"1": net[1]}) as watched, torch.inference_mode():
            net(factor * images())
        found.append(watched.result())
    torch.testing.assert_close(found[1]["1.mean"], 4 * found[0]["1.mean"], rtol=1e-13, atol=0)
    torch.testing.assert_close(found[1]["1.variance"], 16 * found[0]["1.variance"], rtol=1e-13, atol=0)


def test_the_network_is_left_as_it_was() -> None:
    net = network()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    moments_of(net, images(), 5)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_hooks_go_when_the_network_fails() -> None:
    net = network()
    with pytest.raises(RuntimeError), InputMoments({"1": net[1]}):
        net(torch.zeros(2, 5, 8, 8, dtype=torch.float64))
    assert not any(module._forward_pre_hooks for module in net.modules())


def test_a_layer_that_is_never_used_is_named() -> None:
    with InputMoments({"spare": nn.BatchNorm2d(3)}) as watched:
        pass
    with pytest.raises(ConfigError, match="nothing passed through layer 'spare'"):
        watched.result()


def test_sequences_in_a_linear_layer_have_their_channels_last() -> None:
    layer = nn.Linear(4, 2).double()
    tokens = torch.randn(6, 9, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    with InputMoments({"head": layer}) as watched:
        layer(tokens)
    torch.testing.assert_close(watched.result()["head.mean"], tokens.mean((0, 1)), rtol=1e-13, atol=1e-14)
