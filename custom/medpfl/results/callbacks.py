# SPDX-License-Identifier: Apache-2.0
"""What is done at the end of a round and of a job: one small interface, for our own files and for others' trackers.

A tracker (``results.trackers`` has two) is one file: a class derived from ``Callback``, which a job names under
"trackers" or a caller gives to ``simulate``. One that fails is told no more; the job goes on.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.mixing import Matrix
from medpfl.results.files import FAILURE, LINES, MIXING, SUMMARY, TRAFFIC, append_lines, write_json
from medpfl.results.schema import Event, FailureReport, Line, Summary, Traffic


@dataclass(frozen=True)
class JobBegin:
    """A job begins, or goes on after it was stopped.

    Attributes:
        results: the server's folder of what the job leaves; it is there.
    """

    job: str
    results: Path


@dataclass(frozen=True)
class RoundEnd:
    """A round is over, and its checkpoint is about to be written.

    Attributes:
        lines: what was measured since the last call. The validation of a round's mixing comes with the next round,
            so a line says itself of which round it is. After a resume: first those of all rounds before.
        matrices: slot to the K x K matrix (hospitals sorted) that mixed it.
    """

    job: str
    round: int
    lines: tuple[Line, ...]
    matrices: Mapping[str, Matrix]


@dataclass(frozen=True)
class JobEnd:
    """A job is over.

    Attributes:
        lines: what was measured since the last call: the last validation, and the tests.
        history: every line of the job.
        mixing: "slot/round" to its matrix.
    """

    summary: Summary
    lines: tuple[Line, ...]
    history: tuple[Line, ...]
    traffic: tuple[Traffic, ...]
    mixing: Mapping[str, Matrix]


@dataclass(frozen=True)
class Failure:
    """A job could not go on; ``lines``: what was measured since the last call."""

    job: str
    reason: str
    lines: tuple[Line, ...]
    events: tuple[Event, ...]


class Callback(Checked):
    """Told, at the server, what happens in a job; override what is of interest.

    To be named in a job it must be a dataclass, whose fields are its arguments. It is built wherever the job is
    checked, so it opens nothing (no file, no connection) before it is told of something.
    """

    def on_job_begin(self, begin: JobBegin) -> None:
        """Before anything else."""

    def on_round_end(self, end: RoundEnd) -> None:
        """After each round's mixing."""

    def on_job_end(self, end: JobEnd) -> None:
        """When the tests are in and every slot's file is written."""

    def on_failure(self, failure: Failure) -> None:
        """When the job ends without results."""


class ResultFiles(Callback):
    """Writes ``folder``: metrics.jsonl as it happens; mixing.npz, bytes.json and summary.json at the end.

    Raises:
        MedPFLError: the folder cannot be written.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._begun = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            open(folder / LINES, "a").close()
        except OSError as error:
            raise MedPFLError(f"cannot write the results folder {folder}: {error.strerror}") from error

    def _write(self, lines: Iterable[Line]) -> None:
        """To metrics.jsonl. With the first of them end the results that an earlier run left here: two runs' would pass
        for one's."""
        if not self._begun:
            for name in (SUMMARY, FAILURE, "report.html", MIXING, TRAFFIC):
                (self.folder / name).unlink(missing_ok=True)
            (self.folder / LINES).write_text("")
            self._begun = True
        append_lines(self.folder, lines)

    def on_round_end(self, end: RoundEnd) -> None:
        self._write(end.lines)

    def on_job_end(self, end: JobEnd) -> None:
        self._write(end.lines)
        with open(self.folder / MIXING, "wb") as file:
            np.savez_compressed(file, roster=np.array(end.summary.roster), **end.mixing)  # type: ignore[arg-type]
        write_json(self.folder / TRAFFIC, list(end.traffic))
        write_json(self.folder / SUMMARY, end.summary)

    def on_failure(self, failure: Failure) -> None:
        self._write(failure.lines)
        report = FailureReport(job=failure.job, reason=failure.reason, events=list(failure.events))
        write_json(self.folder / FAILURE, report)


class Report(Callback):
    """Writes report.html into ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._log = logging.getLogger(__name__)

    def on_job_end(self, end: JobEnd) -> None:
        from medpfl.results.report import write_page  # matplotlib: only where a report is written

        try:
            write_page(self.folder, end.summary, end.history, end.mixing, end.traffic)
        except ConfigError as error:  # the numbers are whole; any machine can make the page of them
            self._log.warning("%s; 'medpfl report FOLDER' writes it from the results, on any machine", error)
