# SPDX-License-Identifier: Apache-2.0
"""CusFL's server, Eq. (5):  xi  <-  xi + 1/N sum_k Delta theta_k  over all N hospitals of the roster.

Delta theta_k is what hospital k's own model moved by, and an absent hospital's is zero. Summed up over the rounds from
a common start (hospitals that start otherwise take no part) this is the mean of the newest model of every hospital.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from medpfl.core.mixers.contract import RoundInfo
from medpfl.core.mixers.mean import Mean
from medpfl.core.mixing import Matrix, State, mix, restrict


@dataclass(frozen=True)
class MeanOfLatest(Mean):
    """A = 1 p^T applied to what each hospital sent last, at first the initial tensors. When all answer it is ``Mean``.

    The server keeps a copy of the slot for each hospital.
    """

    _initial: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    _latest: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def start(self, state: State) -> None:
        self._latest.clear()
        self._initial.clear()
        self._initial.update({key: tensor.clone() for key, tensor in state.items()})

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], Matrix]:
        stack = []
        for site, state, present in zip(info.roster, states, info.present, strict=True):
            if present:
                self._latest.update({f"{site}/{key}": tensor.clone() for key, tensor in state.items()})
            stack.append({key: self._latest.get(f"{site}/{key}", self._initial[key]) for key in state})
        matrix = restrict(self.matrix(info), (info.sizes > 0).tolist())  # without those that never joined
        return mix(matrix, stack), matrix

    def state(self) -> dict[str, Tensor]:
        initial = {f"initial/{key}": tensor for key, tensor in self._initial.items()}
        return {**initial, **{f"latest/{key}": tensor for key, tensor in self._latest.items()}}

    def load_state(self, state: State) -> None:
        for kind, kept in (("initial/", self._initial), ("latest/", self._latest)):
            kept.clear()
            kept.update({k.removeprefix(kind): tensor.clone() for k, tensor in state.items() if k.startswith(kind)})
