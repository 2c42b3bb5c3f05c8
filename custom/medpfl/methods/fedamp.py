# SPDX-License-Identifier: Apache-2.0
"""FedAMP: every hospital trains its own model near an anchor that the server makes of the models most like it.

Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data", AAAI 2021. The received tensors are the
anchor and never replace the model; the proximal term is the squared norm.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import NoDefault
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.proximal import Proximal
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FedAMP(Method):
    """Slot "anchor" (``AttentiveMessages``): parameters w up, u down. The model's buffers stay; its w is kept, too.

    Args:
        mu: weight of mu / 2 |w - u|^2, >= 0; the paper's lambda / alpha. 0 is local training.
    """

    mu: float = 0.1

    deploys: ClassVar = {"personal": "model"}
    cover: ClassVar = Cover(derived=("anchor",))
    after_steps: ClassVar = ("personal",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0:
            raise ConfigError(f"FedAMP's mu must be at least 0, got {self.mu}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        network = build.network()
        anchor = [nn.Parameter(weight.detach().clone(), requires_grad=False) for weight in network.parameters()]
        return {"model": network, "anchor": nn.ParameterList(anchor)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"anchor": under(models, "anchor")}

    def components(self) -> dict[str, NoDefault]:
        return {"anchor": NoDefault("name AttentiveMessages with its alpha and sigma")}

    @property
    def anew(self) -> tuple[str, ...]:
        return ("anchor",)

    def local_round(self, site: Site) -> None:
        site.fit("model", Proximal(site.models["model"], self.mu, anchor=site.models["anchor"]))
        weights = site.models["model"].parameters()
        site.outbox["anchor"] = {f"anchor.{index}": weight for index, weight in enumerate(weights)}
