# SPDX-License-Identifier: Apache-2.0
"""What noise costs, by Opacus' accountant: Renyi differential privacy (Mironov, Talwar, Zhang, "Renyi Differential
Privacy of the Sampled Gaussian Mechanism", 2019), added up over everything that was sent."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable
from functools import cache

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import ConfigError
from medpfl.privacy.contract import MOST_EPSILON, Mechanism

_LEAST_NOISE, _MOST_NOISE = 1e-51, 1e100
"""Less noise costs more than ``MOST_EPSILON`` by far; more is counted as if it were this, which costs no less. Of noise
whose square is no floating-point number Opacus ends with an error, or sums up a series that has no end."""
NOT_INSTALLED = "differential privacy needs Opacus: pip install 'medpfl[privacy]'"


def merged(history: Iterable[Mechanism]) -> list[Mechanism]:
    """Equal mechanisms added up, in order of noise and rate."""
    steps: Counter[tuple[float, float]] = Counter()
    for one in history:
        steps[one.noise_multiplier, one.sample_rate] += one.steps
    return [Mechanism(*kind, count) for kind, count in sorted(steps.items())]


def epsilon(history: Iterable[Mechanism], delta: float) -> float:
    """Epsilon of all of it together, in [0, ``MOST_EPSILON``].

    Raises:
        ConfigError: Opacus is not installed.
    """
    made = merged(history)
    if not made:
        return 0.0
    check_installed()
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import get_privacy_spent

    total = np.sum([_rdp(one.noise_multiplier, one.sample_rate) * one.steps for one in made], axis=0)
    with warnings.catch_warnings():  # "optimal order is the largest alpha": the bound holds, it is only not the least
        warnings.simplefilter("ignore")
        found, _ = get_privacy_spent(orders=RDPAccountant.DEFAULT_ALPHAS, rdp=total, delta=delta)
    # With a large delta the bound is below 0 where there is nearly no loss.
    return min(max(float(found), 0.0), MOST_EPSILON) if math.isfinite(found) else MOST_EPSILON


@cache
def _rdp(noise_multiplier: float, sample_rate: float) -> NDArray[np.float64]:
    """Of one step, for each of the accountant's orders; it takes a second, and is asked for in every round."""
    from opacus.accountants import RDPAccountant
    from opacus.accountants.analysis.rdp import compute_rdp

    orders = RDPAccountant.DEFAULT_ALPHAS
    if noise_multiplier < _LEAST_NOISE:
        return np.full(len(orders), np.inf)
    noise_multiplier = min(noise_multiplier, _MOST_NOISE)
    found = compute_rdp(q=sample_rate, noise_multiplier=noise_multiplier, steps=1, orders=orders)
    return np.asarray(found, dtype=np.float64)


@cache
def noise_for(target: float, delta: float, sample_rate: float, steps: int) -> float:
    """The noise multiplier with which so many steps cost at most ``target``.

    Raises:
        ConfigError: there is none, or Opacus is not installed.
    """
    check_installed()
    from opacus.accountants.utils import get_noise_multiplier

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return float(
                get_noise_multiplier(
                    target_epsilon=target, target_delta=delta, sample_rate=sample_rate, steps=steps, accountant="rdp"
                )
            )
    except ValueError as error:
        raise ConfigError(f"DPSGD's target_epsilon {target} cannot be reached at delta {delta}: {error}") from error


def check_installed() -> None:
    """Raises ConfigError: Opacus is not installed."""
    try:
        import opacus.accountants  # noqa: F401
    except ImportError as error:
        raise ConfigError(NOT_INSTALLED) from error
