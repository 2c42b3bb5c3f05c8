# SPDX-License-Identifier: Apache-2.0
"""A job's numbers as TensorBoard's event files, one folder a hospital, as FLARE's own receiver lays them out."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.extras import require
from medpfl.results.callbacks import Callback, Failure, JobBegin, JobEnd, RoundEnd
from medpfl.results.files import read_lines
from medpfl.results.schema import Line
from medpfl.results.trackers.scalars import Scalar, scalars

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

FOLDER, EVENTS = "tb_events", "events.out.tfevents.*"
"""Where FLARE's receiver writes; what TensorBoard calls its files."""


class EventFiles:
    """Writes numbers below ``folder``, which must hold no event files yet.

    Raises:
        ConfigError: tensorboard is not installed, or the folder holds event files: TensorBoard would draw both as one.
    """

    def __init__(self, folder: Path):
        require("tensorboard", "tracking", "writing for TensorBoard")
        if next(folder.rglob(EVENTS), None) is not None:
            raise ConfigError(f"{folder} holds TensorBoard's event files already; name a folder that has none")
        self.folder = folder
        self._writers: dict[str, EventFileWriter] = {}

    def write(self, lines: Iterable[Line]) -> None:
        """Write the lines' numbers, at the round that each names; they can be seen at once."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        for found in scalars(lines):
            value = Summary.Value(tag=found.name, simple_value=found.value)
            self._writer(found).add_event(Event(step=found.round, summary=Summary(value=[value])))
        for writer in self._writers.values():
            writer.flush()

    def close(self) -> None:
        """End the files."""
        for writer in self._writers.values():
            writer.close()

    def _writer(self, found: Scalar) -> "EventFileWriter":
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if found.site not in self._writers:
            if Path(found.site).name != found.site or found.site in ("", "..") or "\0" in found.site:
                raise MedPFLError(f"hospital '{found.site}': the name is no folder's, TensorBoard's files need one")
            self._writers[found.site] = EventFileWriter(str(self.folder / found.site))
        return self._writers[found.site]


@dataclass(frozen=True)
class TensorBoard(Callback):
    """Writes ``tb_events/<hospital>/`` into the results folder while the job runs; a job says no other place.

    A resumed job writes all rounds, those before too, as its ``metrics.jsonl`` holds them.
    """

    _files: list[EventFiles] = field(default_factory=list, init=False, repr=False, compare=False)

    def on_job_begin(self, begin: JobBegin) -> None:
        folder = begin.results / FOLDER
        for old in folder.rglob(EVENTS):  # of a job before in the same folder, whose metrics.jsonl is replaced too
            old.unlink()
        self._files[:] = [EventFiles(folder)]

    def on_round_end(self, end: RoundEnd) -> None:
        self._write(end.lines)

    def on_job_end(self, end: JobEnd) -> None:
        self._write(end.lines, last=True)

    def on_failure(self, failure: Failure) -> None:
        self._write(failure.lines, last=True)

    def _write(self, lines: tuple[Line, ...], last: bool = False) -> None:
        for files in self._files:
            files.write(lines)
            if last:
                files.close()


def write_tensorboard(results: Path, folder: Path) -> None:
    """A finished results folder's numbers as event files below ``folder``.

    Raises:
        MedPFLError: as ``read_lines`` and ``EventFiles``; or the folder cannot be written.
    """
    lines = read_lines(results)
    files = EventFiles(folder)
    try:
        files.write(lines)
        files.close()
    except OSError as error:
        raise MedPFLError(f"cannot write {folder}: {error.strerror}") from error
