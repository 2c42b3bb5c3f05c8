# SPDX-License-Identifier: Apache-2.0
"""FedDF: every architecture's model is distilled from the ensemble of all, on unlabelled public data.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020, for models of different
kinds, one hospital a kind: then no weights are averaged and a student starts from its own hospital's model. The teacher
is the softmax of the mean logits (AVGLOGITS). Deviations: the distillation runs at the hospitals, because the server
holds no data here, and so it needs no model either; a fixed number of passes with the local optimiser instead of early
stopping on a validation set.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from medpfl.methods.divergence import divergence
from medpfl.methods.on_public_data import OnPublicData


@dataclass(frozen=True, kw_only=True)
class FedDF(OnPublicData):
    """Logits travel; their component is the uniform mean. See ``OnPublicData``."""

    cover: ClassVar = OnPublicData.cover

    def told(self, logits: Tensor) -> Tensor:
        return logits

    def lesson(self, heard: Tensor, logits: Tensor) -> Tensor:
        return divergence(heard.softmax(dim=1), logits)
