# SPDX-License-Identifier: Apache-2.0
"""pFedMe's server step goes beyond the mean with weights alone."""

import torch

from medpfl.core.mixers import RelaxedMean
from one_slot import OneSlot


def test_statistics_of_batch_norm_become_the_mean() -> None:
    """With beta 2 a variance that fell from 1 to 0.4 became -0.2, and what the common model says NaN."""
    start = {
        "norm.weight": torch.tensor([1.0]),
        "norm.running_mean": torch.tensor([0.0]),
        "norm.running_var": torch.tensor([1.0]),
        "norm.num_batches_tracked": torch.tensor(3),
    }
    server = OneSlot(RelaxedMean(beta=2.0), start, {"a": 30.0, "b": 10.0})
    sent = [
        {**start, "norm.weight": torch.tensor([0.4]), "norm.running_var": torch.tensor([variance])}
        for variance in (0.5, 0.1)
    ]
    mixed, _ = server.mix(sent)
    for state in mixed:
        torch.testing.assert_close(state["norm.weight"], torch.tensor([-0.2]))
        torch.testing.assert_close(state["norm.running_var"], torch.tensor([0.4]))
        torch.testing.assert_close(state["norm.running_mean"], torch.tensor([0.0]))
        assert state["norm.num_batches_tracked"] == 3
