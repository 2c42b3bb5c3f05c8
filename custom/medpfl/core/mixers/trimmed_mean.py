# SPDX-License-Identifier: Apache-2.0
"""The coordinate-wise trimmed mean: one model for everybody that a few hospitals cannot move at will.

Yin, Chen, Kannan, Bartlett, "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
Definition 2.
"""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.mapped import pieces
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State

_BLOCK_VALUES = 1 << 18  # float64 values of a block of all models: stays in the caches while it is sorted


class Trimmed(Mixer):
    """Of every coordinate, the mean of what is left without the smallest and the largest values of the hospitals that
    answered. Each of them counts alike, whatever number of samples it says it has, and everybody gets the result.
    There is no mixing matrix. Integer entries stay as each hospital had them."""

    least_asked: ClassVar = 3

    @abstractmethod
    def left_out(self, count: int) -> int:
        """How many of ``count`` values are left out at either end; fewer than half of them."""

    def matrix(self, info: RoundInfo) -> Matrix:
        raise TypeError(f"{type(self).__name__} applies no mixing matrix")

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], None]:
        sent = [state for state, present in zip(states, info.present, strict=True) if present]
        for key, first in states[0].items():
            if first.is_floating_point():
                self._mix_entry([state[key] for state in sent], [state[key] for state in states])
        return [dict(state) for state in states], None

    def _mix_entry(self, sent: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
        count = len(sent)
        out = self.left_out(count)
        for parts in pieces(*sent, *targets, values=max(1, _BLOCK_VALUES // count)):
            block = torch.stack([part.double() for part in parts[:count]])
            common = block.sort(dim=0).values[out : count - out].mean(dim=0)
            for target in parts[count:]:
                target.copy_(common)


@dataclass(frozen=True)
class TrimmedMean(Trimmed):
    """Leaves out floor(trim n) of n hospitals' values at either end, one at least of three and more: so many of those
    that answered can send anything. Of two it is the mean.

    Args:
        trim: share at either end, in (0, 0.5).
    """

    trim: float = 0.25

    def __post_init__(self) -> None:
        if not 0 < self.trim < 0.5:
            raise ConfigError(f"TrimmedMean's trim must be above 0 and below 0.5, got {self.trim}")

    def check(self, roster: Sequence[str]) -> None:
        if not self._share(len(roster)):
            raise ConfigError(
                f"TrimmedMean's trim must be at least 1 / {len(roster)} with {len(roster)} hospitals (and below 0.5), "
                f"so that it leaves out one; got {self.trim}"
            )

    def left_out(self, count: int) -> int:
        return min(max(1, self._share(count)), (count - 1) // 2)

    def _share(self, count: int) -> int:
        return int(self.trim * count + 1e-9)  # 0.3 of 10 is 3, and 0.1 + 0.2 is a little less than 0.3
