# SPDX-License-Identifier: Apache-2.0
"""Gain over local training, paired by seed, with the test that few seeds allow.

The exact sign-flip permutation test: if a method and local training were exchangeable, every difference could as well
have the other sign, so the p-value is the share of the 2^n sign patterns whose mean is at least as far from zero. It
assumes no normal distribution and takes ties and zeros (test scores on few cases have many), which the t and the
Wilcoxon test do not. Its smallest p-value is 2 / 2^n: with fewer than 6 seeds none can be below 0.05. Of many pairs the
sign patterns are too many to go through, and so many are drawn at random. Of several splits the mean over each one's
seeds counts: they train again on the same cases, so that their differences have one sign together.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from medpfl.compare.intervals import by_split
from medpfl.compare.results import Gain

EXACT_UP_TO = 16
DECIMALS = 9
"""Of differences."""


def smallest_p(pairs: int) -> float:
    """The smallest two-sided p-value that so many pairs can give."""
    return min(1.0, 2.0 ** (1 - pairs)) if pairs <= EXACT_UP_TO else 2 / (2**EXACT_UP_TO + 1)


def in_words(pairs: int, by: str) -> str:
    """What the p-value is.

    Args:
        by: what makes a pair.
    """
    exact, drawn = ("exact ", "") if pairs <= EXACT_UP_TO else ("", f" with {2**EXACT_UP_TO:,} sign patterns at random")
    return f"two-sided {exact}sign-flip permutation test{drawn}, paired by {by}"


def paired_gain(scores: Sequence[float], reference: Sequence[float], splits: Sequence[int | None] = ()) -> Gain:
    """``scores`` minus ``reference``, pair by pair. Pairs with a NaN are left out.

    Args:
        splits: of each pair, where there are several splits; else all None, or nothing.

    Raises:
        ValueError: the lengths differ or no pair is left.
    """
    pairs = np.array(list(zip(scores, reference, strict=True)), dtype=float)
    known = np.isfinite(pairs).all(axis=1) if len(pairs) else np.zeros(0, dtype=bool)
    pairs = pairs[known]
    if not len(pairs):
        raise ValueError("no pair of scores")
    # Scores are ratios of counts or means of them: rounding keeps equal differences equal, and a mean of zero zero.
    difference = np.round(pairs[:, 0] - pairs[:, 1], DECIMALS)
    several = len(difference) > 1
    own = [split for split, there in zip(splits, known, strict=False) if there and split is not None]
    # Rounded again: a mean of equal differences leaves an error of its own, by which equal ones would be none.
    tested = np.round(by_split(difference, own), DECIMALS) if len(set(own)) > 1 else difference
    return Gain(
        mean=round(float(difference.mean()), DECIMALS) + 0.0,  # not -0.0
        deviation=float(difference.std(ddof=1)) if several else None,
        p=_p_value(tested) if len(tested) > 1 else None,
        wins=int((difference > 0).sum()),
        losses=int((difference < 0).sum()),
        pairs=len(difference),
        splits=len(tested) if len(tested) < len(difference) else None,
    )


def _p_value(difference: NDArray[np.float64]) -> float:
    from scipy.stats import permutation_test

    if not difference.any():
        return 1.0
    gain = difference.mean()

    def mean(x: NDArray[np.float64], y: NDArray[np.float64], axis: int) -> NDArray[np.float64]:
        found = np.mean(x - y, axis=axis)
        # Rounded thirds do not add up: patterns whose means are equal but for that are as far from zero.
        told: NDArray[np.float64] = np.where(
            abs(abs(found) - abs(gain)) <= 10.0**-DECIMALS, np.copysign(gain, found), found
        )
        return told

    found = permutation_test(
        (difference, np.zeros_like(difference)),
        mean,
        permutation_type="samples",
        n_resamples=2**EXACT_UP_TO,  # exact up to so many pairs, random (with a fixed seed) beyond
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)
