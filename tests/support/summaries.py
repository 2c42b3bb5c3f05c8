# SPDX-License-Identifier: Apache-2.0
"""Small summaries of jobs that were never run: what reports say of results that are known."""

from medpfl.results.schema import ChosenRow, ControllerArguments, FinalLine, TrainingSummary
from medpfl.tasks.metrics.certainty import Certainty
from medpfl.tasks.metrics.measure import Measure


def result(site: str, model: str, value: float | None, sure: Certainty | None, score: str = "dice") -> FinalLine:
    return FinalLine(site=site, model=model, round=1, metrics={score: value}, choice="best", certainty=sure)


def sure(low: float, high: float, gained: tuple[float, float] | None = None) -> Certainty:
    return Certainty(patients=8, interval=(low, high), gain=0.1 if gained else None, gained=gained)


def summary(*found: tuple[FinalLine, float | None], measure: Measure | None = None, also: str = "") -> TrainingSummary:
    """``found``: the test of the model that a hospital takes, and its local model's score."""
    score = next(iter(found[0][0].metrics))
    local = [result(line.site, "local", value, None, score) for line, value in found]
    roster = [*(line.site for line, _ in found), *filter(None, [also])]
    return TrainingSummary(
        classes=["background", "liver"], metrics={score: measure or Measure()},
        sizes={site: {"train": 9, "test": 3} for site in roster}, versions={}, components={},
        settings=ControllerArguments(rounds=1, seed=0), recipe=None, personalised="personal", score=score, codecs=None,
        job="organ", medpfl="0", written="", roster=roster, best={}, slots={}, test=local, events=[],
        chosen={line.site: ChosenRow(test=line) for line, _ in found},
    )  # fmt: skip
