# SPDX-License-Identifier: Apache-2.0
"""What a codec that adapts goes by, as the server tells each hospital."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Progress:
    """What a hospital's codec may go by: the mean training loss of each finished round, and the hospital's size as
    ``hospital_scales`` tells it."""

    losses: tuple[float, ...] = ()
    scale: float = 1.0


def progress_of(sizes: Mapping[str, float], losses: Sequence[float]) -> dict[str, Progress]:
    """What each hospital is told.

    Args:
        sizes: hospital to its number of training samples.
        losses: mean training loss of each finished round.
    """
    scales = hospital_scales(list(sizes.values()))
    return {site: Progress(tuple(losses), scale) for site, scale in zip(sizes, scales, strict=True)}


def hospital_scales(sizes: Sequence[float]) -> list[float]:
    """What every hospital's levels are of the common q, so that together they cost least at the variance of q
    everywhere: q_k / q = sqrt(a / b) p_k^(2/3) with p_k = n_k / n, a = sum p_j^(2/3) and b = sum p_j^2.
    """
    shares = np.asarray(sizes, dtype=np.float64) / np.sum(sizes)
    roots = shares ** (2 / 3)
    scales: list[float] = (np.sqrt(roots.sum() / np.square(shares).sum()) * roots).tolist()
    return scales
