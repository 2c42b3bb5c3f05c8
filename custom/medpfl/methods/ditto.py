# SPDX-License-Identifier: Apache-2.0
"""Ditto: FedAvg, and beside it a personal model that is held near the common one.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1:
v_k  <-  v_k - lr (grad F_k(v_k) + lam (v_k - w_t)),  w_t the common model as received. The personal model takes as many
steps a round as the common one, on the same batches.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.proximal import Proximal
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class Ditto(Method):
    """Slot "global" (mean): the common network, trained as in FedAvg. Private: the personal network.

    Args:
        lam: strength of the pull towards the common model, >= 0. 0 is local training.
    """

    lam: float = 0.1

    deploys: ClassVar = {"personal": "personal", "global": "global"}
    cover: ClassVar = Cover(at_home=("personal",))
    after_steps: ClassVar = ("personal",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam < 0:
            raise ConfigError(f"Ditto's lam must be at least 0, got {self.lam}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"global": build.network(), "personal": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"global": under(models, "global")}

    def components(self) -> dict[str, Mixer]:
        return {"global": Mean()}

    def local_round(self, site: Site) -> None:
        pull = Proximal(site.models["personal"], self.lam, anchor=site.models["global"])  # before it is trained
        site.fit("global")
        site.fit("personal", pull)
