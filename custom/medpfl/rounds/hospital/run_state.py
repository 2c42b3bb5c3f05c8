# SPDX-License-Identifier: Apache-2.0
"""The run that a hospital's process works in: its folder, the lock on it, and how what was kept there is taken up."""

from collections.abc import Callable
from pathlib import Path

import torch

from medpfl import store
from medpfl.core.errors import DataError, ProtocolError
from medpfl.methods.precision import Scalers
from medpfl.rounds.hospital.mixed import MIXED
from medpfl.rounds.hospital.networks import Networks
from medpfl.rounds.hospital.private import BEGUN, PRIVATE, Basis, restore_private
from medpfl.rounds.hospital.run_files import RunFiles
from medpfl.rounds.lock import StateLock
from medpfl.rounds.messages import plain_name
from medpfl.rounds.protocol.requests import OfRun, StatisticsRequest, TrainRequest


class RunState:
    """What this process has of the run.

    Args:
        site: the hospital.
        stopped: whether the job was aborted; ends the waiting for another process.
        files: of a run, given its folder.

    Attributes:
        optimizers: by network; there once the run was entered.
        scalers: of float16's gradients, likewise.
        trained: the round that this process has trained in, as long as its networks are as that left them.
        looked: whether its networks are as the validation after the last round, or the job's end, left them.
    """

    def __init__(self, site: str, stopped: Callable[[], bool], files: Callable[[Path], RunFiles] = RunFiles):
        self._site, self._stopped, self._files_in = site, stopped, files
        self._run: str | None = None
        self._lock = StateLock()
        self.trained: int | None = None
        self.looked = False
        self._files: RunFiles | None = None
        self.optimizers: dict[str, torch.optim.Optimizer]
        self.scalers: Scalers = {}

    def enter(self, header: OfRun, home: Path, networks: Networks, basis: Basis) -> list[str]:
        """On this process's first task of a run: start afresh in its first round, else take up what was kept on disk.
        What an earlier run with the same key has left is forgotten, also by who was away in the first round.

        Args:
            home: the hospital's folder of the job.
            networks: are given their private entries.
            basis: with what the hospital would go on.

        Returns:
            Sentences for the server on what was taken up, or is not there.

        Raises:
            DataError: what was kept was trained on other data.
            ProtocolError: it is of a job of another configuration. An honest server names no such run; what was
                trained with less noise, or none, would be in what leaves now.
        """
        if self._run == header.run:
            return []
        folder = home / "state" / plain_name(header.run)
        self._lock.take(folder, f"at {self._site}", self._stopped)
        store.sweep(folder)
        if self._files is None or self._files.folder != folder:  # else these may hold what is on no disk yet
            self._files = self._files_in(folder)
        self._run = header.run
        self.optimizers, self.scalers = {}, {}
        begins = isinstance(header, StatisticsRequest | TrainRequest)
        done = header.round - begins
        if done == 0 or header.fresh or _begun(self.files, done) != header.begun:
            for kind in (PRIVATE, MIXED):
                self.files.forget(kind)
            self.files.save(BEGUN, 0, {}, {BEGUN: header.begun})
        if done == 0 or header.fresh:
            return []
        kept, damaged = self.files.newest(PRIVATE, done)
        notes = [f"the state kept here after round {lost} is damaged and not used" for lost in damaged]
        if kept is None:
            when = f"{'in' if begins else 'after'} round {header.round}"
            return [*notes, f"no state of this run is kept here; the private part starts anew {when}"]
        if not basis.same_data(kept.meta):
            self._run = None
            sentence = (
                f"{self._site}'s data are not those with which this run began: cases were added, removed, moved to "
                "another split, labelled anew or have other values, the site file declares them otherwise or names "
                "another network, or a class of another package that it names has other code. It would be tested on "
                "cases that it has trained on, or its model's inputs would mean something else. Put them as they "
                "were, or submit the job with another seed, which begins a new run"
            )
            raise DataError(sentence, public=sentence)
        if kept.meta.get("config") != basis.config:
            self._run = None
            raise ProtocolError(
                "the server names a run of another method, task, noise or encryption than this job's; "
                f"{self._site} does not go on from what it keeps of it"
            )
        self.optimizers, self.scalers = restore_private(kept, networks.models, networks.owner, networks.device)
        return [*notes, f"resumed from the state after round {kept.number}"]

    @property
    def files(self) -> RunFiles:
        """Of the run, which was entered."""
        assert self._files is not None, "no run was entered"
        return self._files

    @property
    def entered(self) -> bool:
        """Whether this process has the run's state."""
        return self._run is not None

    def forget(self) -> None:
        """The networks are made anew: the next task takes up again what was kept on disk."""
        self._run = self.trained = None
        self.looked = False
        self.optimizers, self.scalers = {}, {}  # on a GPU they take twice the networks' memory

    def close(self) -> None:
        """Let another job work in the run's folder."""
        self._lock.release()


def _begun(files: RunFiles, done: int) -> object:
    """What tells the run whose state lies here from others with its key: "" where nothing is known of it, None where
    that is damaged. It has a file of its own from the first task on; without that the private part says it."""
    kept, damaged = files.newest(BEGUN, 0)
    unknown = None if damaged else ""
    kept = kept or files.newest(PRIVATE, done)[0]
    return kept.meta.get(BEGUN, unknown) if kept else unknown
