# SPDX-License-Identifier: Apache-2.0
"""FedAP: BatchNorm stays home, and a hospital hears most of those whose features are distributed like its own.

Lu, Wang, Chen, Qin, Xu, Dimitriadis, Qin, "Personalized Federated Learning with Adaptive Batchnorm for Healthcare",
IEEE Transactions on Big Data 2022, Algorithm 1, with d-FedAP and f-FedAP. The weights are those of the server component
``StatisticsDistance``, which says which statistics it wants. Deviations: docs/methods/fedap.md.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import BATCH_NORM, name_of, of_type, running_statistics, under, without
from medpfl.core.mixers import Mixer, StatisticsDistance
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.fedap.feature_statistics import (
    batch_norm_layers,
    input_statistics,
    observed,
    running_moments,
)
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FedAP(Method):
    """Slot "model" (``StatisticsDistance``): all entries outside BatchNorm layers. Private: BatchNorm.

    Args:
        batch_norm: "local" is FedAP; "shared" mixes BatchNorm like everything else (the paper's SBN), and is what a
            network without BatchNorm needs.
        pretrained: name of a checkpoint that every site file declares. It is used for the statistics only: training
            starts from the job's initial weights. None: the statistics are those of the common initial network.
    """

    batch_norm: Literal["local", "shared"] = "local"
    pretrained: str | None = None

    deploys: ClassVar = {"personal": "model"}
    cover: ClassVar = Cover(
        record="the statistics of the hospital's features, which it sends, have no noise",
        update="the statistics of the hospital's features, which it sends, have no noise",
    )

    def checkpoints(self) -> list[str]:
        return [] if self.pretrained is None else [self.pretrained]

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        keys = under(models, "model")
        if self.batch_norm == "shared":
            return {"model": keys}
        if not batch_norm_layers(models["model"]):
            raise ConfigError(
                f"FedAP keeps BatchNorm layers at the hospital, and the network {name_of(models['model'])} has none: "
                "take a network with BatchNorm, or d-FedAP: FedAP's batch_norm 'shared' and the server component's "
                "statistics 'head_inputs'"
            )
        return {"model": without(keys, of_type(models, BATCH_NORM, "model"))}

    def kept(self, models: nn.ModuleDict) -> list[str]:
        return running_statistics(models, "model") if self.batch_norm == "shared" and batch_norm_layers(models) else []

    def components(self) -> dict[str, Mixer]:
        return {"model": StatisticsDistance()}

    def local_round(self, site: Site) -> None:
        site.fit("model")

    def statistics(self, name: str, site: Site) -> dict[str, Tensor]:
        """Mean and variance of each channel, layer by layer: of what enters the BatchNorm layers or the head over the
        training part, or the BatchNorm layers' own running statistics (which is what f-FedAP sends)."""
        if name == "batch_norm_running":
            return running_moments(site.models["model"])
        if name not in ("batch_norm_inputs", "head_inputs"):
            return super().statistics(name, site)
        return input_statistics(name, observed(site.models["model"], self.pretrained, site.checkpoints), site)
