# SPDX-License-Identifier: Apache-2.0
"""A hospital's account of its noise in the jobs of one name: on its own disk, written before anything is sent.

What was written and then not sent, because the process was killed between, counts all the same.
"""

import fcntl
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from medpfl import store
from medpfl.core.errors import MedPFLError
from medpfl.privacy.accountant import epsilon, merged
from medpfl.privacy.contract import Level, Mechanism, Spent
from medpfl.privacy.noise import Stream, fixed_secret, fixed_seed, new_secret

FILE = "privacy.safetensors"
LOCK = ".privacy.lock"
"""In the hospital's folder of all jobs."""


class _Kept(BaseModel):
    """What the file says.

    Attributes:
        level: that of every message, or "record" where only some were noised as a whole: these hide single cases, too.
        fixed: the noise of some was made from a fixed seed.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)

    releases: int
    history: list[Mechanism]
    level: Level = "record"
    fixed: bool = False


@dataclass(frozen=True)
class Ledger:
    """Args:
    home: the hospital's folder of the job, in its folder of all jobs.
    site: the hospital.
    """

    home: Path
    site: str

    @property
    def _path(self) -> Path:
        return self.home / FILE

    def open(self) -> None:
        """Begin it, unless there is one.

        Raises:
            MedPFLError: it is damaged, or the folder cannot be written.
        """
        with self.alone():
            if self._path.exists():
                self._kept()
            else:
                self._write(_Kept(releases=0, history=[], level="update"))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While it is entered, no other job of the hospital's looks into its accounts to send something: two that did
        so at the same moment would both find room for what one of them may send, and one would write over the other.

        Raises:
            MedPFLError: the folder cannot be written, or its file system has no locks.
        """
        path = self.home.parent / LOCK
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            number = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError as error:
            raise _unlocked(path, error) from error
        try:
            try:
                fcntl.flock(number, fcntl.LOCK_EX)
            except OSError as error:
                raise _unlocked(path, error) from error
            yield
        finally:
            os.close(number)  # gives the lock back, as the end of the process does

    def stream(self, *parts: object) -> Stream:
        """Noise for what is to be sent next, another one every time: it is never on two messages, whatever is redone.

        Its secret is nowhere on the disk. A copy of the account that is put back, or a machine that is set back to a
        snapshot, would make noise again that was on a message before.
        """
        return Stream(fixed_secret(self.site) or new_secret(), (self._kept().releases, *parts))

    def release(self, mechanisms: Iterable[Mechanism], level: Level) -> None:
        """Write down what is about to be sent; ``alone``."""
        kept = self._kept()
        self._write(
            _Kept(
                releases=kept.releases + 1,
                history=merged([*kept.history, *mechanisms]),
                level=kept.level if level == "update" else level,
                fixed=kept.fixed or fixed_seed() is not None,
            )
        )

    def spent(self, level: Level, delta: float) -> Spent:
        """What was sent so far.

        Args:
            level: that of the job, as long as nothing was sent.
        """
        kept = self._kept()
        return Spent(
            level=kept.level if kept.releases else level,
            epsilon=epsilon(kept.history, delta),
            delta=delta,
            releases=kept.releases,
            fixed=kept.fixed or fixed_seed() is not None,
        )

    def with_others(self, more: Iterable[Mechanism], delta: float) -> float:
        """Epsilon of everything that this hospital has sent in any job, and of ``more``; ``alone``, where something is
        sent because of it."""
        every = (read(path).history for path in sorted(self.home.parent.glob(f"*/{FILE}")))
        return epsilon([*(one for history in every for one in history), *more], delta)

    def _kept(self) -> _Kept:
        return read(self._path)

    def _write(self, kept: _Kept) -> None:
        store.save(self._path, {}, kept.model_dump(mode="json"))
        store.sync(self.home)  # else a power failure may put the account back as it was before what was sent


def _unlocked(path: Path, error: OSError) -> MedPFLError:
    return MedPFLError(
        f"cannot lock the accounts of this hospital's noise by {path}: {error.strerror}",
        f"the accounts of this hospital's noise could not be locked: {error.strerror}",
    )


def read(path: Path) -> _Kept:
    """Raises MedPFLError: it is damaged; what was spent is then not known, so that nothing more may be sent."""
    try:
        return _Kept.model_validate(store.read(path)[1])
    except (store.DamagedFile, ValidationError) as error:
        raise MedPFLError(
            f"the account of this hospital's noise, {path}, is damaged ({error}): what was spent is not known, so "
            "nothing more is sent; put back a copy of it, or move the file away to begin a new account",
            public="this hospital's account of its noise is damaged, so it sends nothing more",
        ) from error
