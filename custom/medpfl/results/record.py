# SPDX-License-Identifier: Apache-2.0
"""What happened in a job, collected at the server and told to the callbacks when a round or the job ends."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

import medpfl
from medpfl.core.errors import MedPFLError
from medpfl.core.mixing import Matrix
from medpfl.privacy.contract import Spent
from medpfl.results.callbacks import Callback, Failure, JobBegin, JobEnd, RoundEnd
from medpfl.results.schema import (
    AboutEvaluation,
    AboutTraining,
    BestRound,
    Bytes,
    Direction,
    EvaluationSummary,
    Event,
    FinalLine,
    Line,
    MetricLine,
    RoundLine,
    Summary,
    Traffic,
    TrainingLine,
    TrainingSummary,
    Typed,
    ValidationLine,
    number,
)

Place = tuple[int, str, Direction]


class Saved(Typed):
    """What was recorded between a run's checkpoint and the one before.

    Attributes:
        round: the last one that was done.
        bytes: what came to the traffic.
        matrices: "slot/round" to the rows.
    """

    round: int
    lines: list[Line]
    events: list[Event]
    bytes: list[Bytes]
    matrices: dict[str, list[list[float]]]


class Record:
    """Collects what a job leaves.

    Args:
        files: write it down; where one of them fails, the job does.
        trackers: are told too; one that fails is told no more.

    Attributes:
        asked: the hospitals that were drawn for any round so far, in a job that does not ask all.
    """

    def __init__(
        self, job: str, roster: tuple[str, ...], files: Sequence[Callback] = (), trackers: Sequence[Callback] = ()
    ):
        self.job, self.roster = job, roster
        self.lines: list[Line] = []
        self.events: list[Event] = []
        self.matrices: dict[str, Matrix] = {}
        self.asked: set[str] = set()
        self._bytes: dict[Place, tuple[int, int]] = {}
        self._unsaved_bytes: dict[Place, tuple[int, int]] = {}
        self._saved_lines = self._saved_events = 0
        self._unsaved_matrices: dict[str, Matrix] = {}
        self._files, self._trackers = tuple(files), list(trackers)
        self._told = 0
        self._log = logging.getLogger(__name__)

    def begin(self, results: Path) -> None:
        """The job begins, and leaves what it leaves in this folder."""
        begun = JobBegin(self.job, results)
        self._tell(0, lambda callback: callback.on_job_begin(begun))

    def metric(self, line: MetricLine) -> None:
        """One evaluation: which model, of which round, on which split of which hospital."""
        self.lines.append(line)

    def mean_score(self, round_number: int, model: str, score: str, value: float) -> None:
        self.lines.append(ValidationLine(site="mean", model=model, round=round_number, metrics={score: value}))

    def training(
        self, round_number: int, site: str, seconds: object, losses: object, privacy: Spent | None = None
    ) -> None:
        """A hospital's local work, as it says itself; what is no number is None."""
        loss = {str(name): number(value) for name, value in losses.items()} if isinstance(losses, dict) else {}
        line = TrainingLine(site=site, round=round_number, seconds=number(seconds), loss=loss, privacy=privacy)
        self.lines.append(line)

    def mean_losses(self) -> list[float]:
        """Of every round that was trained, the mean training loss over hospitals and networks, None left out."""
        found: dict[int, list[float]] = {}
        for line in self.lines:
            if isinstance(line, TrainingLine):
                losses = [value for value in line.loss.values() if value is not None]
                found.setdefault(line.round, []).extend(losses)
        return [float(np.mean(losses)) for _, losses in sorted(found.items()) if losses]

    def traffic(
        self, round_number: int, site: str, sent: int, received: int, encoded: tuple[int, int] | None = None
    ) -> None:
        """Bytes of the tensors in both directions, added up over a round's exchanges.

        Args:
            encoded: what travelled where there is a codec; without one, it is the tensors as they are.
        """
        travelled = encoded or (sent, received)
        self._add((round_number, site, "to_site"), sent, travelled[0])
        self._add((round_number, site, "from_site"), received, travelled[1])

    def last_traffic(self, rounds: int, site: str, sent: int, encoded: tuple[int, int] | None = None) -> None:
        """Bytes of the exchange after the last of the ``rounds``, which brings a hospital the models of that round and
        only scores back: those of the round that would follow."""
        self._add((rounds + 1, site, "to_site"), sent, encoded[0] if encoded else sent)

    def _add(self, place: Place, raw: int, coded: int) -> None:
        for known in (self._bytes, self._unsaved_bytes):
            before = known.get(place, (0, 0))
            known[place] = (before[0] + raw, before[1] + coded)

    @property
    def bytes(self) -> list[Bytes]:
        """The traffic so far."""
        return _bytes_of(self._bytes)

    def event(self, round_number: int, site: str, text: str) -> None:
        self.events.append(Event(round=round_number, site=site, event=text))

    def round(
        self, round_number: int, matrices: Mapping[str, Matrix], seconds: float, asked: list[str] | None = None
    ) -> None:
        """End of a round; ``asked``: the hospitals that were drawn for it, where not all were asked."""
        for slot, matrix in matrices.items():
            self.matrices[f"{slot}/{round_number:05d}"] = matrix
            self._unsaved_matrices[f"{slot}/{round_number:05d}"] = matrix
        self.lines.append(RoundLine(round=round_number, seconds=round(seconds, 3), asked=asked))
        self.asked.update(asked or ())
        self._end_round(round_number, matrices)

    def _end_round(self, round_number: int, matrices: Mapping[str, Matrix]) -> None:
        end = RoundEnd(self.job, round_number, self._new(), matrices)
        self._tell(round_number, lambda callback: callback.on_round_end(end))

    def finish(
        self, about: AboutTraining | AboutEvaluation, best: Mapping[str, BestRound], slots: Mapping[str, str]
    ) -> Summary:
        """End of the job.

        Args:
            slots: slot to the digest of its file, which is written.
        """
        left = {
            "job": self.job,
            "medpfl": medpfl.__version__,
            "written": time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime()),
            "roster": list(self.roster),
            "best": dict(best),
            "slots": dict(slots),
            "test": [line for line in self.lines if isinstance(line, FinalLine)],
            "events": list(self.events),
        }
        kind: type[Summary] = TrainingSummary if isinstance(about, AboutTraining) else EvaluationSummary
        summary = kind.model_validate({**left, **dict(about)})
        traffic = tuple(
            Traffic(**dict(line), ratio=round(line.raw / line.encoded, 3) if line.encoded else None)
            for line in self.bytes
        )
        end = JobEnd(summary, self._new(), tuple(self.lines), traffic, self.matrices)
        self._tell(0, lambda callback: callback.on_job_end(end))
        return summary

    def fail(self, reason: str) -> None:
        """Keep what is known of a job that could not go on.

        Raises:
            MedPFLError: it cannot be written.
        """
        failure = Failure(self.job, reason, self._new(), tuple(self.events))
        self._tell(0, lambda callback: callback.on_failure(failure))

    def _new(self) -> tuple[Line, ...]:
        lines = tuple(self.lines[self._told :])
        self._told = len(self.lines)
        return lines

    def _tell(self, round_number: int, tell: Callable[[Callback], None]) -> None:
        for callback in self._files:
            try:
                tell(callback)
            except OSError as error:
                why = error.strerror or str(error)
                raise MedPFLError(f"cannot write the job's results: {error}", f"results not written: {why}") from error
        for callback in list(self._trackers):
            try:
                tell(callback)
            except Exception as error:  # noqa: BLE001 (a tracker is others' code: whatever it raises, the job goes on)
                name = type(callback).__name__
                self._log.exception("the tracker %s failed", name)
                self.event(round_number, "server", f"the tracker {name} failed and is told no more: {error}")
                self._trackers.remove(callback)

    def unsaved(self, round_number: int) -> Saved:
        """What was recorded since the last call, for the checkpoint after this round."""
        matrices = {key: matrix.tolist() for key, matrix in self._unsaved_matrices.items()}
        found = Saved(
            round=round_number,
            lines=self.lines[self._saved_lines :],
            events=self.events[self._saved_events :],
            bytes=_bytes_of(self._unsaved_bytes),
            matrices=matrices,
        )
        self._saved_lines, self._saved_events = len(self.lines), len(self.events)
        self._unsaved_bytes, self._unsaved_matrices = {}, {}
        return found

    def restore(self, parts: Sequence[Saved], round_number: int) -> None:
        """Go on after ``round_number``, of what the checkpoints until then kept; the callbacks are told of what was
        measured."""
        self.lines = [line for part in parts for line in part.lines]
        self.asked = {site for line in self.lines if isinstance(line, RoundLine) for site in line.asked or ()}
        for line in (line for part in parts for line in part.bytes):
            self._add((line.round, line.site, line.direction), line.raw, line.encoded)
        events = [event for part in parts for event in part.events]
        self.events = [*events, *self.events]
        self._saved_lines, self._saved_events, self._unsaved_bytes = len(self.lines), len(events), {}
        self.matrices = {key: np.array(rows) for part in parts for key, rows in part.matrices.items()}
        ending = f"/{round_number:05d}"
        self._end_round(
            round_number, {key.removesuffix(ending): m for key, m in self.matrices.items() if key.endswith(ending)}
        )


def _bytes_of(traffic: Mapping[Place, tuple[int, int]]) -> list[Bytes]:
    return [
        Bytes(round=round_number, site=site, direction=direction, raw=raw, encoded=encoded)
        for (round_number, site, direction), (raw, encoded) in traffic.items()
    ]
