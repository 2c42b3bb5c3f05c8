# SPDX-License-Identifier: Apache-2.0
"""What was measured in a run's rounds, on the server's disk: every round is written a bounded number of times.

A round's part first stands in the checkpoint, which is written anyway and brought to the disk at once. As soon as the
parts there are longer than ``PENDING``, they move to the end of one file, which is only appended to. A checkpoint says
how much of that file belongs to it, so that each of the two that are kept has a whole history.
"""

import hashlib
import os
from pathlib import Path

from pydantic import Field

from medpfl.core.errors import MedPFLError
from medpfl.results.record import Saved
from medpfl.results.schema import RoundLine, Typed

FILE = "history.jsonl"
PENDING = 32 * 2**10
"""Characters that may stand in a checkpoint; a small job's file then is appended to once in about ten rounds."""


class Kept(Typed):
    """What a checkpoint says of its history.

    Attributes:
        length: bytes of the file that belong to it, and ``rounds``: those that they tell of.
        pending: the parts that are not in the file, with their checksums.
    """

    length: int = 0
    rounds: int = 0
    pending: list[str] = Field(default_factory=list)


class History:
    """A run's history.

    Args:
        folder: of the run's state.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE
        self._kept = Kept()

    def add(self, part: Saved) -> Kept:
        """Keep what was measured since the last call; returns what the checkpoint is to say.

        Raises:
            MedPFLError: the file cannot be written.
        """
        pending = [*self._kept.pending, _line(part)]
        if sum(map(len, pending)) > PENDING:
            self._kept = Kept(length=self._append(pending), rounds=part.round)
        else:
            self._kept = self._kept.model_copy(update={"pending": pending})
        return self._kept

    def _append(self, lines: list[str]) -> int:
        try:
            with open(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                file.seek(self._kept.length)  # what stands behind it belongs to no checkpoint
                file.write("".join(f"\n{line}" for line in lines).encode())  # a break first: before may be a gap
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
                return file.tell()
        except OSError as error:
            why = f"a file could not be written: {error.strerror}"
            raise MedPFLError(f"cannot write {self._path}: {error.strerror}", why) from error

    def restore(self, kept: Kept) -> tuple[list[Saved], list[str]]:
        """The parts that a checkpoint knows of, and sentences on those that were lost.

        Raises:
            MedPFLError: the file cannot be read for another reason than damage.
        """
        self._kept = kept
        try:
            with open(self._path, "rb") as file:
                lines = file.read(kept.length).split(b"\n")
        except FileNotFoundError:
            lines = []
        except OSError as error:
            raise MedPFLError(f"cannot read {self._path}: {error.strerror}") from error
        parts = [part for line in lines if (part := _part(line)) is not None]
        lost = sorted(set(range(1, kept.rounds + 1)).difference(*map(_rounds_of, parts)))
        which = (
            f"round {lost[0]}" if len(lost) == 1 else f"{len(lost)} rounds, {lost[0]} to {lost[-1]}," if lost else ""
        )
        told = [f"what was measured in {which} is damaged here and missing in the results"] if lost else []
        parts += [part for line in kept.pending if (part := _part(line.encode())) is not None]
        return parts, told

    def forget(self) -> None:
        """A new run begins in this folder."""
        self._path.unlink(missing_ok=True)


def _rounds_of(part: Saved) -> set[int]:
    """Those that a part tells of: of several, where not every round was followed by a checkpoint."""
    return {part.round, *(line.round for line in part.lines if isinstance(line, RoundLine))}


def _line(part: Saved) -> str:
    text = part.model_dump_json()
    return f"{hashlib.sha256(text.encode()).hexdigest()} {text}"


def _part(line: bytes) -> Saved | None:
    """None: it is not what was written."""
    digest, _, text = line.partition(b" ")
    return Saved.model_validate_json(text) if hashlib.sha256(text).hexdigest().encode() == digest else None
