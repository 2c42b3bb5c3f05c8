# SPDX-License-Identifier: Apache-2.0
"""FedAvg's mean: one model for everybody (McMahan et al., 2017)."""

from dataclasses import dataclass

import numpy as np

from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix


@dataclass(frozen=True)
class Mean(Mixer):
    """A = 1 p^T with p_k = n_k / n (number of training samples), or 1 / K when ``uniform``."""

    uniform: bool = False

    def matrix(self, info: RoundInfo) -> Matrix:
        size = len(info.roster)
        weights = np.full(size, 1 / size) if self.uniform else info.sizes / info.sizes.sum()
        return np.tile(weights, (size, 1))
