# SPDX-License-Identifier: Apache-2.0
"""A tracker in somebody else's package: this file is all of it."""

from medpfl.results.callbacks import Callback, Failure, JobEnd, RoundEnd
from medpfl.results.schema import FinalLine, Line, ValidationLine


class Ledger(Callback):
    """Keeps what it is told.

    Attributes:
        rounds: that ended, in order.
        slots: that were mixed with a matrix.
        scores: model and round to the hospitals' mean validation accuracy.
        tests: number of tests.
        failed: why the job did, if it did.
    """

    def __init__(self) -> None:
        self.rounds: list[int] = []
        self.slots: set[str] = set()
        self.scores: dict[tuple[str, int], float | None] = {}
        self.tests = 0
        self.ended = False
        self.failed: str | None = None

    def on_round_end(self, end: RoundEnd) -> None:
        self.rounds.append(end.round)
        self.slots |= end.matrices.keys()
        self._take(end.lines)

    def on_job_end(self, end: JobEnd) -> None:
        self._take(end.lines)
        self.ended = True

    def on_failure(self, failure: Failure) -> None:
        self.failed = failure.reason

    def _take(self, lines: tuple[Line, ...]) -> None:
        for line in lines:
            if isinstance(line, FinalLine):
                self.tests += 1
            elif isinstance(line, ValidationLine) and line.site == "mean":
                self.scores[line.model, line.round] = line.metrics["accuracy"]
