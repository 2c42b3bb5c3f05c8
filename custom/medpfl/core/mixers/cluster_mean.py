# SPDX-License-Identifier: Apache-2.0
"""IFCA's mean of one cluster (Ghosh et al., NeurIPS 2020): over the hospitals that chose it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from torch import Tensor

from medpfl.core.mapped import pieces
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State, mix

CHOSEN = "chosen"
"""Module whose entry in the slot, 1 or 0, says whether the hospital chose the slot's cluster."""


@dataclass(frozen=True)
class ClusterMean(Mixer):
    """A = 1 p^T with p_k = n_k / n over the hospitals that answered and chose; nobody did: the model stays."""

    apart: ClassVar = "where no other hospital has chosen the same model"

    @property
    def remembers(self) -> Literal["copies"]:
        return "copies"

    def matrix(self, info: RoundInfo) -> Matrix:
        raise TypeError("ClusterMean's matrix depends on who chose the cluster")

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], Matrix]:
        flag = next(key for key in states[0] if key.startswith(f"{CHOSEN}."))
        chose = np.array([float(state[flag]) == 1.0 for state in states])
        weights = np.where(chose & np.asarray(info.present), info.sizes, 0.0)
        size = len(states)
        if weights.any():
            matrix = np.tile(weights / weights.sum(), (size, 1))
            return mix(matrix, states, in_place=True), matrix
        # What comes back of it is not what was sent where a codec rounds it, and then differs between hospitals.
        for state, last in zip(states, info.known, strict=True):
            for key, kept in last.items():
                if kept.is_floating_point():
                    for target, source in pieces(state[key], kept):
                        target.copy_(source)
        return [dict(state) for state in states], np.eye(size)
