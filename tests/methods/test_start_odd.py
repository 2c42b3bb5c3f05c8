# SPDX-License-Identifier: Apache-2.0
"""Start weights of which something would be lost without a word."""

import pytest
import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.methods.start import Start, Started


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
