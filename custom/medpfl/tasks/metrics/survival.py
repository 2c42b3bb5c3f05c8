# SPDX-License-Identifier: Apache-2.0
"""Metrics of hazard ratios, N logarithms, against N x 2 times and events. torchsurv's code computes them."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.data.samples import Samples, SiteData
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.measure import Direction

_PAIRS = 2000
"""Cases whose pairs are looked at all at once."""


class CIndex(Metric):
    """Harrell's concordance index: the share of the pairs of cases, of which one is known to have had the event first,
    in which that one has the larger hazard. NaN where there is no such pair or a hazard is no number."""

    name = "c_index"
    range = (0.0, 1.0)

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        time, event = samples.targets[:].unbind(dim=1)
        had, at_end = event > 0, time == time.max()
        # At the end those count as later who were last seen there without the event.
        pairs = (had & ~at_end).any() | ((had & at_end).any() & (~had & at_end).any())
        if not bool(pairs) or not bool(decisions.isfinite().all()):
            return math.nan
        from torchsurv.metrics.cindex import ConcordanceIndex

        return float(ConcordanceIndex()(decisions, had, time, instate=False))

    def of_resamples(self, decisions: Tensor, samples: Samples, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        """A pair counts as often as both of its cases were drawn; so the sums over pairs are quadratic forms."""
        if len(decisions) > _PAIRS or not bool(decisions.isfinite().all()):
            return super().of_resamples(decisions, samples, counts)
        from torchsurv.metrics.cindex import ConcordanceIndex

        time, event = samples.targets[:].numpy()[:, 0], samples.targets[:].numpy()[:, 1] > 0
        hazard = decisions.float().numpy()
        later = time[None] > time[:, None]
        comparable = event[:, None] & (later | ((time[None] == time[:, None]) & ~event[None]))
        tied = np.abs(hazard[None] - hazard[:, None]) <= ConcordanceIndex().tied_tol
        right = comparable * np.where(tied, 0.5, hazard[None] < hazard[:, None])
        drawn = counts.astype(np.float64)
        pairs = ((drawn @ comparable) * drawn).sum(axis=1)
        concordant = ((drawn @ right) * drawn).sum(axis=1)
        found: NDArray[np.float64] = np.where(pairs > 0, concordant / np.maximum(pairs, 1), np.nan)
        return found


def survivals(baseline: Sequence[float], hazards: Tensor) -> Tensor:
    """Survival of N cases at each of H horizons, N x H float64.

    Args:
        baseline: its cumulative hazard at each.
        hazards: N logarithms of hazard ratios.
    """
    whole = torch.tensor(baseline, dtype=torch.float64).log()[None] + hazards.double()[:, None]
    return (-whole.exp()).exp()


class _Brier(Metric):
    """Mean squared distance of the predicted survival at a time from whether the case survived it, where cases
    that were last seen earlier are made up for by weighting (Graf et al., Stat. Med. 1999), with the split's own
    distribution of censoring. NaN without a baseline, where the split has no event, or where nobody was
    seen for so long.

    Args:
        horizons: the times; ``baseline``: its cumulative hazard at each of them; empty where none was fitted.
    """

    direction: ClassVar[Direction] = "lower"
    range = (0.0, math.inf)  # the weights have no bound

    def __init__(self, horizons: Sequence[float], baseline: Sequence[float]):
        self.horizons, self.baseline = tuple(horizons), tuple(baseline)

    def at_horizons(self, decisions: Tensor, samples: Samples) -> Any:
        """torchsurv's ``BrierScore``, computed; None where it is not defined."""
        time, event = samples.targets[:].unbind(dim=1)
        horizons = torch.tensor(self.horizons, dtype=time.dtype)
        beyond = bool(time.max() > horizons[-1])  # both in single precision, in which 0.6 is more than 0.6
        known = bool((event > 0).any()) and bool(decisions.isfinite().all()) and beyond
        if not self.baseline or not known:
            return None
        from torchsurv.metrics.brier_score import BrierScore
        from torchsurv.stats.ipcw import get_ipcw

        if len(time) == 1:  # torchsurv takes two at least; of a case and its copy the mean is the case's
            decisions, time, event = decisions.expand(2), time.expand(2), event.expand(2)
        survival = survivals(self.baseline, decisions).float()
        score = BrierScore()
        seen = event > 0
        # An event is seen of whom censoring spares until just before it: who is last seen at the same time, as happens
        # where times are whole years, comes after it. torchsurv's own weights would count these, too, and be too large.
        # Places in the order say the same as times, and have room between them whatever the unit.
        place = torch.unique(time, return_inverse=True)[1].float() + 1
        score(survival, seen, time, horizons, get_ipcw(seen, place, place - 0.5), get_ipcw(seen, time, horizons))
        return score


class BrierAt(_Brier):
    """Of the horizon with this number, from 1."""

    def __init__(self, number: int, horizons: Sequence[float], baseline: Sequence[float]):
        super().__init__(horizons, baseline)
        self.number, self.name = number, f"brier_{number}"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        score = self.at_horizons(decisions, samples)
        return math.nan if score is None else float(score.brier_score[self.number - 1])


class IntegratedBrier(_Brier):
    """Its mean over the time from the first horizon to the last (trapezoidal rule)."""

    name = "integrated_brier"

    def suits(self, data: SiteData) -> None:
        if len(self.horizons) < 2:
            raise ConfigError("the metric 'integrated_brier' needs at least 2 horizons; of one there is 'brier_1'")

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        score = self.at_horizons(decisions, samples)
        return math.nan if score is None else float(score.integral())
