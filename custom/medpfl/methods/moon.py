# SPDX-License-Identifier: Apache-2.0
"""MOON: local training is kept near the common model's representation and away from the hospital's previous one.

Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021, Algorithm 1. z is the input of the network's head
(the paper adds a projection head to its networks); of feature maps, all values of a sample.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.copied import copied
from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.features import DEFINE, check_head, with_features
from medpfl.privacy.contract import Cover


def contrast(z: Tensor, common: Tensor, previous: Tensor, temperature: float) -> Tensor:
    """Mean of -log( e^(s_c/T) / (e^(s_c/T) + e^(s_p/T)) ), s = cosine of z with ``common`` and with ``previous``."""
    z = z.float().flatten(1)
    cosines = [torch.cosine_similarity(z, other.float().flatten(1)) for other in (common, previous)]
    logits = torch.stack(cosines, dim=1) / temperature
    return nn.functional.cross_entropy(logits, torch.zeros(len(z), dtype=torch.long, device=z.device))


@dataclass(frozen=True, kw_only=True)
class Moon(Method):
    """Slot "model" (mean). Private: "previous", the model this hospital sent last; at first the initial one.

    Args:
        mu: weight of the contrastive term, >= 0; 0 is FedAvg.
        temperature: of the contrastive term, > 0.
    """

    mu: float = 1.0
    temperature: float = 0.5

    deploys: ClassVar = {"moon": "model"}
    cover: ClassVar = Cover()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu < 0:
            raise ConfigError(f"Moon's mu must be at least 0, got {self.mu}")
        if self.temperature <= 0:
            raise ConfigError(f"Moon's temperature must be above 0, got {self.temperature}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network(), "previous": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": under(models, "model")}

    def local_round(self, site: Site) -> None:
        check_head(site, site.models["model"], None, DEFINE)
        network, previous = site.models["model"].train(), site.models["previous"].eval()
        common = copied(network).eval()  # as received
        for batch in site.training_batches():
            with site.autocast():
                with torch.no_grad():
                    z_common = with_features(common, batch.inputs)[1]
                    z_previous = with_features(previous, batch.inputs)[1]
                outputs, z = with_features(network, batch.inputs)
                loss = site.task.loss(outputs, batch.targets)
            site.step("model", loss + self.mu * contrast(z, z_common, z_previous, self.temperature))
            site.last_loss = loss  # comparable with other methods'
        previous.load_state_dict(network.state_dict())
