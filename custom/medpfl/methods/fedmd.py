# SPDX-License-Identifier: Apache-2.0
"""FedMD: every hospital matches the mean logits on public data, then trains on its own.

Li, Wang, "FedMD: Heterogenous Federated Learning via Model Distillation", NeurIPS 2019 workshop, Algorithm 1 (digest,
revisit, communicate); the loss of the digest, mean absolute difference, is that of the released code. Deviations: no
training on public labels beforehand; all public samples every round instead of a subset.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from medpfl.methods.contract import Site
from medpfl.methods.on_public_data import OnPublicData


@dataclass(frozen=True, kw_only=True)
class FedMD(OnPublicData):
    """See ``OnPublicData``. Logits travel; their component is the uniform mean."""

    cover: ClassVar = OnPublicData.cover

    def told(self, logits: Tensor) -> Tensor:
        return logits

    def lesson(self, heard: Tensor, logits: Tensor) -> Tensor:
        return (logits - heard).abs().mean()

    def local_round(self, site: Site) -> None:
        if site.round > 1:  # nobody has told anything before the first round
            self.learn(site)
        super().local_round(site)

    def after_mixing(self, site: Site) -> None:
        """Nothing: a round ends with the private training."""
