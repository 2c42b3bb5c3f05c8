# SPDX-License-Identifier: Apache-2.0
"""Local training: every hospital keeps its own model."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix


@dataclass(frozen=True)
class Identity(Mixer):
    """A = I. Mixing would change nothing, so the slot is not sent at all."""

    travels: ClassVar[bool] = False

    def matrix(self, info: RoundInfo) -> Matrix:
        return np.eye(len(info.roster))
