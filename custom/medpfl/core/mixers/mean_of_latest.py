# SPDX-License-Identifier: Apache-2.0
"""CusFL's server, Eq. (5):  xi  <-  xi + 1/N sum_k Delta theta_k  over all N hospitals of the roster.

Delta theta_k is what hospital k's own model moved by, and an absent hospital's is zero. Summed up over the rounds from
a common start (hospitals that start otherwise take no part) this is the mean of the newest model of every hospital.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from medpfl.core.mixers.contract import RoundInfo
from medpfl.core.mixers.mean import Mean
from medpfl.core.mixing import Matrix, State, mix, restrict


@dataclass(frozen=True)
class MeanOfLatest(Mean):
    """A = 1 p^T applied to what each hospital sent last, at first the initial tensors. When all answer it is ``Mean``.

    The server keeps a copy of the slot for each hospital.
    """

    @property
    def remembers(self) -> Literal["answers"]:
        return "answers"

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], Matrix]:
        matrix = restrict(self.matrix(info), (info.sizes > 0).tolist())  # without those that never joined
        return mix(matrix, info.known, into=states), matrix
