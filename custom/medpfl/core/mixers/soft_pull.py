# SPDX-License-Identifier: Apache-2.0
"""SoftPull: every hospital's model is pulled softly towards the others.

Xu et al., "Closing the Generalization Gap of Cross-silo Federated Medical Image Segmentation", CVPR 2022, Eq. (11).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from medpfl.core.errors import ConfigError
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix

_TINY = 1e-12


@dataclass(frozen=True)
class SoftPull(Mixer):
    """A[k, k] = lam and A[k, j] = (1 - lam) / (K - 1).  Eq. (11)

    Args:
        lam: the weight a hospital's own model keeps, in [1/K, 1]. 1 is local training, 1/K the uniform FedAvg; below
            1/K a hospital would get less of itself than of the others, which is refused.
    """

    lam: float = 0.7

    def __post_init__(self) -> None:
        if not 0 < self.lam <= 1:
            raise ConfigError(f"SoftPull's lam must be in [1/K, 1]; got {self.lam}")

    def check(self, roster: Sequence[str]) -> None:
        if self.lam < 1 / len(roster) - _TINY:
            raise ConfigError(
                f"SoftPull's lam must be in [1/K, 1]; with {len(roster)} hospitals at least {1 / len(roster):.4g}, "
                f"got {self.lam}"
            )

    def matrix(self, info: RoundInfo) -> Matrix:
        size = len(info.roster)
        if size == 1:
            return np.ones((1, 1))  # nobody to be pulled towards: Eq. (11) would divide by zero
        if abs(self.lam - 1 / size) < _TINY:  # one model for all, to the last bit: the absent are given it, too
            return np.full((size, size), 1 / size)
        matrix = np.full((size, size), (1 - self.lam) / (size - 1))
        np.fill_diagonal(matrix, self.lam)
        return matrix
