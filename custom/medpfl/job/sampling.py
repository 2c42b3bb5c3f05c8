# SPDX-License-Identifier: Apache-2.0
"""Which hospitals a round asks, where the job asks only some of them."""

import math
from collections.abc import Sequence

import numpy as np

from medpfl.core.errors import ConfigError
from medpfl.core.seeding import derive_seed
from medpfl.job.settings import Settings


def check_sampling(settings: Settings, min_clients: int) -> None:
    """Raises ConfigError: fewer hospitals are asked in a round than must answer."""
    asked = settings.hospitals_per_round
    if isinstance(asked, int) and asked < min_clients:
        raise ConfigError(
            f"the controller's hospitals_per_round is {asked}, and meta.json's min_clients, without whom no round "
            f"counts, {min_clients}: ask more hospitals, or need fewer"
        )


def asked_per_round(settings: Settings, min_clients: int, hospitals: int) -> int | None:
    """How many of so many ``hospitals`` every round asks; None: all, whatever their number.

    A share is rounded up, and never below ``min_clients``.
    """
    asked = settings.hospitals_per_round
    if asked is None:
        return None
    return asked if isinstance(asked, int) else max(min_clients, math.ceil(asked * hospitals))


def drawn(sites: Sequence[str], asked: int, seed: int, round_number: int, reachable: Sequence[str]) -> list[str]:
    """The hospitals that a round asks, sorted: without replacement, each as likely as any other.

    Who cannot be reached is replaced by the next of the same order, so that without absences the draw depends on the
    seed, the round and the names alone.

    Args:
        sites: all that take part, sorted; ``reachable``: those of them that can be asked now.
        asked: how many.
    """
    order = np.random.default_rng(derive_seed(seed, "hospitals", round_number)).permutation(len(sites))
    there = set(reachable)
    return sorted([sites[index] for index in order if sites[index] in there][:asked])
