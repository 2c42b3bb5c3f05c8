# SPDX-License-Identifier: Apache-2.0
"""Cox's partial likelihood without a look at its numbers, for which a processor would wait for its GPU."""

import torch
from torch import Tensor


def cox(hazard: Tensor, time: Tensor, event: Tensor) -> Tensor:
    """The negative partial log likelihood, divided by the number of events; of ties by Efron's method. Without an event
    0; NaN where a hazard is not finite.

    torchsurv's, to which it is equal but for rounding, sorts the times and asks whether some are tied. Here every case
    is compared with every other one.

    Args:
        hazard: B logarithms of hazard ratios.
        time: B.
        event: B, whether it came at that time.
    """
    ratios, at_risk = hazard[None], time[None] >= time[:, None]
    risk = torch.where(at_risk, ratios, -torch.inf).logsumexp(dim=1)
    tied = (time[None] == time[:, None]) & event[None] & event[:, None]
    share = torch.where(tied, ratios - risk[:, None], -torch.inf).exp().sum(dim=1)  # of the risk, the tied events'
    before = tied.tril(-1).sum(dim=1) / tied.sum(dim=1).clamp(min=1)
    each = hazard - risk - torch.log1p(-before * share)
    return hazard.sum() * 0 - torch.where(event, each, 0.0).sum() / event.sum().clamp(min=1)
