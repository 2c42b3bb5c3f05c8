# SPDX-License-Identifier: Apache-2.0
"""One process at a time works in a run's state folder, at the server and at every hospital."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

from medpfl.core.errors import MedPFLError

PATIENCE = 60.0
"""Seconds to wait for a process that is about to end: that of an aborted job, or of a killed server's hospitals."""
_STEP = 0.2


class StateInUse(MedPFLError):
    """Another process works in the state folder. The text names no file, so it may go back to the server."""

    def __init__(self, message: str):
        super().__init__(message, public=message)


class StateLock:
    """A lock of the operating system's on a file of the folder: it ends with its process, however that ends.

    Args:
        name: of the file.
        taken: what another process is told first that finds it taken.
        patience: seconds to wait where it is; None: ``PATIENCE``.
    """

    def __init__(
        self,
        name: str = "lock",
        taken: str = "the same run of this job is under way already",
        patience: float | None = None,
    ) -> None:
        self._name, self._taken, self._patience = name, taken, patience
        self._folder: Path | None = None
        self._file: IO[str] | None = None

    def take(self, folder: Path, who: str, stopped: Callable[[], bool] = lambda: False) -> None:
        """Take the lock of ``folder`` and give back that of another folder; nothing happens where it is taken already.

        Args:
            who: what another process is told that finds it taken.
            stopped: ends the waiting.

        Raises:
            StateInUse: it is not free in time; names who has it.
            MedPFLError: the folder cannot be written, its file system has no locks, or its name is not in UTF-8, and
                what was trained could not be read back from there.
        """
        if self._folder == folder:
            return
        if (readable := str(folder).encode("utf-8", "backslashreplace").decode()) != str(folder):
            why = "has a name that is not in UTF-8; choose another one, or rename it (convmv -f latin1 -t utf8)"
            raise MedPFLError(f"the folder {readable} {why}", f"the state folder {why}")
        self.release()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            file = open(folder / self._name, "a+", encoding="utf-8")  # noqa: SIM115 (it is held until release)
            try:
                _wait(file, self._taken, stopped, PATIENCE if self._patience is None else self._patience)
                file.truncate(0)
                file.write(
                    f"{who} (process {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC)"
                )
                file.flush()
            except BaseException:
                file.close()
                raise
        except OSError as error:
            raise MedPFLError(
                f"cannot lock the state folder {folder}: {error.strerror}",
                f"the state folder could not be locked: {error.strerror}",
            ) from error
        self._folder, self._file = folder, file

    def release(self) -> None:
        """Give it back."""
        if self._file is not None:
            self._file.close()
        self._folder = self._file = None


def _wait(file: IO[str], taken: str, stopped: Callable[[], bool], patience: float) -> None:
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if stopped() or time.monotonic() > deadline:
                file.seek(0)
                raise StateInUse(f"{taken}: {file.read(1000)}; wait for its end or abort it") from None
        time.sleep(_STEP)
