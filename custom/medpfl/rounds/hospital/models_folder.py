# SPDX-License-Identifier: Apache-2.0
"""The folder in which a hospital finds its models of a job: those of one run, never of two beside each other."""

import math
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.deployed.evaluate import write_text
from medpfl.rounds.lock import StateLock

_NAME, _MARK, _LOCK = "models", ".run", ".models.lock"


@dataclass(frozen=True)
class Models:
    """``folder``: for a run's models; ``earlier``: where those of the same run made before were moved to now."""

    folder: Path
    earlier: Path | None = None

    def drop_replaced(self) -> None:
        """Once the run's models are there: remove the earlier ones, if each was written anew. A hospital that missed
        the best round has no such model of this run, and keeps the earlier run's beside it."""
        if self.earlier and {file.name for file in self.earlier.iterdir()} <= set(os.listdir(self.folder)):
            shutil.rmtree(self.earlier, ignore_errors=True)


@contextmanager
def alone(home: Path, site: str, stopped: Callable[[], bool]) -> Iterator[None]:
    """While it is entered, no other run of a job of this name (with another seed, say) writes its models here: it would
    move the folder away in which this one writes on. It waits for its turn, for fine-tuning and tests may take long.

    Args:
        home: the hospital's folder of the job.
        stopped: whether this job was aborted; ends the waiting.

    Raises:
        StateInUse: it was, while another run had its turn.
        MedPFLError: the folder cannot be written, or its file system has no locks.
    """
    lock = StateLock(_LOCK, "another run of a job of this name is at its end here", math.inf)
    lock.take(home, f"at {site}", stopped)
    try:
        yield
    finally:
        lock.release()


def open_models(home: Path, run: str, begun: str) -> Models:
    """The folder for a run's models. What another run has left there is moved to ``models-<when it was written>``.

    Args:
        home: the hospital's folder of the job.
        run: a name of the run and of the data that it was trained on.
        begun: what tells it from one of the same name that began before, whose models are not its own either.

    Raises:
        MedPFLError: the folder cannot be looked through or moved.
    """
    folder = home / _NAME
    mark, own = folder / _MARK, f"{run} {begun}".encode()
    earlier = None
    try:
        store.sweep(folder)  # a process that was killed here left a model or a list of patients' cases half-written
        there = mark.read_bytes() if mark.is_file() else b""
        if there == own:
            return Models(folder)
        written = [file.stat().st_mtime for file in folder.glob("*")]
        if written:
            aside = f"{_NAME}-{datetime.fromtimestamp(max(written), UTC):%Y%m%dT%H%M%SZ}"
            taken = {path.name for path in home.iterdir()}
            later = (f"{aside}-{number}" for number in range(2, len(taken) + 2))
            moved = home / next(name for name in (aside, *later) if name not in taken)
            os.rename(folder, moved)
            earlier = moved if there.rpartition(b" ")[0] == run.encode() else None
    except OSError as error:
        raise MedPFLError(
            f"cannot move the models of an earlier run, {folder}: {error.strerror}",
            f"the models of an earlier run could not be moved: {error.strerror}",
        ) from error
    write_text(mark, own.decode())
    return Models(folder, earlier)
