# SPDX-License-Identifier: Apache-2.0
"""FedAP's server: the more alike two hospitals' feature statistics are, the more they hear of each other.

Lu, Wang, Chen, et al., "Personalized Federated Learning with Adaptive Batchnorm for Healthcare", IEEE Transactions on
Big Data 2022, Eq. (2) and (6) to (8).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State
from medpfl.core.similarity import check_statistics, distances, inverse_distance_weights

Statistics = Literal["batch_norm_inputs", "head_inputs", "batch_norm_running"]


@dataclass(frozen=True)
class StatisticsDistance(Mixer):
    """W = lam I + (1 - lam) w, w_ij ~ 1 / d_ij, once for the whole run; every hospital alike until it is there.

    A hospital that gave no statistics hears of all others equally, and of those that gave them none hears of it. One
    that alone gave them has nobody to be compared with: it is as if it had given none.

    Args:
        lam: the weight a hospital's own model keeps, in [0, 1]; 1 is local training.
        statistics: "batch_norm_inputs" is the original FedAP, "head_inputs" d-FedAP (inputs of the last layer),
            "batch_norm_running" f-FedAP (running means and variances, which need rounds of training before them).
        from_round: the first round that is mixed by W, >= 1; until then by the uniform mean (FedBN). Of f-FedAP,
            R/2 + 1 of R rounds; 1 for the others, whose statistics do not change while the job trains.
    """

    lam: float = 0.5
    statistics: Statistics = "batch_norm_inputs"
    from_round: int = 1

    apart: ClassVar = "(less its own part) to a hospital whose statistics are far nearer to this one's than all others'"

    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.lam <= 1:
            raise ConfigError(f"StatisticsDistance's lam must be in [0, 1], got {self.lam}")
        running = self.statistics == "batch_norm_running"
        if running and self.from_round < 2:
            raise ConfigError(
                "StatisticsDistance's from_round must be at least 2 for 'batch_norm_running' (half of the rounds plus "
                f"one), got {self.from_round}: running statistics come from training"
            )
        if not running and self.from_round != 1:
            raise ConfigError(
                f"StatisticsDistance's from_round must be 1 for '{self.statistics}', got {self.from_round}"
            )

    def check_length(self, rounds: int) -> None:
        if self.from_round > rounds:
            raise ConfigError(
                f"StatisticsDistance's from_round is {self.from_round}, and the job has {rounds} rounds: all of them "
                f"would be FedBN's; f-FedAP has half of the rounds plus one, here {rounds // 2 + 1}"
            )

    def start(self, state: State) -> None:
        self._state.clear()

    def wants(self, round_number: int, hospitals: int) -> str | None:
        return self.statistics if round_number >= self.from_round and not self._state else None

    def check_statistics(self, statistics: State) -> None:
        check_statistics(statistics)

    def take_statistics(self, statistics: Sequence[State | None], info: RoundInfo) -> None:
        size = len(statistics)
        known = [index for index, entry in enumerate(statistics) if entry is not None]
        known = known if len(known) > 1 else []
        distance = distances([entry for index in known if (entry := statistics[index]) is not None])
        weights = (np.full((size, size), 1.0) - np.eye(size)) * (1 - self.lam) / max(size - 1, 1)
        weights += np.eye(size) * (self.lam if size > 1 else 1.0)
        weights[np.ix_(known, range(size))] = 0.0
        weights[np.ix_(known, known)] = inverse_distance_weights(distance, self.lam)
        everything = np.full((size, size), np.nan)
        everything[np.ix_(known, known)] = distance
        self._state.update(weights=torch.from_numpy(weights), distances=torch.from_numpy(everything))

    def matrix(self, info: RoundInfo) -> Matrix:
        size = len(info.roster)
        if not self._state:
            return np.full((size, size), 1 / size)
        return self._state["weights"].numpy().copy()

    def state(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load_state(self, state: State) -> None:
        self._state.clear()
        self._state.update({key: tensor.clone() for key, tensor in state.items()})
