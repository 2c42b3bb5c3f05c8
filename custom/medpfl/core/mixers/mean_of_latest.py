# SPDX-License-Identifier: Apache-2.0
"""CusFL's server, Eq. (5):  xi  <-  xi + 1/N sum_k Delta theta_k  over all N hospitals of the roster.

Delta theta_k is what hospital k's own model moved by, and an absent hospital's is zero. Summed up over the rounds from
a common start (hospitals that start otherwise take no part) this is the mean of the newest model of every hospital.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from medpfl.core.mixers.contract import RoundInfo
from medpfl.core.mixers.mean import Mean
from medpfl.core.mixing import Matrix, State, mix, restrict

_SIZES = "sizes"


@dataclass(frozen=True)
class MeanOfLatest(Mean):
    """A = 1 p^T applied to what each hospital sent last, at first the initial tensors. When all answer it is ``Mean``.

    The server keeps a copy of the slot for each hospital.
    """

    _sizes: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Every hospital's number of training samples, as it told last: a run that is taken up again without a hospital
    knows none of it, and still has what that hospital sent."""

    def start(self, state: State) -> None:
        self._sizes.clear()

    @property
    def remembers(self) -> Literal["answers"]:
        return "answers"

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], Matrix]:
        sizes = info.sizes
        if _SIZES in self._sizes:
            sizes = np.where(sizes > 0, sizes, self._sizes[_SIZES].numpy())
        self._sizes[_SIZES] = torch.from_numpy(sizes.copy())
        matrix = self.matrix(replace(info, sizes=sizes))
        matrix = restrict(matrix, (sizes > 0).tolist())  # without those that never joined
        return mix(matrix, info.known, into=states), matrix

    def state(self) -> dict[str, Tensor]:
        return dict(self._sizes)

    def load_state(self, state: State) -> None:
        self._sizes.clear()
        self._sizes.update({key: tensor.clone() for key, tensor in state.items()})
