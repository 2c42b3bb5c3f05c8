# SPDX-License-Identifier: Apache-2.0
"""KT-pFL's knowledge coefficients: hospital k's teacher is sum_l c_kl p_l, a mixture of all hospitals' probabilities on
public data (Zhang et al., "Parameterized Knowledge Transfer for Personalized Federated Learning", NeurIPS 2021)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from medpfl.core.errors import ConfigError
from medpfl.core.mixers.contract import Mixer, RoundInfo
from medpfl.core.mixing import Matrix, State, mix

_NAME = "coefficients"
_TINY = 1e-12


@dataclass(frozen=True)
class KnowledgeTransfer(Mixer):
    """The K x K coefficients start at 1 / K. Before a round's mixing each row takes a gradient step down
    KL(sum_l c_kl p_l || p_k) + rho |c_k - 1 / K|^2 and is projected onto the simplex, so that the teacher stays a
    distribution (our choice). The first term draws a hospital to itself, the second to all alike. In a round in which a
    hospital is absent they stay; all teachers are made of those that answered.

    Args:
        eta: step size, >= 0; 0 keeps the uniform mean.
        rho: weight of the penalty, >= 0.
    """

    eta: float = 0.1
    rho: float = 0.7
    _kept: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for name in ("eta", "rho"):
            if getattr(self, name) < 0:
                raise ConfigError(f"KnowledgeTransfer's {name} must be at least 0, got {getattr(self, name)}")

    def start(self, state: State) -> None:
        self._kept.clear()

    def matrix(self, info: RoundInfo) -> Matrix:
        raise TypeError("KnowledgeTransfer's matrix depends on what the hospitals sent")

    def mix(self, states: Sequence[State], info: RoundInfo) -> tuple[list[dict[str, Tensor]], Matrix]:
        size = len(states)
        kept = self._kept.get(_NAME)
        coefficients = np.full((size, size), 1 / size) if kept is None else kept.numpy().copy()
        here = np.asarray(info.present)
        if here.all():
            said = np.stack([_rows(state) for state in states])
            slope = divergence_slope(coefficients, said) + 2 * self.rho * (coefficients - 1 / size)
            coefficients = np.stack([on_simplex(row) for row in coefficients - self.eta * slope])
        self._kept[_NAME] = torch.from_numpy(coefficients.copy())
        weights = np.where(here, coefficients, 0.0)
        weights[weights.sum(axis=1) == 0] = np.where(here, 1.0, 0.0)
        applied = weights / weights.sum(axis=1, keepdims=True)
        return mix(applied, states, in_place=True), applied

    def state(self) -> dict[str, Tensor]:
        return dict(self._kept)

    def load_state(self, state: State) -> None:
        self._kept.clear()
        self._kept.update({key: tensor.clone() for key, tensor in state.items()})


def _rows(state: State) -> np.ndarray:
    """A hospital's probabilities, N x C x ..., as rows of C."""
    (values,) = state.values()
    return values.double().movedim(1, -1).flatten(0, -2).numpy()


def divergence_slope(coefficients: Matrix, said: np.ndarray) -> Matrix:
    """Gradient of mean_n KL(sum_l c_kl p_l || p_k) in each c_kl; ``said``: p, K x N x C."""
    log = np.log(np.maximum(said, _TINY))
    teachers = np.maximum(np.einsum("kl,lnc->knc", coefficients, said), _TINY)
    return np.asarray(np.einsum("lnc,knc->kl", said, np.log(teachers) - log + 1) / said.shape[1], dtype=np.float64)


def on_simplex(row: np.ndarray) -> np.ndarray:
    """The nearest vector of non-negative numbers that sum to 1 (Held et al., 1974)."""
    row = row - row.max()  # it has the same nearest one, in which no large numbers swallow the 1
    falling = np.sort(row)[::-1]
    excess = (np.cumsum(falling) - 1) / np.arange(1, len(row) + 1)
    near = np.maximum(row - excess[np.flatnonzero(falling > excess)[-1]], 0.0)
    return np.asarray(near / near.sum())
