# SPDX-License-Identifier: Apache-2.0
"""KT-pFL: every hospital learns its own mixture of all hospitals' probabilities on public data.

Zhang et al., "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS 2021. The mixture's
weights are learnt at the server (``medpfl.core.mixers.KnowledgeTransfer``). Deviations: probabilities at temperature 1;
all public samples every round.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from medpfl.core.mixers import KnowledgeTransfer, Mixer
from medpfl.methods.divergence import divergence
from medpfl.methods.on_public_data import PUBLIC, OnPublicData


@dataclass(frozen=True, kw_only=True)
class KTpFL(OnPublicData):
    """Probabilities travel; their component is ``KnowledgeTransfer``. See ``OnPublicData``."""

    probabilities: ClassVar = (PUBLIC,)
    cover: ClassVar = OnPublicData.cover

    def components(self) -> dict[str, Mixer]:
        return {PUBLIC: KnowledgeTransfer()}

    def told(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1)

    def lesson(self, heard: Tensor, logits: Tensor) -> Tensor:
        return divergence(heard, logits)
