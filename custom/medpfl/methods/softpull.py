# SPDX-License-Identifier: Apache-2.0
"""SoftPull alone: one personal model a hospital, pulled softly towards the others' after every round.

Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation", CVPR 2022: the personal
model of Algorithm 1 (line 9) with Eq. (11) at the server. FedSM's global model and selector are not part of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core import mixers
from medpfl.methods.base import Build, Method, Site


@dataclass(frozen=True, kw_only=True)
class SoftPull(Method):
    """The pull itself, and its lam, are the server component ``medpfl.core.mixers.SoftPull`` of slot "model"."""

    deploys: ClassVar = {"personal": "model"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def components(self) -> dict[str, mixers.Mixer]:
        return {"model": mixers.SoftPull()}

    def local_round(self, site: Site) -> None:
        site.fit("model")  # Alg. 1, line 9
