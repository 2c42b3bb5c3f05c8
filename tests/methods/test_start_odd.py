# SPDX-License-Identifier: Apache-2.0
"""Start weights of which something would be lost without a word."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hospitals import change_yaml, write_volumes
from medpfl import store
from medpfl.component import spec_of
from medpfl.core.errors import ConfigError, DataError
from medpfl.data.site_file import load_site_file
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.start import Start, Started
from medpfl.models.contract import Architecture
from medpfl.models.monai_net import MonaiNet
from medpfl.models.resnet import ResNet
from medpfl.models.sequence import RNN
from medpfl.models.tabnet import TabNet
from medpfl.models.transformers import SwinUNETR
from medpfl.models.unet import UNet
from medpfl.rounds.held_alike import check_fits, read_common
from medpfl.tasks.classification import Classification
from medpfl.tasks.segmentation import Segmentation
from pictures import TABLE, declare, write_images


class Shared(nn.Module):
    """Two layers with one weight, which is of half precision beside a float32 bias."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
        self.first.weight = nn.Parameter(self.first.weight.detach().half())
        self.second.weight = self.first.weight


def started(**change: Tensor) -> Shared:
    network = Shared()
    tensors = {key: tensor.clone() for key, tensor in Shared().state_dict().items()}
    tensors.update({key.replace("__", "."): tensor for key, tensor in change.items()})
    Started(Start("known"), tensors).put_into(network)
    assert torch.equal(network.first.weight, tensors["first.weight"].half())
    assert network.second.weight is network.first.weight
    return network


def test_two_tensors_are_not_one() -> None:
    """A checkpoint of a network whose layers share nothing has both, and the second was lost."""
    started()
    both = torch.randn(3, 3)
    started(first__weight=both, second__weight=both.half())
    with pytest.raises(ConfigError, match=r"'first\.weight' and 'second\.weight' differ, and layers of the job's Sh"):
        started(second__weight=both)


def test_numbers_beyond_the_networks_type_are_no_start() -> None:
    """They became infinite: of half precision at 65504, of a checkpoint in float64 at 3.4e38."""
    large = torch.full((3, 3), 7e4)
    with pytest.raises(ConfigError, match=r"'first\.weight' is not of finite numbers"):
        started(first__weight=large, second__weight=large)
    with pytest.raises(ConfigError, match=r"'last\.weight' is not of finite numbers"):
        started(last__weight=torch.full((1, 3), 1e39, dtype=torch.float64))


@pytest.mark.parametrize("of", ["bundle", "model", "pretrained"])
def test_a_network_that_computes_something_else_with_the_same_tensors(of: str, tmp_path: Path) -> None:
    """Instance and group norm have weights of the same names and shapes, and so has attention with any heads."""
    task = Segmentation("organ", size=(16, 16), architecture=UNet((4, 8), norm="instance"))
    network = task.architecture.build((1, 16, 16), 2)
    told: dict[str, dict[str, Any]] = {
        "bundle": {"kind": "checkpoint", "network": spec_of(task.architecture)},
        "pretrained": {"kind": "checkpoint", "task": spec_of(task)},
        "model": {"kind": "model", "recipe": {"task": spec_of(task)}},
    }
    named = {f"model.{key}" if of == "model" else key: tensor for key, tensor in network.state_dict().items()}
    store.save(tmp_path / "start.safetensors", named, told[of])
    site = write_volumes(tmp_path)
    change_yaml(site, lambda content: content.update(checkpoints={"known": "start.safetensors"}))
    file = load_site_file(site)
    data = task.load(file)
    method = FedAvg(start=Start("known"))
    for same in (task, replace(task, architecture=UNet((4, 8), norm="instance", dropout=0.5))):
        found = read_common(method, same, file, data.input_shape, data).start(method.start)
        assert found and same.architecture
        found.put_into(same.architecture.build(data.input_shape, 2))
    other = replace(task, architecture=UNet((4, 8), norm="group"))
    words = "^checkpoint 'known' does not fit the job: its UNet has another 'norm' than the job's, 'group', with which"
    with pytest.raises(DataError, match=words):
        read_common(method, other, file, data.input_shape, data)


def test_heads_of_each_stage_are_compared_as_the_file_has_them(tmp_path: Path) -> None:
    """A tuple, which is a list in a file: a job could not go on from its own network."""
    task = Segmentation("organ", size=(32, 32), architecture=SwinUNETR(feature_size=12, norm="batch"))
    store.save(
        tmp_path / "start.safetensors",
        task.architecture.build((1, 32, 32), 2).state_dict(),
        {"kind": "checkpoint", "network": spec_of(task.architecture)},
    )
    site = write_volumes(tmp_path)
    change_yaml(site, lambda content: content.update(checkpoints={"known": "start.safetensors"}))
    file = load_site_file(site)
    data, method = task.load(file), FedAvg(start=Start("known"))
    assert read_common(method, task, file, data.input_shape, data).start(method.start)
    other = replace(task, architecture=SwinUNETR(feature_size=12, num_heads=(3, 6, 6, 12), norm="batch"))
    with pytest.raises(DataError, match=r"SwinUNETR has another 'num_heads' than the job's, \[3, 6, 6, 12\]"):
        read_common(method, other, file, data.input_shape, data)


@pytest.mark.parametrize(
    ("known", "other", "key", "same"),
    [
        (ResNet(width=4, pool=False), ResNet(width=4), "pool", ResNet(width=4, pool=False)),
        (RNN(stride=2), RNN(), "stride", RNN(stride=2)),
        (TabNet(gamma=1.0), TabNet(), "gamma", TabNet(gamma=1.0)),
        (
            MonaiNet("ResNet10", {"conv1_t_stride": 2}),
            MonaiNet("ResNet10"),
            "conv1_t_stride",
            MonaiNet("ResNet10", {"conv1_t_stride": 2, "no_max_pool": False}),
        ),
        (
            MonaiNet("ResNet10"),
            MonaiNet("ResNet10", {"no_max_pool": True}),
            "no_max_pool",
            MonaiNet("ResNet10", {"conv1_t_stride": 1}),
        ),
        (MonaiNet("DenseNet121"), None, "", MonaiNet("DenseNet121", {"dropout_prob": 0.2})),
    ],
)
def test_what_else_no_shape_tells_is_compared(
    known: Architecture, other: Architecture | None, key: str, same: Architecture, tmp_path: Path
) -> None:
    """A job with pooling took the weights of a network without for its start, in silence."""
    write_images(tmp_path)
    told = {"kind": "checkpoint", "network": spec_of(known)}
    store.save(tmp_path / "start.safetensors", {"weight": torch.zeros(1)}, told)
    site = declare(tmp_path, TABLE)
    change_yaml(site, lambda content: content.update(checkpoints={"known": "start.safetensors"}))
    file, task = load_site_file(site), Classification("skin", size=(8, 8))
    data = task.load(file)
    check_fits("known", file, data, replace(task, architecture=same))
    if other is not None:
        with pytest.raises(DataError, match=f"its {type(other).__name__} has another '{key}' than the job's"):
            check_fits("known", file, data, replace(task, architecture=other))
