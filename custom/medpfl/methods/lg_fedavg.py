# SPDX-License-Identifier: Apache-2.0
"""LG-FedAvg: the head of the network is averaged, its base (a local representation) stays at the hospital.

Liang, Liu, Ziyin, Allen, Auerbach, Brent, Salakhutdinov, Morency, "Think Locally, Act Globally: Federated Learning with
Local and Global Representations", arXiv:2001.01523, 2020. The complement of FedPer. Without the paper's optional
auxiliary losses on the representation, and without its FedAvg warm-up.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.groups import base_and_head
from medpfl.methods.fedper import FedPer


@dataclass(frozen=True, kw_only=True)
class LGFedAvg(FedPer):
    """Slot "model" (mean): the head. Private: the base, its BatchNorm statistics included.

    Args:
        head: module path of the head inside the network, or paths of its parts; None: its last layer. With
            ["layer3", "layer4", "fc"] of a ResNet it is the "SplitNN" of the CusFL paper.
    """

    cover: ClassVar = FedPer.cover

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        _, head = base_and_head(models, "model", self.head)
        return {"model": head}
