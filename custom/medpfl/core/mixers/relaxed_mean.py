# SPDX-License-Identifier: Apache-2.0
"""A mean that the server approaches from its own last model instead of jumping to it.

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1 (its last
step):  w  <-  (1 - beta) w + beta mean_k w_k.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.mapped import pieces, share
from medpfl.core.mixers.contract import RoundInfo
from medpfl.core.mixers.mean import Mean
from medpfl.core.mixing import State


@dataclass(frozen=True)
class RelaxedMean(Mean):
    """The server remembers its model, so that no K x K matrix says what it does. Integer entries are not averaged.
    Buffers (BatchNorm's statistics, say) are no weights, and become the mean itself: beyond it a variance can be
    negative.

    Args:
        uniform: every hospital counts alike, as in the paper; else by its number of training samples.
        beta: how far the server goes, > 0. 1 is the mean itself, above 1 goes beyond it.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        if self.beta <= 0:
            raise ConfigError(f"RelaxedMean's beta must be above 0, got {self.beta}")

    @property
    def remembers(self) -> Literal["copies"]:
        return "copies"

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], None]:
        new, _ = super().mix(states, info)  # all rows are equal: everybody, absent or not, has the mean now
        for key, last in info.known[0].items():
            if not last.is_floating_point() or key in info.buffers:
                continue
            for base, *parts in pieces(last, *(state[key] for state in new), values=share(len(new))):
                relaxed = (base * (1 - self.beta)).add_(parts[0], alpha=self.beta)
                for part in parts:
                    part.copy_(relaxed)
        return new, None
