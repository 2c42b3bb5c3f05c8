# SPDX-License-Identifier: Apache-2.0
"""A mean that the server approaches from its own last model instead of jumping to it.

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1 (its last
step):  w  <-  (1 - beta) w + beta mean_k w_k.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.mixers.contract import RoundInfo
from medpfl.core.mixers.mean import Mean
from medpfl.core.mixing import State


@dataclass(frozen=True)
class RelaxedMean(Mean):
    """The server remembers its model, so that no K x K matrix says what it does. Integer entries are not averaged.

    Args:
        uniform: every hospital counts alike, as in the paper; else by its number of training samples.
        beta: how far the server goes, > 0. 1 is the mean itself, above 1 goes beyond it.
    """

    beta: float = 1.0
    _last: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 < self.beta < float("inf"):
            raise ConfigError(f"RelaxedMean's beta must be above 0 and finite, got {self.beta}")

    def start(self, state: State) -> None:
        self.load_state({key: tensor for key, tensor in state.items() if tensor.is_floating_point()})

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], None]:
        new, _ = super().mix(states, info)  # all rows are equal: everybody, absent or not, has the mean now
        for key, last in self._last.items():
            last.mul_(1 - self.beta).add_(new[0][key], alpha=self.beta)
            for state in new:
                state[key].copy_(last)
        return new, None

    def state(self) -> dict[str, Tensor]:
        return dict(self._last)

    def load_state(self, state: State) -> None:
        self._last.clear()
        self._last.update({key: tensor.clone() for key, tensor in state.items()})
