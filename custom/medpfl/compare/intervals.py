# SPDX-License-Identifier: Apache-2.0
"""Intervals of a comparison: from patients and seeds together, and from repeated splits; and what it would take to show
a difference."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from medpfl.compare.results import Needed
from medpfl.core.seeding import derive_seed
from medpfl.tasks.metrics.certainty import LEAST_PATIENTS, Interval, draw, error_of, interval_wider
from medpfl.tasks.metrics.digits import rounded
from medpfl.tasks.metrics.measure import TOLERANCE
from medpfl.tasks.metrics.sheet import Sheet

MANY = 1000
POWER, LEVEL = 0.8, 0.05
MOST_SEEDS = 10_000


def resampled(sheets: Sequence[Sheet], site: str) -> NDArray[np.float64]:
    """A hospital's mean test score over the seeds in each of ``MANY`` draws of its patients, and what drawing seeds
    adds to it, 2 x draws: the hierarchical bootstrap (Davison and Hinkley, Bootstrap Methods and their Application,
    1997, 3.8), in which all seeds have the same patients.

    The draws are the same whatever the runs' method, so that differences of two methods are paired.

    Args:
        sheets: the runs' answers, seed by seed.
    """
    count = len(sheets)
    taken = np.random.default_rng(derive_seed("seeds", count)).integers(count, size=(MANY, count))
    drawn = draw(sheets[0].patients, MANY, site)
    table = np.stack([sheet.scores(drawn) for sheet in sheets])
    mean: NDArray[np.float64] = table.mean(axis=0)
    return np.stack([mean, table[taken.T, np.arange(MANY)].mean(axis=0) - mean])


def of_mean(draws: Sequence[NDArray[np.float64]], patients: Sequence[int], seeds: int) -> tuple[Interval | None, float]:
    """The interval of the mean of hospitals' gains, or of a single one's, from each one's draws (``resampled``), and of
    how many patients of a single hospital it would be: one more than its Student's t has degrees of freedom.

    Each hospital's few patients vary less in their draws than in truth, by sqrt((n - 1) / n), however many the others
    have: a hospital with three among large ones rules how sure the mean is. So do few seeds, which all hospitals have
    in common. So the draws of each hospital's patients, and those of the seeds, are drawn apart by that before they are
    put together, and the degrees of freedom are those of a sum of unlike variances (Satterthwaite, "An Approximate
    Distribution of Estimates of Variance Components", Biometrics Bulletin 2(6), 1946).

    There is none where the few patients of a hospital gain exactly alike, in whose draws nothing varies: nobody knows
    how unlike others would be. So do two patients always in a metric that a single one does not have, as R2 and AUC.

    Args:
        patients: of each hospital, at least 2.
        seeds: how many there are.
    """
    from scipy.special import stdtrit

    free, parts = np.array(patients) - 1.0, np.stack(draws)
    by_patients = parts[:, 0]
    if not np.isfinite(by_patients).any(axis=1).all():
        return None, float(free.sum() + 1)
    # Around the median: R2 of a draw in which the numbers hardly differ is so far away that it would move the mean.
    times, middle = np.sqrt((free + 1) / free), np.nanmedian(by_patients, axis=1)
    spread = np.nanmax(by_patients, axis=1) - np.nanmin(by_patients, axis=1)
    alike = (abs(middle) > TOLERANCE) & (spread <= TOLERANCE * abs(middle))
    if (alike & (free + 1 < LEAST_PATIENTS)).any():
        return None, float(free.sum() + 1)
    by_seeds = math.sqrt(seeds / max(1, seeds - 1)) * parts[:, 1].mean(axis=0)
    wide = (middle[:, None] + times[:, None] * (by_patients - middle[:, None])).mean(axis=0) + by_seeds
    known = wide[np.isfinite(wide)]
    each = np.nanvar(by_patients, axis=1) * (times / len(times)) ** 2
    variances = np.append(each, by_seeds[np.isfinite(by_seeds)].var() if len(known) else 0.0)
    shares = variances / (variances.max() or 1.0)  # the square of a variance can be beyond all numbers
    doubt = (shares**2 / np.append(free, max(1, seeds - 1))).sum()
    freedom = float(shares.sum() ** 2 / doubt) if doubt else float(free.sum())
    found = interval_wider(wide, 1.0, freedom)
    if found is not None and freedom < LEAST_PATIENTS - 1:  # the quantile lies beyond all draws of so few
        at, reach = float(known.mean()), float(stdtrit(freedom, 1 - LEVEL / 2) * known.std())
        found = rounded(at - reach), rounded(at + reach)
    return found, freedom + 1


def by_split(values: NDArray[np.float64], splits: Sequence[int | None]) -> NDArray[np.float64]:
    """Of the runs of each split their mean: seeds train again on the same cases, which is no other split.

    Args:
        values: runs, or runs x hospitals; ``splits``: of each run.
    """
    own = np.array(splits)
    return np.array([values[own == split].mean(axis=0) for split in dict.fromkeys(splits)])


def corrected(differences: Sequence[float], ratio: float) -> Interval | None:
    """Of the mean difference over J repeated splits of the same patients, which overlap: mean -+ t_{J-1, 0.975}
    sqrt((1 / J + ratio) s^2), the corrected variance of Nadeau and Bengio ("Inference for the Generalization Error",
    Machine Learning 52, 2003, (11)). None for a single split, and where a few gain exactly alike, as small test parts
    often do: nobody knows how unlike others would be.

    Args:
        differences: one a split (``by_split``).
        ratio: test samples to training samples.
    """
    from scipy.special import stdtrit

    values = np.array(differences)
    count = len(values)
    if count < 2 or not np.isfinite(values).all():
        return None
    middle = abs(float(values.mean()))
    if count < LEAST_PATIENTS and middle > TOLERANCE and np.ptp(values) <= TOLERANCE * middle:
        return None
    reach = float(stdtrit(count - 1, 1 - LEVEL / 2)) * math.sqrt((1 / count + ratio) * values.var(ddof=1))
    return rounded(float(values.mean() - reach)), rounded(float(values.mean() + reach))


def needed(mean: float, deviation: float | None, found: Interval | None, count: float, ratio: float = 0.0) -> Needed:
    """What would show a difference of this ``mean`` with a power of 80 %, two-sided at 5 %.

    Args:
        deviation: of the paired differences over the seeds, or over the splits, each the mean of its seeds.
        found: the interval of the mean from patients and seeds, or ``corrected``.
        count: of how many patients it is, or of how many splits: with few it is many standard errors wide.
        ratio: of splits, as ``corrected`` has it.
    """
    error = None if found is None else error_of(found, count)
    times = ((1.959964 + 0.841621) * error / abs(mean)) ** 2 if error and mean else None
    return Needed(seeds=_seeds(mean, deviation, ratio), times=None if times is None else round(times, 2))


def _seeds(mean: float, deviation: float | None, ratio: float) -> int | None:
    """The fewest pairs (seeds, or splits that overlap by ``ratio``) with which a paired t-test has the power; None
    where it takes more than ``MOST_SEEDS``."""
    from scipy.stats import nct, t

    if not mean or deviation is None:
        return None
    if deviation < 1e-9:  # equal gains, of which a mean leaves 0 or a rounding error
        return 2

    def power(count: int) -> float:
        reach, shift = float(t.ppf(1 - LEVEL / 2, count - 1)), abs(mean) / deviation / math.sqrt(1 / count + ratio)
        # Where the shift is large, scipy's cdf is NaN this far on the other side, where hardly anything lies.
        other = float(nct.cdf(-reach, count - 1, shift))
        return float(nct.sf(reach, count - 1, shift)) + (0.0 if math.isnan(other) else other)

    low, high = 2, 2
    while power(high) < POWER:
        if high == MOST_SEEDS:
            return None
        low, high = high + 1, min(2 * high, MOST_SEEDS)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if power(middle) >= POWER else (middle + 1, high)
    return high
