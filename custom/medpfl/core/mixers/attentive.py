# SPDX-License-Identifier: Apache-2.0
"""FedAMP's attentive message passing (Huang et al., "Personalized Cross-Silo Federated Learning on Non-IID Data",
AAAI 2021): the more alike two hospitals' models are, the more they hear of each other."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.mapped import pieces
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State, mix


@dataclass(frozen=True)
class AttentiveMessages(Mixer):
    """xi_ij = alpha A'(|w_i - w_j|^2) with A(t) = 1 - exp(-t / sigma), and xi_ii = 1 - sum_j xi_ij.

    Args:
        alpha: step size, >= 0, at most sigma / (K - 1): then no hospital's own weight can be negative.
        sigma: scale of the squared distances, > 0.
    """

    alpha: float
    sigma: float

    apart: ClassVar = "(less its own part) to a hospital whose model is near this one's and far from all others'"

    def __post_init__(self) -> None:
        if self.sigma <= 0:
            raise ConfigError(f"AttentiveMessages' sigma must be above 0, got {self.sigma}")
        if self.alpha < 0:
            raise ConfigError(f"AttentiveMessages' alpha must be at least 0, got {self.alpha}")

    def check(self, roster: Sequence[str]) -> None:
        if self.alpha * (len(roster) - 1) > self.sigma * (1 + 1e-12):
            raise ConfigError(
                f"AttentiveMessages' alpha must be at most sigma / (K - 1) = {self.sigma / (len(roster) - 1):.4g} with "
                f"{len(roster)} hospitals, got {self.alpha}"
            )

    def matrix(self, info: RoundInfo) -> Matrix:
        raise TypeError("AttentiveMessages' matrix depends on the models")

    def weights(self, states: Sequence[State], present: Sequence[bool]) -> Matrix:
        """The matrix; who is absent is heard by nobody and keeps the tensors it was sent last."""
        size = len(states)
        matrix = np.zeros((size, size))
        for i in range(size):
            for j in range(i):
                if present[i] and present[j]:
                    share = self.alpha / self.sigma * np.exp(-_distance(states[i], states[j]) / self.sigma)
                    matrix[i, j] = matrix[j, i] = share
        np.fill_diagonal(matrix, 1 - matrix.sum(axis=1))
        return matrix

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], Matrix]:
        matrix = self.weights(states, info.present)
        return mix(matrix, states, in_place=True), matrix


def _distance(one: State, other: State) -> float:
    """Squared Euclidean distance over all floating-point entries."""
    return float(
        sum(
            (mine.double() - theirs.double()).square().sum()
            for key in one
            if one[key].is_floating_point()
            for mine, theirs in pieces(one[key], other[key])
        )
    )
