# SPDX-License-Identifier: Apache-2.0
"""FedPer: the base of the network is averaged, its head stays at the hospital; both are trained together.

Arivazhagan, Aggarwal, Singh, Choudhary, "Federated Learning with Personalization Layers", arXiv:1912.00818, 2019.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.groups import base_and_head
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.features import check_head
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FedPer(Method):
    """Slot "model" (mean): the base, its BatchNorm statistics included. Private: the head.

    Args:
        head: module path of the head inside the network, or paths of its parts; None: its last layer.
    """

    head: str | tuple[str, ...] | None = None

    deploys: ClassVar = {"personal": "model"}
    cover: ClassVar = Cover()

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        base, _ = base_and_head(models, "model", self.head)
        return {"model": base}

    def local_round(self, site: Site) -> None:
        check_head(site, site.models["model"], self.head, "name another one in the method's 'head'")
        site.fit("model")
