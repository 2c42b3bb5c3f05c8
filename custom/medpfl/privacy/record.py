# SPDX-License-Identifier: Apache-2.0
"""Record level: stochastic gradient descent whose steps hide any single case.

Abadi et al., "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1: a step takes a lot, into which every
case comes with probability q; the gradient of every case is shortened to the length C; noise N(0, sigma^2 C^2) is added
to their sum, which is divided by the lot's expected size.
"""

from dataclasses import dataclass
from typing import ClassVar

from medpfl.core.errors import ConfigError
from medpfl.privacy.contract import Privacy

MOST_TARGET = 1e6
"""It promises nothing by far. From 1e15 on Opacus looks for ever for the noise that costs so much to a hundredth."""


@dataclass(frozen=True, kw_only=True)
class DPSGD(Privacy):
    """Every step whose result can leave is made of clipped gradients and noise; the lot's expected size is the method's
    ``batch_size``. Give either ``noise_multiplier`` or ``target_epsilon``.

    Args:
        max_grad_norm: C, the length to which a case's gradient is shortened, at least 1e-18.
        noise_multiplier: sigma, > 0.
        target_epsilon: what the whole job may cost if no round is redone, in (0, 1e6]; every hospital computes its own
            noise multiplier from it.
    """

    max_grad_norm: float = 1.0
    noise_multiplier: float | None = None
    target_epsilon: float | None = None

    level: ClassVar = "record"

    @property
    def told(self) -> str:
        much = f"for an epsilon of {self.target_epsilon}" if self.target_epsilon else f"of {self.noise_multiplier}"
        return f"by steps with noise {much} that hides every single case (DPSGD)"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._length("max_grad_norm")
        self._above_zero("noise_multiplier", "target_epsilon")
        if self.target_epsilon is not None and self.target_epsilon > MOST_TARGET:
            raise ConfigError(f"DPSGD's target_epsilon must be at most {MOST_TARGET:g}, got {self.target_epsilon}")
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ConfigError("DPSGD needs either a noise_multiplier or a target_epsilon, and not both")
