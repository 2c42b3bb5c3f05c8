# SPDX-License-Identifier: Apache-2.0
"""Update level: what a round has changed is shortened and hidden in noise before it leaves.

McMahan et al., "Learning Differentially Private Recurrent Language Models", ICLR 2018, with the noise added at the
hospital instead of the server, and with another neighbourhood: any two sets of data of the hospital are neighbours.
Their updates, each at most ``clip`` long, differ by at most twice that.
"""

from dataclasses import dataclass
from typing import ClassVar

from medpfl.privacy.contract import Mechanism, Privacy


@dataclass(frozen=True, kw_only=True)
class ClippedNoise(Privacy):
    """The difference between what is sent and what was received, of all slots together, is shortened to ``clip``;
    noise of standard deviation ``noise_multiplier`` times ``clip`` is added to each of its values.

    Args:
        clip: largest Euclidean length of the difference, at least 1e-18.
        noise_multiplier: standard deviation over ``clip``, > 0.
    """

    clip: float
    noise_multiplier: float

    level: ClassVar = "update"

    @property
    def told(self) -> str:
        return f"whose change is shortened to {self.clip} and has noise of {self.noise_multiplier} times that on it"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._length("clip")
        self._above_zero("noise_multiplier")

    def mechanism(self) -> Mechanism:
        """What a message costs: other data can change it by 2 ``clip``, and all data are in it."""
        return Mechanism(self.noise_multiplier / 2, 1.0, 1)
