# SPDX-License-Identifier: Apache-2.0
"""SoftPull alone: one personal model a hospital, pulled softly towards the others' after every round.

Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation", CVPR 2022: the personal
model of Algorithm 1 (line 9) with Eq. (11) at the server. FedSM's global model and selector are not part of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core import mixers
from medpfl.core.groups import under
from medpfl.methods.contract import Build, Method, Site
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class SoftPull(Method):
    """The pull itself, and its lam, are the server component ``medpfl.core.mixers.SoftPull`` of slot "model". Private:
    the network as it was sent, before the pull, which is evaluated beside it."""

    deploys: ClassVar = {"personal": "model", "personal_before_pull": "before_pull"}
    cover: ClassVar = Cover()
    after_steps: ClassVar = ("personal_before_pull",)

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network(), "before_pull": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": under(models, "model")}

    def components(self) -> dict[str, mixers.Mixer]:
        return {"model": mixers.SoftPull()}

    def local_round(self, site: Site) -> None:
        site.fit("model")  # Alg. 1, line 9
        site.models["before_pull"].load_state_dict(site.models["model"].state_dict())
