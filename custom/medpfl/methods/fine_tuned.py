# SPDX-License-Identifier: Apache-2.0
"""FedAvg whose personal models are its common model after one more local round: fine-tuning, round by round."""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.methods.contract import Build, Method, Site
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FineTuned(Method):
    """Slot "model" (mean): the common network, as in FedAvg. Private: the hospital's copy of it as it was sent, before
    the mean, which predicts. It costs nothing beside FedAvg."""

    deploys: ClassVar = {"personal": "personal"}
    cover: ClassVar = Cover()
    after_steps: ClassVar = ("personal",)

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network(), "personal": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": under(models, "model")}

    def components(self) -> dict[str, Mixer]:
        return {"model": Mean()}

    def local_round(self, site: Site) -> None:
        site.fit("model")
        site.models["personal"].load_state_dict(site.models["model"].state_dict())
