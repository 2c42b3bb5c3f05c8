# SPDX-License-Identifier: Apache-2.0
"""The first part of a network: it gives what the whole network's module gives, holds no more, computes no more."""

import pytest
import torch
from test_architectures import ALL, IDS
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from medpfl.core.errors import ConfigError
from medpfl.models.contract import Architecture
from medpfl.models.conv_pool import ConvPool
from medpfl.models.extractor import Extractor
from medpfl.models.resnet import ResNet
from medpfl.models.segresnet import SegResNet
from medpfl.models.sequence import SeriesTransformer
from medpfl.models.split import body_shape, find_body, watched
from medpfl.models.transformers import UNETR, ViT


def unet() -> nn.Module:
    from monai.networks.nets import UNet

    return UNet(2, 3, 2, channels=(4, 8, 8), strides=(2, 2), num_res_units=1, norm="batch")


@pytest.mark.parametrize("kind", ["resnet", "unet", "plain"])
@pytest.mark.convolutions
def test_it_gives_what_the_module_gives(kind: str) -> None:
    networks = {
        "resnet": (lambda: ResNet(width=4).build((3, 32, 32), 2), "layer2", (3, 32, 32)),
        "unet": (unet, None, (3, 32, 32)),
        "plain": (lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2)), "2", (3,)),
    }
    make, path, shape = networks[kind]
    network = make()
    path = path or find_body(network, shape)
    extractor = Extractor(network, path, shape)
    assert extractor.training and all(module.training for module in network.modules())
    inputs = torch.randn(4, *shape)
    for training in (False, True):
        network.train(training)
        extractor.train(training)
        with watched(network, path) as seen:
            network(inputs)
        got = extractor(inputs)
        assert torch.equal(got, seen[0]) and got.shape[1] == extractor.channels
    held = {key.removeprefix("network."): value for key, value in extractor.state_dict().items()}
    assert held and held.keys() < network.state_dict().keys()
    for key, value in network.state_dict().items():  # what it holds is what decides its output
        if key not in held:
            value.fill_(1.0 if value.is_floating_point() else 1)
    network.load_state_dict({**network.state_dict(), **held})
    with watched(network.eval(), path) as seen:
        network(inputs)
    assert torch.equal(extractor.eval()(inputs), seen[0])


@pytest.mark.parametrize(("architecture", "shape", "expected"), ALL, ids=IDS)
@pytest.mark.slow
def test_every_architecture_can_be_split(
    architecture: Architecture, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    network = architecture.build(shape, 5).eval()
    path = architecture.extractor or find_body(network, shape)
    extractor, inputs = Extractor(network, path, shape).eval(), torch.randn(2, *shape)
    with watched(network, path) as seen:
        network(inputs)
    assert torch.equal(extractor(inputs), seen[0])
    assert len(extractor.state_dict()) < len(network.state_dict())


def test_lists_that_a_network_goes_through_side_by_side() -> None:
    """SegResNet's smallest map is that of the first module on its way up, which it reaches in ``zip`` of two lists."""
    network, shape = SegResNet(4, (1, 1, 1), (1, 1)).build((1, 16, 16, 16), 2).eval(), (1, 16, 16, 16)
    path = find_body(network, shape)
    assert path == "up_samples.0.0"
    extractor, inputs = Extractor(network, path, shape).eval(), torch.randn(2, *shape)
    with watched(network, path) as seen:
        network(inputs)
    assert torch.equal(extractor(inputs), seen[0])
    assert not [key for key in extractor.state_dict() if "up_layers" in key or "conv_final" in key]


def test_the_papers_splits() -> None:
    network = ConvPool().build((3, 64, 64), 2)
    extractor = Extractor(network, ConvPool.extractor, (3, 64, 64))
    assert extractor(torch.zeros(2, 3, 64, 64)).shape == (2, 64, 8, 8)
    assert {key.split(".")[1] for key in extractor.state_dict()} == {"0", "1", "2"}
    with pytest.raises(ConfigError, match=r"ConvPool needs inputs of at least 16 x 16, got the shape \(1, 8, 20\)"):
        ConvPool().build((1, 8, 20), 2)


@pytest.mark.slow
def test_the_papers_split_of_resnet18() -> None:
    network = ResNet(width=64).build((3, 32, 32), 2)
    extractor = Extractor(network, "layer2", (3, 32, 32))
    convolutions = [m for n, m in extractor.named_modules() if isinstance(m, nn.Conv2d) and "downsample" not in n]
    assert len(convolutions) == 9 and extractor.channels == 128
    assert {name for name, module in extractor.network.named_children() if list(module.parameters())} == {
        "conv1", "bn1", "layer1", "layer2",
    }  # fmt: skip
    with FlopCounterMode(display=False) as whole, torch.inference_mode():
        network.eval()(torch.zeros(1, 3, 32, 32))
    with FlopCounterMode(display=False) as part, torch.inference_mode():
        extractor.eval()(torch.zeros(1, 3, 32, 32))
    assert part.get_total_flops() < 0.6 * whole.get_total_flops()


class Between(nn.Module):
    """Has a weight of its own between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.ones(4))
        self.unused = nn.Linear(2, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(self.first(inputs) * self.scale)
        return outputs


@pytest.mark.parametrize(
    ("network", "path", "words"),
    [
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "9", "no module '9' in Sequential; its children"),
        (nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)), "2", "after '2': the head would be empty"),
        (nn.Sequential(nn.ReLU(), nn.Linear(3, 4)), "0", "after '0': the extractor would be empty"),
        (Between(), "first", "cannot be split after 'first': 'scale' belongs to neither part"),
        (Between(), "unused", "module 'unused' of Between is not used"),
    ],
)
def test_where_it_cannot_be_split(network: nn.Module, path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Extractor(network, path, (3,))


def test_tokens_are_no_features() -> None:
    """Their first axis is the place, so that the mean over the others would be of each token's features: of those that
    a layer norm gives, 0 whatever the image."""
    network, shape = UNETR(4, 12, 12, 2).build((1, 32, 32), 2), (1, 32, 32)
    words = r"after 'vit.norm': it gives the shape \(1, 4, 12\), and a vector B x C or a map B x C x \.\.\."
    with pytest.raises(ConfigError, match=words):
        Extractor(network, "vit.norm", shape)
    assert Extractor(network, "encoder4", shape).channels == 32
    with pytest.raises(ConfigError, match=r"'network\.cls_token' belongs to neither part"):
        Extractor(ViT(16, 12, 12, 1, 2).build(shape, 2), "network.patch_embedding.patch_embeddings", shape)


@pytest.mark.parametrize("length", [8, 64])
def test_of_a_series_tokens_are_no_feature_map_however_many_they_are(length: int) -> None:
    """Where a series had more patches than a token has features, a map was thought to end within the transformer: its
    channels were the patches, and its positions the features."""
    network = SeriesTransformer(width=8, heads=2, patch=2).build((3, length), 2)
    for first in (False, True):
        path = find_body(network, (3, length), first)
        assert (path, body_shape(network, path, (3, length))) == ("0", (8, length // 2))
    assert Extractor(network, path, (3, length)).channels == 8
