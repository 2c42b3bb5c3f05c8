# SPDX-License-Identifier: Apache-2.0
"""How sure a score is: intervals from resampled patients (the bootstrap)."""

import math
from functools import lru_cache
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from medpfl.core.seeding import derive_seed
from medpfl.tasks.metrics.digits import digits, fewer, rounded
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet

LEVEL = 0.95
"""Of all intervals."""
LEAST_PATIENTS = 6
"""With fewer there is no interval: its ends could be the scores of single patients."""
RESAMPLES, FEWER, ENTRIES = 2000, 200, 2**24
"""Resamples at most, of metrics that score one after another, and answers in all of them together."""

Bounded = Annotated[FiniteFloat, Field(ge=-1e100, le=1e100)]
Interval = Annotated[tuple[Bounded, Bounded], Field(strict=False)]  # a list, where it was read from JSON
"""Its lower and its upper end."""


class Certainty(BaseModel):
    """How sure a model's score at a hospital is; it tells of no single patient.

    Attributes:
        patients: of how many the score is.
        interval: of the score, 95 %.
        gain: by how much it is better than the score of the hospital's own local model, above 0 where it is; None of
            the local model itself, or where there is none.
        gained: the interval of that, from the same resamples for both models.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    patients: Annotated[int, Field(ge=LEAST_PATIENTS, lt=2**53)]
    interval: Interval
    gain: Bounded | None = None
    gained: Interval | None = None

    def text(self, score: float, measure: Measure, what: str = "test patients") -> str:
        """ "0.62 [0.55, 0.68], gain +0.14 [0.06, 0.21] on 8 test patients" """
        return f"{self.short(score, measure)} on {self.patients} {what}"

    def short(self, score: float, measure: Measure, decimals: int | None = None) -> str:
        """The same without the patients; ``decimals``: None: as the score and its interval need."""
        shown = fewer(digits([score, *self.interval])) if decimals is None else decimals
        more = f", gain {self.gain:+.{shown}f} {interval_text(self.gained, shown)}" if self.gain is not None else ""
        unit = f" {measure.unit}" if measure.unit else ""
        return f"{score:.{shown}f} {interval_text(self.interval, shown)}{unit}{more}"


def interval_text(found: Interval | None, decimals: int = 2) -> str:
    """ "[0.55, 0.68]"; with one decimal more where an end that is not zero would be written as zero."""
    if found is None:
        return ""
    shown = decimals_for(found, decimals)
    return f"[{found[0]:.{shown}f}, {found[1]:.{shown}f}]"


def decimals_for(found: Interval, decimals: int) -> int:
    """So many, or one more where an end that is not zero would be written as zero: whether zero lies between them is
    what one looks for first."""
    return decimals + any(end and not round(end, decimals) for end in found)


def resamples(sheet: Sheet, *seed: str | int) -> NDArray[np.int64]:
    """B x patients counts: as many patients as there are, drawn with replacement."""
    many = RESAMPLES if sheet.metric.quick else FEWER
    many = max(FEWER, min(many, ENTRIES // max(len(sheet.answers), 1)))
    return draw(sheet.patients, many, *seed)


@lru_cache(maxsize=1)  # a hospital's models are tested one after another, all with the same resamples
def draw(patients: int, many: int, *seed: str | int) -> NDArray[np.int64]:
    """So ``many`` resamples of so many patients, not to be written into; the same on every machine."""
    rng = np.random.default_rng(derive_seed(*seed, "resamples"))
    drawn = rng.multinomial(patients, np.full(patients, 1 / patients), size=many)
    drawn.setflags(write=False)
    return drawn


def interval_of(values: NDArray[np.float64], patients: int) -> Interval | None:
    """The expanded percentile interval of a score's resamples; resamples without a value are left out. None where fewer
    than half of them have one.

    Few patients vary less in their resamples than in truth, by sqrt((n - 1) / n), and the normal distribution's tails
    are too light for them. Hesterberg ("What Teachers Should Know About the Bootstrap", The American Statistician
    69(4), 2015, 3.1.1) therefore takes the quantiles at alpha' / 2 = Phi(-sqrt(n / (n - 1)) t_{alpha / 2, n - 1}).
    """
    return None if patients < 2 else interval_wider(values, math.sqrt(patients / (patients - 1)), patients - 1)


def interval_wider(values: NDArray[np.float64], times: float, freedom: float) -> Interval | None:
    """The percentile interval at alpha' / 2 = Phi(-times t_{alpha / 2, freedom}); None as ``interval_of``."""
    from scipy.special import ndtr, stdtrit

    known = values[np.isfinite(values)]
    if len(known) < max(2, len(values) / 2):
        return None
    tail = float(ndtr(-times * stdtrit(freedom, (1 + LEVEL) / 2)))
    low, high = np.quantile(known, [tail, 1 - tail])
    return rounded(float(low)), rounded(float(high))


def error_of(found: Interval, count: float) -> float:
    """The standard error of a score or gain from its 95 % interval, which reaches as far as Student's t to either side.

    Args:
        count: of how many patients (``interval_of``) or splits the interval is, at least 2; or one more than its
            Student's t has degrees of freedom.
    """
    from scipy.special import stdtrit

    return (found[1] - found[0]) / (2 * float(stdtrit(count - 1, (1 + LEVEL) / 2)))


def certainty_of(sheet: Sheet, local: Sheet | None, measure: Measure, least: int, *seed: str | int) -> Certainty | None:
    """Of a score on a hospital's patients; None where there are too few of them, or it is not defined.

    Args:
        local: of the hospital's local model on the same cases; None: there is none, or it is the model itself.
        least: patients without which the hospital tells nothing, beside ``LEAST_PATIENTS``.
        seed: of the resamples; the same for all models of a hospital.
    """
    if sheet.patients < max(least, LEAST_PATIENTS):
        return None
    counts = resamples(sheet, *seed)
    mine = sheet.scores(counts)
    interval, gain, gained = interval_of(mine, sheet.patients), None, None
    if interval is None:
        return None
    if local is not None:
        differences = mine - local.scores(counts)
        better = differences if measure.direction == "higher" else -differences
        gained, found = interval_of(better, sheet.patients), measure.gain(sheet.score, local.score)
        gain = rounded(found) if gained is not None and math.isfinite(found) else None
    return Certainty(patients=sheet.patients, interval=interval, gain=gain, gained=gained if gain is not None else None)
