# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD's server control variate (Karimireddy et al., ICML 2020, Algorithm 1): c = 1/K sum_i c_i."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from medpfl.core.mapped import pieces, share
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State


@dataclass(frozen=True)
class ControlVariates(Mixer):
    """The slot's hospitals send their own c_i and receive c, the mean over the whole roster, not over who answered.

    Every hospital's last c_i is remembered (before its first the zero with which all begin), so c stays that mean when
    some are absent, and a lost answer does not leave an error behind for good as it would if differences were added up.
    """

    @property
    def remembers(self) -> Literal["answers"]:
        return "answers"

    def matrix(self, info: RoundInfo) -> Matrix:
        raise TypeError("ControlVariates applies no mixing matrix")

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], None]:
        count = len(states)
        for key in states[0]:
            tensors = [state[key] for state in (*info.known, *states)]
            for parts in pieces(*tensors, values=share(count)):
                total = torch.zeros_like(parts[0], dtype=torch.float64)
                for last in parts[:count]:
                    total += last
                mean = (total / count).to(parts[0].dtype)
                for target in parts[count:]:
                    target.copy_(mean)
        return [dict(state) for state in states], None
