# SPDX-License-Identifier: Apache-2.0
"""A method that trains nothing, for measuring what a round itself costs."""

from dataclasses import dataclass

from medpfl.methods.contract import Site
from medpfl.methods.softpull import SoftPull


@dataclass(frozen=True, kw_only=True)
class Empty(SoftPull):
    """SoftPull's networks and slot; the local round does nothing."""

    def local_round(self, site: Site) -> None:
        pass
