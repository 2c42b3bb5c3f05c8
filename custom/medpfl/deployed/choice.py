# SPDX-License-Identifier: Apache-2.0
"""Which of the models that a job left at a hospital its own validation cases support.

The rule: the hospital takes the model with the best validation score among those that are more than c standard errors
above its own local model; where there is none, it keeps the local one. With one model to choose, c is 1: the rule of
one standard error of Breiman, Friedman, Olshen and Stone (Classification and Regression Trees, 1984, 3.4.3), which
prefers the simplest model that is not surely worse; here the simplest is the one that needs nobody else. The best of
several looks better than it is, so c grows with their number and with how differently they err: it is what the largest
of all their gains stays below in 84 of 100 resamples of the patients if no model gains anything (White, "A Reality
Check for Data Snooping", Econometrica 68(5), 2000; in standard errors as in Hansen, "A Test for Superior Predictive
Ability", Journal of Business & Economic Statistics 23(4), 2005). So of 100 hospitals to which nothing is a gain, about
16 leave the local model, however many others there are. For few patients c is widened from the normal distribution to
Student's.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medpfl.tasks.metrics.certainty import LEAST_PATIENTS, LEVEL, Interval, resamples
from medpfl.tasks.metrics.digits import rounded
from medpfl.tasks.metrics.measure import TOLERANCE, Measure
from medpfl.tasks.metrics.sheet import Sheet

ONE_ERROR = 0.8413447460685429
"""Of a normal distribution, what lies below its mean and one standard deviation."""


@dataclass(frozen=True)
class Choice:
    """What validation says.

    Attributes:
        model: that the hospital takes.
        scores: candidate to its validation score, NaN where it is not defined.
        patients: validation patients.
        best: of which ``gain`` speaks: ``model``, or where that is the local one the best of the others; None where
            nothing can be said.
        gain: its gain over the local model.
        error: the gain's standard error; ``needed``: how many of them it takes to be chosen, c.
        interval: of the gain, 95 % for all candidates at once, so that it holds for the best of them, too; None where a
            few patients gain exactly alike: nobody knows how unlike others would be.
    """

    model: str
    scores: Mapping[str, float]
    patients: int
    best: str | None = None
    gain: float = math.nan
    error: float = math.nan
    needed: float = math.nan
    interval: Interval | None = None


def choose(sheets: Mapping[str, Sheet], local: str, measure: Measure, *seed: str | int) -> Choice:
    """The choice.

    Args:
        sheets: candidate to its answers to the validation cases, all of the same ones; with equal scores the first one
            is the best.
        local: the hospital's own model, one of them.
        seed: of the resamples.
    """
    scores = {name: sheet.score for name, sheet in sheets.items()}
    alone = sheets[local]
    patients = alone.patients
    others = [name for name in sheets if name != local and math.isfinite(scores[name])]
    if patients < 2 or not math.isfinite(scores[local]) or not others:
        return Choice(local, scores, patients)
    counts = resamples(alone, *seed)
    own = alone.scores(counts)
    draws = np.stack([sheets[name].scores(counts) - own for name in others], axis=1)
    draws = draws if measure.direction == "higher" else -draws
    draws = draws[np.isfinite(draws).all(axis=1)]
    if len(draws) < len(counts) / 2:
        return Choice(local, scores, patients)
    gains = np.array([measure.gain(scores[name], scores[local]) for name in others])
    errors = draws.std(axis=0) * math.sqrt(patients / (patients - 1))
    needed = critical(draws, ONE_ERROR, patients)
    better = gains > needed * errors
    best = max(range(len(others)), key=lambda place: (better[place], gains[place], -place))
    gain = float(gains[best])
    alike = abs(gain) > TOLERANCE and float(np.ptp(draws[:, best])) <= TOLERANCE * abs(gain)
    reach = critical(np.concatenate([draws, 2 * draws.mean(axis=0) - draws], axis=1), LEVEL, patients) * errors[best]
    return Choice(
        model=others[best] if better[best] else local,
        scores=scores,
        patients=patients,
        best=others[best],
        gain=gain,
        error=float(errors[best]),
        needed=needed,
        interval=None if alike and patients < LEAST_PATIENTS else (rounded(gain - reach), rounded(gain + reach)),
    )


def critical(draws: NDArray[np.float64], level: float, patients: int) -> float:
    """How many standard errors the largest of K gains stays below with probability ``level`` where all are zero.

    Args:
        draws: B x K, gains in resamples of the patients.
        level: in (0, 1).
        patients: >= 2; of few the normal distribution's critical value becomes Student's of the same probability.
    """
    from scipy.special import ndtr, stdtrit

    spread = draws.std(axis=0)
    varying = spread > 0
    if not varying.any():
        return 0.0
    highest = ((draws - draws.mean(axis=0))[:, varying] / spread[varying]).max(axis=1)
    return float(stdtrit(patients - 1, ndtr(np.quantile(highest, level))))
