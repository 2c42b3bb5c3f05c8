# SPDX-License-Identifier: Apache-2.0
"""Which round was the best, model by model: by the hospitals' mean validation score, never by a test."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from medpfl.results.line import MetricLine
from medpfl.results.record import Record
from medpfl.results.schema import BestRound
from medpfl.tasks.metrics.measure import Measure


class BestRounds:
    """The best unweighted mean of the hospitals' validation ``score`` so far, for every deployed model.

    A hospital that did not answer counts with its last known score; ties go to the earlier round. One that had a score
    before and now says that it is no number may hold models that broke: such a round is nobody's best. When a hospital
    tells its first score, the best begins anew: the means before were of fewer hospitals, whose cases may be easier.
    """

    def __init__(self, record: Record, score: str, measure: Measure):
        self.best: dict[str, BestRound] = {}
        self._record, self._score, self._measure = record, score, measure
        self.scores: dict[str, dict[str, float]] = {}
        self._broken: set[str] = set()
        """Models that have no score this time at a hospital where they had one."""
        self.more: set[str] = set()
        """Models that are scored at more hospitals than when their best round was chosen."""

    def take(self, site: str, lines: Sequence[MetricLine]) -> None:
        """Record a hospital's metric lines and keep its scores."""
        for line in lines:
            self._record.metric(line.validated_at(site))
            value, known = line.metrics.get(self._score), self.scores.setdefault(line.model, {})
            if value is not None:
                if site not in known:
                    self.more.add(line.model)
                known[site] = value
            elif site in known:
                self._broken.add(line.model)

    def choose(self, round_number: int, of_all: bool = True) -> None:
        """Compare the scores at hand, which are those of ``round_number``, with the best so far.

        Args:
            of_all: False: only some hospitals were asked for theirs, so the round is noted and nobody's best: the
                others hold no models of it.
        """
        broken, self._broken = self._broken, set()
        if round_number < 1:
            return
        for model, scores in self.scores.items():
            if not scores or model in broken:
                continue
            mean = float(np.mean([scores[site] for site in sorted(scores)]))
            self._record.mean_score(round_number, model, self._score, mean)
            if not of_all:
                continue
            first = model in self.more or model not in self.best
            if first or self._measure.better(mean, self.best[model].score):
                self.best[model] = BestRound(round=round_number, score=mean)
            self.more.discard(model)

    def restore(
        self, best: Mapping[str, BestRound], scores: Mapping[str, Mapping[str, float]], more: Collection[str]
    ) -> None:
        """Go on from what a checkpoint kept of these."""
        self.best, self.more = dict(best), set(more)
        self.scores = {model: dict(found) for model, found in scores.items()}
