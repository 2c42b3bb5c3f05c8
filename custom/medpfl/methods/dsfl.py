# SPDX-License-Identifier: Apache-2.0
"""DS-FL: every hospital learns the sharpened mean of all hospitals' probabilities on public data.

Itahara et al., "Distillation-Based Semi-Supervised Federated Learning for Communication-Efficient Collaborative
Training with Non-IID Private Data", IEEE TMC 2023, with entropy reduction aggregation. Deviations: no model at the
server, each hospital keeps its own (DS-pFL in the papers that compare with it); all public samples every round.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.methods.divergence import divergence
from medpfl.methods.on_public_data import PUBLIC, OnPublicData


@dataclass(frozen=True, kw_only=True)
class DSFL(OnPublicData):
    """Probabilities travel; their component is the uniform mean. See ``OnPublicData``.

    Args:
        temperature: of the sharpening, > 0: softmax of the mean probabilities divided by it.
    """

    temperature: float = 0.1

    cover: ClassVar = OnPublicData.cover
    probabilities: ClassVar = (PUBLIC,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.temperature <= 0:
            raise ConfigError(f"DSFL's temperature must be above 0, got {self.temperature}")

    def told(self, logits: Tensor) -> Tensor:
        return logits.softmax(dim=1)

    def lesson(self, heard: Tensor, logits: Tensor) -> Tensor:
        """The cross-entropy's gradient; sharpened here, which is the same as at the server."""
        return divergence((heard / self.temperature).softmax(dim=1), logits)
