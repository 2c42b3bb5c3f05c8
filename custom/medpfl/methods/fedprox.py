# SPDX-License-Identifier: Apache-2.0
"""FedProx: FedAvg whose local training is held near the model that the hospital received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020,
Algorithm 2: hospital k lowers  F_k(w) + mu/2 ||w - w_t||^2,  w_t as received; squared, over parameters only.
Deviation: every hospital trains equally long; the paper also lets slow ones stop early.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.proximal import Proximal
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FedProx(Method):
    """Slot "model" (mean): the whole network. Nothing is private.

    Args:
        mu: strength of the proximal term, >= 0. 0 is FedAvg.
    """

    mu: float = 0.01

    deploys: ClassVar = {"global": "model"}
    cover: ClassVar = Cover()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0:
            raise ConfigError(f"FedProx's mu must be at least 0, got {self.mu}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def local_round(self, site: Site) -> None:
        site.fit("model", Proximal(site.models["model"], self.mu))  # anchored before the first step
