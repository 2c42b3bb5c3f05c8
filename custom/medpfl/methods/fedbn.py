# SPDX-License-Identifier: Apache-2.0
"""FedBN: everything is averaged but the BatchNorm layers, which stay at the hospital.

Li, Jiang, Zhang, Kamp, Dou, "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021.
BatchNorm layers are found by type; their running statistics stay together with their weights and biases. A network
without BatchNorm is refused: instance and group norm keep no statistics of the hospital's data, and what would be left
of the method is no longer what the paper describes.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.groups import BATCH_NORM, of_type, under, without
from medpfl.methods.contract import Build, Method, Site
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FedBN(Method):
    """Slot "model" (mean): all entries outside BatchNorm layers. Private: BatchNorm, its statistics included."""

    deploys: ClassVar = {"personal": "model"}
    cover: ClassVar = Cover(record="it needs BatchNorm, which mixes the cases of a batch")

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": without(under(models, "model"), of_type(models, BATCH_NORM, "model", "FedBN"))}

    def local_round(self, site: Site) -> None:
        site.fit("model")
