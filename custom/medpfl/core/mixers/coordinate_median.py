# SPDX-License-Identifier: Apache-2.0
"""The coordinate-wise median (Yin, Chen, Kannan, Bartlett, ICML 2018, Definition 1)."""

from collections.abc import Sequence
from dataclasses import dataclass

from medpfl.core.errors import ConfigError
from medpfl.core.mixers.trimmed_mean import Trimmed


@dataclass(frozen=True)
class CoordinateMedian(Trimmed):
    """One model for everybody: of every coordinate the median of what the hospitals sent, of an even number of them
    the mean of the two in the middle. Fewer than half of the hospitals can send anything."""

    def check(self, roster: Sequence[str]) -> None:
        if len(roster) < 3:
            raise ConfigError(f"CoordinateMedian needs at least 3 hospitals, got {len(roster)}: it would be the mean")

    def left_out(self, count: int) -> int:
        return (count - 1) // 2
