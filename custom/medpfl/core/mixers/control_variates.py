# SPDX-License-Identifier: Apache-2.0
"""SCAFFOLD's server control variate (Karimireddy et al., ICML 2020, Algorithm 1): c = 1/K sum_i c_i."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State


@dataclass(frozen=True)
class ControlVariates(Mixer):
    """The slot's hospitals send their own c_i and receive c, the mean over the whole roster, not over who answered.

    Every hospital's last c_i is remembered (zero before its first), so c stays that mean when some are absent, and a
    lost answer does not leave an error behind for good as it would if differences were added up.
    """

    _last: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def start(self, state: State) -> None:
        self._last.clear()

    def matrix(self, info: RoundInfo) -> Matrix:
        raise TypeError("ControlVariates applies no mixing matrix")

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], None]:
        mean: dict[str, Tensor] = {}
        for key in states[0]:
            total = torch.zeros_like(states[0][key], dtype=torch.float64)
            for site, state, present in zip(info.roster, states, info.present, strict=True):
                if present:
                    self._last[f"{site}/{key}"] = state[key].clone()
                if f"{site}/{key}" in self._last:
                    total += self._last[f"{site}/{key}"]
            mean[key] = (total / len(states)).to(states[0][key].dtype)
        return [{key: tensor.clone() for key, tensor in mean.items()} for _ in states], None

    def state(self) -> dict[str, Tensor]:
        return dict(self._last)

    def load_state(self, state: State) -> None:
        self._last.clear()
        self._last.update({key: tensor.clone() for key, tensor in state.items()})
