# SPDX-License-Identifier: Apache-2.0
"""MONAI's networks by name: they train in 2-D and 3-D with every norm, say truthfully what sizes they take, have a
state that can be written, and refuse what makes no sense in one sentence."""

import dataclasses
import importlib
import pkgutil
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import save
from torch import Tensor, nn

import medpfl.models
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.groups import head_of
from medpfl.core.sizes import Bounded
from medpfl.models.auto import Auto
from medpfl.models.contract import Architecture
from medpfl.models.dnet import DNet
from medpfl.models.dynunet import DynUNet
from medpfl.models.monai_net import MonaiNet, Name
from medpfl.models.norms import Norm, with_norm
from medpfl.models.resnet import ResNet
from medpfl.models.segresnet import SegResNet, VNet
from medpfl.models.transformers import UNETR, SwinUNETR, ViT
from medpfl.models.unet import AttentionUnet, BasicUNet, UNet, UNetPlusPlus
from medpfl.tasks.segmentation import Segmentation

pytestmark = pytest.mark.slow

SWIN: dict[str, Any] = {"feature_size": 12, "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1), "window_size": 2}
MASKS: list[Architecture] = [
    UNet((4, 8)),
    UNet((4, 8), residual_units=1, dropout=0.1),
    DynUNet((4, 6, 8), dropout=0.1),
    DynUNet((4, 6, 8, 8), residual=True, deep_supervision=True),
    SegResNet(4, (1, 1), (1,), dropout=0.1),
    AttentionUnet((4, 8), dropout=0.1),
    UNETR(2, 8, 8, 2, dropout=0.1),
    BasicUNet(1),
]
CLASSES: list[Architecture] = [
    ViT(8, 8, 8, 1, 2, dropout=0.1),
    ResNet(width=2, depth=10, pool=False),
    MonaiNet("DenseNet121", {"init_features": 4, "growth_rate": 2, "block_config": [1, 1]}),
    MonaiNet("ResNet10", {"widen_factor": 0.0625}),
]
LARGE: list[Architecture] = [
    UNetPlusPlus((2, 2, 2, 2, 2, 2), dropout=0.1),
    VNet(),
    SwinUNETR(**SWIN),
    SwinUNETR(**SWIN, version_2=True),
    MonaiNet("SEResNet50", {"layers": [1, 1, 1, 1], "inplanes": 8}),
    MonaiNet("SEResNext50", {"layers": [1, 1, 1, 1], "inplanes": 8, "groups": 2}),
    MonaiNet("EfficientNetB0"),
]


def shape_for(architecture: Architecture, axes: int) -> tuple[int, ...]:
    """Inputs of one channel, of lengths that differ where they can be small."""
    if isinstance(architecture, VNet):  # of tens of millions of weights
        return (1, *(16,) * axes)
    if isinstance(architecture, SwinUNETR | UNetPlusPlus | MonaiNet):
        return (1, *(32,) * axes)
    wanted = architecture.multiples(axes) or (16,) * axes
    first, others = (1, 2) if max(wanted) >= 16 else (2, 4)  # the least of which a position or more is left below
    return 1, first * wanted[0], *(others * length for length in wanted[1:])


def trained(architecture: Architecture, axes: int) -> None:
    shape = shape_for(architecture, axes)
    torch.manual_seed(1)
    network = architecture.build(shape, 3)
    torch.manual_seed(1)
    again = architecture.build(shape, 3)
    assert save(network.state_dict())  # it refuses what is there twice
    mine, other = network.state_dict(), again.state_dict()
    assert list(mine) == list(other) and all(torch.equal(mine[key], other[key]) for key in mine)  # the seed decides all
    places = [tensor.data_ptr() for tensor in network.state_dict().values()]
    assert len(set(places)) == len(places)
    assert head_of(network)
    inputs = torch.randn(2, *shape)
    outputs = network(inputs)
    maps = outputs if isinstance(outputs, list) else [outputs]
    torch.stack([found.square().mean() for found in maps]).sum().backward()
    unused = {name for name, weights in network.named_parameters() if weights.grad is None}
    assert not unused or (isinstance(architecture, UNetPlusPlus) and all("final_conv_0" in name for name in unused))
    assert all(torch.isfinite(weights.grad).all() for weights in network.parameters() if weights.grad is not None)
    for parameter in network.parameters():
        assert parameter.is_contiguous()
    single = network.eval()(inputs[:1])
    assert isinstance(single, Tensor)
    assert single.shape == (1, 3, *(shape[1:] if architecture.multiple else ()))
    assert build(spec_of(architecture), Architecture, "here") == architecture


@pytest.mark.parametrize("axes", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture",
    [pytest.param(one, marks=[pytest.mark.slow] * isinstance(one, UNETR | BasicUNet)) for one in [*MASKS, *CLASSES]],
    ids=str,
)
@pytest.mark.convolutions
def test_it_trains_with_every_norm(architecture: Architecture, axes: int) -> None:
    norms = get_args(Norm) if hasattr(architecture, "norm") else ()
    for norm in norms:
        trained(dataclasses.replace(architecture, norm=norm), axes)  # type: ignore[type-var]
    if not norms:
        trained(architecture, axes)


@pytest.mark.parametrize("axes", [2, 3])
@pytest.mark.parametrize("architecture", LARGE, ids=str)
@pytest.mark.convolutions
def test_large_ones_train_too(architecture: Architecture, axes: int) -> None:
    trained(dataclasses.replace(architecture, norm="group"), axes)  # type: ignore[call-arg]


@pytest.mark.parametrize("axes", [2, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "architecture", [one for one in [*MASKS, *CLASSES, *LARGE] if hasattr(one, "dropout")], ids=str
)
def test_without_dropout_nothing_is_left_out(architecture: Architecture, axes: int) -> None:
    """V-Net left out half of the channels that pass by its two upper levels, whatever its dropout was."""
    changes: dict[str, Any] = {"dropout": 0.0} | ({"norm": "group"} if hasattr(architecture, "norm") else {})
    shape = shape_for(architecture, axes)
    network = dataclasses.replace(architecture, **changes).build(shape, 3)  # type: ignore[type-var]
    inputs = torch.randn(2, *shape)
    with torch.no_grad():
        in_training, single = network.train()(inputs), network.eval()(inputs)
    torch.testing.assert_close(in_training[0] if isinstance(in_training, list) else in_training, single)


def test_v_net_leaves_out_channels_and_no_whole_images() -> None:
    """MONAI's takes a slice's channels for slices of one volume: it left out all channels of an image or none."""
    network = VNet(dropout=0.5).build((1, 16, 16), 2)
    found = [module for module in network.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    assert len(found) == 8
    for module in found:
        kept = (module(torch.ones(2, 64, 4, 4)) != 0).flatten(2).double().mean(dim=2)
        assert set(kept.flatten().tolist()) == {0.0, 1.0}  # of a channel all or nothing
        assert all(0.2 < share < 0.8 for share in kept.mean(dim=1).tolist())


@pytest.mark.parametrize(
    ("architecture", "least"),
    [(DNet(), 16), (MonaiNet("DenseNet121"), 29), (MonaiNet("EfficientNetB0", norm="group"), 32)],
    ids=str,
)
def test_inputs_that_are_too_small_for_a_classifier_are_refused(architecture: Architecture, least: int) -> None:
    """MedMNIST's 28 x 28, say: the job was valid, and every hospital's first round ended in torch's own error."""
    architecture.build((1, least, least), 3).eval()(torch.zeros(1, 1, least, least))
    told = rf"larger inputs than those of shape \(1, {least - 1}, 40\)|at least 16 x 16, got the shape \(1, 15, 40\)"
    with pytest.raises(ConfigError, match=told):
        architecture.build((1, least - 1, 40), 3)


@pytest.mark.parametrize("architecture", MASKS, ids=str)
def test_other_lengths_than_it_says_are_refused(architecture: Architecture) -> None:
    assert architecture.multiple is not None
    shape = (1, 3 * architecture.multiple, 2 * architecture.multiple)
    blank = torch.zeros(1, *shape)
    assert architecture.build(shape, 2).eval()(blank).shape == (1, 2, *shape[1:])
    if not isinstance(architecture, UNet | BasicUNet):
        with pytest.raises(ConfigError, match=r"takes lengths that are multiples of \d+ x \d+, got inputs of shape"):
            architecture.build((1, 3 * architecture.multiple + 1, 2 * architecture.multiple), 2)


def test_strides_of_each_axis() -> None:
    """nnU-Net's anisotropic plans: the depth of a volume of thick slices is halved less often."""
    architecture = DynUNet(
        (2, 4, 4, 4), strides=((1, 2, 2), (2, 2, 2), (1, 2, 2)), kernels=((1, 3, 3), *[(3, 3, 3)] * 3)
    )
    assert architecture.multiples(3) == (2, 8, 8) and architecture.multiple == 8
    network = architecture.build((1, 6, 16, 24), 2).eval()
    assert network(torch.zeros(1, 1, 6, 16, 24)).shape == (1, 2, 6, 16, 24)
    assert build(spec_of(architecture), Architecture, "here") == architecture
    with pytest.raises(ConfigError, match="DynUNet's strides are for 3 axes, the inputs have 2"):
        architecture.build((1, 16, 16), 2)


def test_deep_supervision_gives_the_largest_map_first_in_training_alone() -> None:
    architecture = DynUNet((2, 4, 4, 4, 4), deep_supervision=True)
    network = architecture.build((1, 32, 64), 2)
    inputs = torch.randn(2, 1, 32, 64)
    assert [tuple(found.shape) for found in network(inputs)] == [(2, 2, 32, 64), (2, 2, 16, 32), (2, 2, 8, 16)]
    assert network.eval()(inputs).shape == (2, 2, 32, 64)
    plain = dataclasses.replace(architecture, deep_supervision=False).build((1, 32, 64), 2)
    plain.load_state_dict({key: network.state_dict()[key] for key in plain.state_dict()})
    assert torch.equal(plain.eval()(inputs), network(inputs))
    assert len(DynUNet((2, 4, 4), deep_supervision=True).build((1, 16, 16), 2)(inputs)) == 2
    assert head_of(network) == "output_block.conv.conv"


@pytest.mark.convolutions
def test_it_computes_what_monais_network_does() -> None:
    from monai.networks.nets import DynUNet as Network

    strides = [1, 2, 2]
    theirs = Network(2, 1, 2, [3, 3, 3], strides, strides[1:], filters=(2, 4, 4), norm_name=("batch", {"affine": True}))
    ours = DynUNet((2, 4, 4), norm="batch").build((1, 16, 16), 2)
    ours.load_state_dict({key: theirs.state_dict()[key] for key in ours.state_dict()})
    inputs = torch.randn(2, 1, 16, 16)
    assert torch.equal(ours(inputs), theirs(inputs))


@pytest.mark.parametrize(("norm", "kind"), [("instance", nn.InstanceNorm2d), ("group", nn.GroupNorm)])
def test_no_batch_norm_is_left(norm: Norm, kind: type[nn.Module]) -> None:
    network = nn.Sequential(nn.Conv2d(1, 12, 3), nn.BatchNorm2d(12, eps=0.01), nn.Sequential(nn.BatchNorm2d(12)))
    names = list(network.state_dict())
    with_norm(network, norm, (1, 8, 8))
    assert list(network.state_dict()) == [name for name in names if "running" not in name and "num_" not in name]
    first, second = network[1], network[2][0]
    assert isinstance(first, kind) and isinstance(second, kind) and (first.eps, second.eps) == (0.01, 1e-5)
    if isinstance(first, nn.GroupNorm):
        assert first.num_groups == 4  # 12 channels are no multiple of 8


def test_instance_norm_over_a_single_position() -> None:
    with pytest.raises(ConfigError, match=r"instance norm needs more than one position, and of inputs of shape"):
        DynUNet((2, 4, 4)).build((1, 4, 4), 2)
    network = DynUNet((2, 4, 16), norm="group").build((1, 4, 4), 2)
    assert network.training and network(torch.zeros(2, 1, 4, 4)).shape == (2, 2, 4, 4)


def test_group_norm_over_a_single_value() -> None:
    """Of which it makes the same number whatever the inputs are: its level learnt nothing, in silence, and the first
    validation ended in a sentence on BatchNorm, which the network does not have."""
    with pytest.raises(ConfigError, match=r"group norm needs more than one value in each group, and of inputs"):
        DynUNet((2, 4, 8), norm="group").build((1, 4, 4), 2)


def test_the_transformers_attention_is_torchs() -> None:
    """MONAI's block with einops' rearrangements against torch's attention, with the same weights."""
    from monai.networks.blocks import selfattention

    block = selfattention.SABlock(8, 2, qkv_bias=True)
    theirs = nn.MultiheadAttention(8, 2, batch_first=True)
    theirs.load_state_dict(
        {
            "in_proj_weight": block.qkv.weight, "in_proj_bias": block.qkv.bias,
            "out_proj.weight": block.out_proj.weight, "out_proj.bias": block.out_proj.bias,
        }
    )  # fmt: skip
    inputs = torch.randn(2, 5, 8)
    torch.testing.assert_close(block(inputs), theirs(inputs, inputs, inputs)[0])


def test_tables_of_windows_do_not_travel() -> None:
    network = SwinUNETR(**SWIN).build((1, 64, 64), 2)
    assert any("relative_position_index" in name for name, _ in network.named_buffers())
    assert not any("relative_position_index" in name for name in network.state_dict())


@pytest.mark.parametrize(
    ("path", "args", "words"),
    [
        ("unet.UNet", {"chanels": [4, 8]}, "unknown argument 'chanels' of UNet; .*did you mean 'channels'"),
        ("unet.UNet", {"norm": "instanc"}, "'batch', 'instance' or 'group', got 'instanc'; did you mean 'instance'"),
        ("unet.UNett", {}, "there is no class 'medpfl.models.unet.UNett'.*did you mean 'UNet'"),
        ("unet.UNet", {"dropout": 1.0}, r"UNet's dropout must be in \[0, 1\), got 1.0"),
        ("unet.AttentionUnet", {"channels": [4]}, "at least 2 levels are needed, got"),
        ("unet.AttentionUnet", {"channels": [1, 8]}, "channels must be whole numbers from 2"),
        ("dynunet.DynUNet", {"filters": [4, 8]}, "at least 3 levels are needed"),
        ("dynunet.DynUNet", {"strides": [[2, 2]]}, "strides must be 2 lists for the 3 levels of its filters, got 1"),
        ("dynunet.DynUNet", {"strides": [[2, 2], [2, 2, 2]]}, "strides must all have one number an axis"),
        ("dynunet.DynUNet", {"strides": [[2, 9], [2, 2]]}, "strides must be whole numbers from 1 to 4, got 9"),
        ("dynunet.DynUNet", {"strides": [2, 2]}, "argument 'strides' of DynUNet must be a list of"),
        ("dynunet.DynUNet", {"kernels": [[2, 2]] * 3}, "kernels must have odd lengths"),
        ("segresnet.SegResNet", {"blocks_up": [1]}, "blocks_up one fewer, got"),
        ("transformers.UNETR", {"hidden_size": 10}, "hidden_size must be a multiple of its num_heads, got 10 and 12"),
        ("transformers.SwinUNETR", {"feature_size": 20}, "feature_size must be a multiple of 12, got 20"),
        ("transformers.SwinUNETR", {"num_heads": [5, 6, 12, 24]}, "num_heads must divide the 24 channels of stage 1"),
        ("transformers.SwinUNETR", {"depths": [2, 2]}, "argument 'depths' of SwinUNETR must be a list of 4"),
        ("transformers.ViT", {"num_layers": 10**9}, "num_layers must be whole numbers from 1 to 200"),
        ("monai_net.MonaiNet", {"network": "DenseNet12"}, "got 'DenseNet12'; did you mean 'DenseNet121'"),
        (
            "monai_net.MonaiNet",
            {"network": "DenseNet121", "options": {"growth": 6}},
            "no option 'growth' here; .*did you mean 'growth_rate'",
        ),
    ],
)
def test_refused_in_one_sentence(path: str, args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build({"path": f"medpfl.models.{path}", "args": args}, Architecture, "architecture")


@pytest.mark.parametrize(
    ("architecture", "shape", "words"),
    [
        (VNet(), (3, 32, 32), "VNet takes inputs of 1, 2, 4, 8 or 16 channels, got 3"),
        (ViT(), (1, 24, 32), "multiples of its patch_size 16, got inputs of shape"),
        (SegResNet(), (7,), r"SegResNet takes inputs C x H x W or C x D x H x W, got inputs of shape \(7,\)"),
    ],
)
def test_inputs_that_it_cannot_take(architecture: Architecture, shape: tuple[int, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        architecture.build(shape, 2)


HUGE: list[Architecture] = [
    UNet((100_000, 100_000)),
    DynUNet((100_000, 100_000, 100_000)),
    SegResNet(100_000),
    AttentionUnet((100_000, 100_000)),
    UNETR(feature_size=100_000),
    UNETR(hidden_size=12 * 10_000),
    SwinUNETR(feature_size=12 * 10_000),
    SwinUNETR(window_size=64),
    SwinUNETR(depths=(200, 200, 200, 200), window_size=14),
    UNetPlusPlus((100_000,) * 6),
    BasicUNet(100_000),
    ViT(hidden_size=3 * 100_000),
    ViT(hidden_size=3, num_layers=200, mlp_dim=2**20),
    ResNet(width=100_000),
    MonaiNet("DenseNet121", {"growth_rate": 10**6}),
    MonaiNet("DenseNet121", {"block_config": [10**9]}),
    MonaiNet("ResNet10", {"widen_factor": 1e5}),
    MonaiNet("ResNet10", {"widen_factor": 1e300}),
    MonaiNet("SEResNet50", {"layers": [10**9, 1, 1, 1]}),
]


@pytest.mark.parametrize("architecture", HUGE, ids=str)
def test_one_that_is_too_large_is_refused_before_its_memory_is_taken(architecture: Architecture) -> None:
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError), Bounded(10_000_000):
        architecture.build((1, 32, 32, 32), 2)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 * 1024  # KiB


def test_every_network_is_in_a_table() -> None:
    """Whoever adds an architecture with a norm adds it above. A plan becomes one of them, and is none itself."""
    kinds = set()
    for info in pkgutil.iter_modules(medpfl.models.__path__, "medpfl.models."):
        kinds |= {kind for kind in vars(importlib.import_module(info.name)).values() if isinstance(kind, type)}
    normed = {
        kind for kind in kinds if issubclass(kind, Architecture) and "norm" in getattr(kind, "__annotations__", {})
    } - {Auto}
    assert normed <= {type(one) for one in (*MASKS, *CLASSES, *LARGE)} and len(get_args(Name)) == 20


def test_patches_of_other_lengths_an_axis() -> None:
    """A task's size goes by the strides of each axis."""
    network = DynUNet((2, 4, 4), strides=((2, 2, 1), (2, 2, 2)))
    assert Segmentation("organ", size=(8, 12, 6), architecture=network).size == (8, 12, 6)
    with pytest.raises(ConfigError, match=r"must be 2 multiples of 4, 4, 2 for DynUNet.*got \[8, 12, 5\]"):
        Segmentation("organ", size=(8, 12, 5), architecture=network)
    with pytest.raises(ConfigError, match="strides are for 3 axes, the inputs have 2"):
        Segmentation("organ", size=(8, 12), architecture=network)


def test_a_network_of_one_size_sees_larger_slices_in_windows() -> None:
    task = Segmentation("organ", size=(16, 16), architecture=UNETR(2, 8, 8, 2))
    network = task.architecture.build((1, 16, 16), 2).eval()
    slices = torch.randn(1, 1, 32, 48)
    with torch.no_grad():
        assert task.infer(network, slices).shape == (1, 2, 32, 48)
        one = slices[..., :16, :16]
        torch.testing.assert_close(task.infer(network, one), network(one))
    plain = Segmentation("organ", size=(16, 16), architecture=UNet((2, 4)))
    assert torch.equal(plain.infer(lambda given: given + 1, slices), slices + 1)
