# SPDX-License-Identifier: Apache-2.0
"""A tracker in somebody else's package: this file is all of it."""

import logging
from dataclasses import dataclass, field

from medpfl.results.callbacks import Callback, Failure, JobEnd, RoundEnd
from medpfl.results.schema import FinalLine, Line, ValidationLine


@dataclass
class Ledger(Callback):
    """Keeps what it is told.

    Attributes:
        rounds: that ended, in order.
        slots: that were mixed with a matrix.
        scores: model and round to the hospitals' mean validation accuracy.
        tests: number of tests.
        failed: why the job did, if it did.

    Args:
        title: before what it logs when the job ends.
    """

    title: str = "ledger"
    rounds: list[int] = field(default_factory=list, init=False)
    slots: set[str] = field(default_factory=set, init=False)
    scores: dict[tuple[str, int], float | None] = field(default_factory=dict, init=False)
    tests: int = field(default=0, init=False)
    ended: bool = field(default=False, init=False)
    failed: str | None = field(default=None, init=False)

    def on_round_end(self, end: RoundEnd) -> None:
        self.rounds.append(end.round)
        self.slots |= end.matrices.keys()
        self._take(end.lines)

    def on_job_end(self, end: JobEnd) -> None:
        self._take(end.lines)
        self.ended = True
        logging.getLogger(__name__).warning("%s: %d rounds, %d tests", self.title, len(self.rounds), self.tests)

    def on_failure(self, failure: Failure) -> None:
        self.failed = failure.reason

    def _take(self, lines: tuple[Line, ...]) -> None:
        for line in lines:
            if isinstance(line, FinalLine):
                self.tests += 1
            elif isinstance(line, ValidationLine) and line.site == "mean":
                self.scores[line.model, line.round] = line.metrics["accuracy"]
