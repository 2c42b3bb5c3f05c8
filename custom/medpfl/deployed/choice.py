# SPDX-License-Identifier: Apache-2.0
"""Which of the models that a job left at a hospital its own validation cases support.

The rule: the hospital takes the model with the best validation score, but only where choosing so gains more than one
standard error over its own local model; else it keeps the local one. Breiman, Friedman, Olshen and Stone's rule of one
standard error (Classification and Regression Trees, 1984, 3.4.3) prefers the simplest model that is not surely worse
in the same way; here the simplest is the one that needs nobody else.

The best of several scores is better than it should be, the more so the fewer the patients. So the gain is cross-fitted:
the patients are cut into 10 folds (of fewer than 10 patients each is one), for each fold the best model on the others
is chosen, and answers for the patients of the fold. What is compared with the local model is the score of these
answers. The standard error is that of the paired bootstrap over patients.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medpfl.core.seeding import derive_seed
from medpfl.tasks.metrics.certainty import Interval, interval_of, resamples
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet

FOLDS = 10


@dataclass(frozen=True)
class Choice:
    """What validation says.

    Attributes:
        model: that the hospital takes.
        scores: candidate to its validation score, NaN where it is not defined.
        patients: validation patients.
        gain: of choosing so over the local model, cross-fitted; NaN where nothing can be said.
        error: its standard error.
        interval: 95 %.
    """

    model: str
    scores: Mapping[str, float]
    patients: int
    gain: float = math.nan
    error: float = math.nan
    interval: Interval | None = None


def choose(sheets: Mapping[str, Sheet], local: str, measure: Measure, *seed: str | int) -> Choice:
    """The choice.

    Args:
        sheets: candidate to its answers to the validation cases, all of the same ones; with equal scores the first one
            is the best.
        local: the hospital's own model, one of them.
        seed: of the folds and the resamples.
    """
    scores = {name: sheet.score for name, sheet in sheets.items()}
    alone = sheets[local]
    names = [local, *(name for name in sheets if name != local)]
    patients = alone.patients
    best = min(names, key=lambda name: measure.rank(scores[name]))
    if patients < 2 or not math.isfinite(scores[local]):
        return Choice(local, scores, patients)
    honest = alone.picked([sheets[name] for name in names], _cross_fitted(sheets, names, measure, *seed))
    gain = measure.gain(honest.score, alone.score)
    counts = resamples(alone, *seed)
    differences = honest.scores(counts) - alone.scores(counts)
    better = differences if measure.direction == "higher" else -differences
    known = better[np.isfinite(better)]
    error = float(known.std() * math.sqrt(patients / (patients - 1))) if len(known) else math.nan
    taken = best if gain > error else local
    return Choice(taken, scores, patients, gain, error, interval_of(better, patients))


def _cross_fitted(
    sheets: Mapping[str, Sheet], names: list[str], measure: Measure, *seed: str | int
) -> NDArray[np.int64]:
    """Of each patient the place of the model that is best on the patients of the other folds."""
    patients = sheets[names[0]].patients
    folds = min(FOLDS, patients)
    fold = np.random.default_rng(derive_seed(*seed, "folds")).permutation(patients) % folds
    others = (fold != np.arange(folds)[:, None]).astype(np.int64)
    ranks = np.array([[measure.rank(score) for score in sheets[name].scores(others)] for name in names])
    chosen: NDArray[np.int64] = ranks.argmin(axis=0)[fold]
    return chosen
