# SPDX-License-Identifier: Apache-2.0
"""A method that trains nothing, for measuring what a round itself costs."""

import time
from dataclasses import dataclass

import torch

from medpfl.methods.contract import Site
from medpfl.methods.softpull import SoftPull


@dataclass(frozen=True, kw_only=True)
class Empty(SoftPull):
    """SoftPull's networks and slot; the local round moves every weight a little, as training does: updates of length
    zero are measured more carefully by the server, which takes longer.

    Args:
        slowest: seconds that the first hospital takes for it, >= 0.
    """

    slowest: float = 0.0

    def local_round(self, site: Site) -> None:
        if site.index == 0:
            time.sleep(self.slowest)
        with torch.no_grad():
            for parameter in site.models["model"].parameters():
                parameter.add_(1e-4)
