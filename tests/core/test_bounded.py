# SPDX-License-Identifier: Apache-2.0
"""Networks that are refused before their memory is taken."""

import pytest
from torch import nn

from medpfl.core.errors import PolicyRefused
from medpfl.core.sizes import Bounded, TooLarge
from medpfl.data.policy import Policy
from medpfl.rounds.hospital.policy import building


def test_what_is_small_enough_is_made() -> None:
    with Bounded(10_000):
        assert nn.Linear(60, 100).weight.shape == (100, 60)


@pytest.mark.parametrize("width", [100_000, 2**31, 2**62, 10**30])
def test_a_width_beyond_what_torch_can_count_is_too_large_like_any_other(width: int) -> None:
    """3 * 2^62 entries are a negative number of 64 bits, and 10^30 is none at all."""
    with pytest.raises(TooLarge, match="the job's networks have more than 10000 entries"), Bounded(10_000):
        nn.Linear(3, width)
    refused = pytest.raises(PolicyRefused, match=r"'most_parameters'\) allows at most 1000 parameters")
    with refused, building(Policy(most_parameters=1000)):
        nn.Conv2d(width, 3, 3)
