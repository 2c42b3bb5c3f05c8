# SPDX-License-Identifier: Apache-2.0
"""One Adam step at the server on the hospitals' mean gradients (Kingma and Ba, 2015; FedSM's selector).

With every hospital sending the mean gradient over its own data at the common weights, the size-weighted mean is the
gradient over all data: the steps equal centralised full-batch training, and nothing but gradients travels upwards. The
uniform mean is the gradient of a loss in which every hospital, and so every class of a selector, counts alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.adam import adam_step
from medpfl.core.errors import ConfigError
from medpfl.core.mapped import pieces
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State

_STEP = "step"


@dataclass(frozen=True)
class ServerAdam(Mixer):
    """The slot's hospitals send gradients, entry by entry, and receive weights. There is no mixing matrix.

    Steps are counted from the first gradient that is not zero: a slot whose training begins later starts then.

    Args:
        lr: Adam's step size, > 0.
        beta1: decay of the mean gradient, in [0, 1).
        beta2: decay of the squared gradient, in [0, 1).
        uniform: every hospital counts alike; else by its number of training samples.
    """

    lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.999
    uniform: bool = False
    _state: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    takes: ClassVar = "gradients"

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"ServerAdam's lr must be above 0, got {self.lr}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"ServerAdam's {name} must be in [0, 1), got {getattr(self, name)}")

    def matrix(self, info: RoundInfo) -> Matrix:
        raise TypeError("ServerAdam applies no mixing matrix")

    def start(self, state: State) -> None:
        """Take the initial weights; the moments start at zero."""
        self._state.clear()
        self._state[_STEP] = torch.zeros((), dtype=torch.float64)
        for key, weight in state.items():
            if not weight.is_floating_point():
                raise ConfigError(f"ServerAdam can train floating-point weights only, '{key}' is {weight.dtype}")
            self._state[f"w/{key}"] = weight.clone()
            self._state[f"m/{key}"] = torch.zeros_like(weight, dtype=torch.float64)
            self._state[f"v/{key}"] = torch.zeros_like(weight, dtype=torch.float64)

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], None]:
        """One step on the mean of the present hospitals' gradients; everybody gets the new weights."""
        counts = np.ones(len(info.roster)) if self.uniform else info.sizes
        shares = np.where(np.asarray(info.present), counts, 0.0)
        shares = shares / shares.sum()
        sent = [state for share, state in zip(shares, states, strict=True) if share]
        if self._state[_STEP] or any(gradient.any() for state in sent for gradient in state.values()):
            self._step(states, shares)
        for key in states[0]:
            weight = self._state[f"w/{key}"]
            for state in states:
                for new, part in pieces(weight, state[key]):
                    part.copy_(new)
        return [dict(state) for state in states], None

    def _step(self, states: Sequence[State], shares: NDArray[np.float64]) -> None:
        self._state[_STEP] += 1
        step = float(self._state[_STEP])
        for key in states[0]:
            gradient = torch.zeros_like(states[0][key], dtype=torch.float64)
            for share, state in zip(shares, states, strict=True):
                if share:
                    gradient.add_(state[key].double(), alpha=share)
            weight, moments = self._state[f"w/{key}"], (self._state[f"m/{key}"], self._state[f"v/{key}"])
            adam_step(weight, gradient, *moments, step, self.lr, self.beta1, self.beta2)

    def state(self) -> dict[str, Tensor]:
        return dict(self._state)

    def load_state(self, state: State) -> None:
        self._state.clear()
        self._state.update({key: tensor.clone() for key, tensor in state.items()})
