# SPDX-License-Identifier: Apache-2.0
"""The networks of FedAP's paper have its sizes; MONAI's classifiers come by name, without paths or downloads."""

import json
from typing import Any, get_args

import pytest
import torch
from nvflare.fuel.utils.component_builder import ComponentBuilder

from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.groups import BATCH_NORM, head_of
from medpfl.models.alexnet import AlexNet
from medpfl.models.contract import Architecture
from medpfl.models.conv1d import Pamap2Cnn
from medpfl.models.lenet import LeNet5
from medpfl.models.monai_net import MonaiNet, Name


def count(network: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def test_the_papers_sizes() -> None:
    assert count(LeNet5().build((1, 28, 28), 11)) == 44_555
    assert count(Pamap2Cnn().build((27, 200), 10)) == 99_466
    with torch.device("meta"):
        whole = AlexNet().build((3, 224, 224), 4)
    convolutions = [(3, 64, 11), (64, 192, 5), (192, 384, 3), (384, 256, 3), (256, 256, 3)]
    expected = sum(outs * (ins * size**2 + 1 + 2) for ins, outs, size in convolutions)
    expected += sum(outs * (ins + 1 + 2) for ins, outs in [(9216, 4096), (4096, 4096)]) + 4 * 4097
    assert count(whole) == expected == 57_038_916
    assert sum(isinstance(module, BATCH_NORM) for module in whole.modules()) == 7


def test_alexnet_runs_at_its_smallest_and_refuses_less() -> None:
    network = AlexNet(hidden=32).build((1, 63, 70), 3)
    outputs = network(torch.randn(2, 1, 63, 70))
    outputs.sum().backward()
    assert outputs.shape == (2, 3) and all(p.grad is not None for p in network.parameters())
    with pytest.raises(ConfigError, match="at least 63 x 63, got the shape"):
        AlexNet().build((1, 62, 70), 3)
    with pytest.raises(ConfigError, match="hidden must be at least 1, got 0"):
        AlexNet(hidden=0)


SMALL: dict[str, dict[str, Any]] = {
    "DenseNet121": {"init_features": 8, "growth_rate": 4, "block_config": [2, 2]},
    "ResNet10": {"conv1_t_stride": 2, "widen_factor": 0.25},
    "SEResNet50": {"layers": [1, 1, 1, 1], "inplanes": 16},
    "EfficientNetB0": {},
}


@pytest.mark.parametrize("name", SMALL)
def test_monai_classifiers_train_and_have_batch_norm_and_a_head(name: Any) -> None:
    torch.manual_seed(0)
    network = MonaiNet(name, SMALL[name]).build((3, 32, 32), 5)
    outputs = network(torch.randn(4, 3, 32, 32))
    torch.nn.functional.cross_entropy(outputs, torch.tensor([0, 1, 2, 3])).backward()
    assert outputs.shape == (4, 5)
    assert any(isinstance(module, BATCH_NORM) for module in network.modules())
    head = network.get_submodule(head_of(network))
    assert isinstance(head, torch.nn.Linear) and head.out_features == 5
    assert not any(
        "bn" in path for path, module in network.named_modules() if "DenseNet" in name
    )  # "norm1", found by type


def test_volumes_too() -> None:
    network = MonaiNet("ResNet10", {"widen_factor": 0.125}).build((1, 16, 16, 16), 2)
    assert network(torch.randn(2, 1, 16, 16, 16)).shape == (2, 2)


@pytest.mark.slow
def test_every_name_is_known_to_monai() -> None:
    with torch.device("meta"):
        for name in get_args(Name):
            assert count(MonaiNet(name).build((1, 64, 64), 3)) > 10_000, name


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"network": "UNet"}, "argument 'network' of MonaiNet"),
        ({"network": "DenseNet121", "options": {"pretrained": True}}, "DenseNet121 has no option 'pretrained' here"),
        ({"network": "ResNet18", "options": {"act": "relu"}}, "argument 'options' of MonaiNet"),
        ({"network": "EfficientNetB0", "options": {"progress": True}}, "it has: none"),
    ],
)
def test_what_a_job_may_not_ask_for(args: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        build({"path": "medpfl.models.monai_net.MonaiNet", "args": args}, Architecture, "here")


def test_numbers_that_make_no_network_are_a_sentence() -> None:
    with pytest.raises(ConfigError, match=r"MonaiNet: DenseNet121 with the options \{'growth_rate': -3\}"):
        MonaiNet("DenseNet121", {"growth_rate": -3}).build((1, 32, 32), 2)
    with pytest.raises(ConfigError, match="needs inputs C x H x W or C x D x H x W"):
        MonaiNet("ResNet18").build((3,), 2)


def test_flare_builds_it_from_a_job_as_we_do() -> None:
    class Builder(ComponentBuilder):
        def get_module_scanner(self) -> None:
            return None

    wanted = MonaiNet("DenseNet121", SMALL["DenseNet121"])
    spec = json.loads(json.dumps(spec_of(wanted)))
    assert build(spec, Architecture, "here") == wanted
    assert Builder().build_component(spec) == wanted
