# SPDX-License-Identifier: Apache-2.0
"""A job under way at the server: what is known of it, what is asked in its name, whose answers count, checkpoints."""

import contextlib
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np

from medpfl import store
from medpfl.core.errors import ConfigError, RefusedUpdate
from medpfl.core.mixers import RoundInfo
from medpfl.data.fingerprint import Planned
from medpfl.job.contents import Job
from medpfl.job.sampling import asked_per_round
from medpfl.results.callbacks import Callback, Report, ResultFiles
from medpfl.results.record import Record
from medpfl.results.schema import NO_HOSPITALS, BestRound
from medpfl.rounds.announcing import versions
from medpfl.rounds.lock import StateLock
from medpfl.rounds.messages import Message, Slots
from medpfl.rounds.planning import as_planned
from medpfl.rounds.privacy import check_statistics_wanted
from medpfl.rounds.protocol.bounded import Part
from medpfl.rounds.protocol.replies import RefineReply, Reply, TrainReply
from medpfl.rounds.protocol.requests import OfRun, Request
from medpfl.rounds.server import checkpoint
from medpfl.rounds.server.answers import Check, answers, no_tensors
from medpfl.rounds.server.behind import Behind
from medpfl.rounds.server.best import BestRounds
from medpfl.rounds.server.checks import Table
from medpfl.rounds.server.copies import Copies
from medpfl.rounds.server.history import History
from medpfl.rounds.server.quorum import Quorum
from medpfl.rounds.server.shelf import Shelf
from medpfl.rounds.terms import terms_of

Replies = Mapping[str, Message[Reply]]
"""Hospital to its answer; who failed or did not answer in time is missing."""
Q = TypeVar("Q", bound=OfRun)
A = TypeVar("A", bound=Part)


@dataclass(eq=False, repr=False)
class ServerRun:
    """State of a job at the server.

    Args:
        job: what it says.
        hospitals: their names, in any order; ``roster`` has them sorted.
        home: folder for checkpoints, outside FLARE's run folder.
        results: folder for what the job leaves behind.
        trackers: are told of every round's end and the job's, beside what writes ``results`` and the job's own.
        due: whether the checkpoint of a round is to be written now.

    Attributes:
        done: rounds that are finished.
        asked: how many hospitals a round asks; None: all.
        joined: hospitals that passed the init task; the others take no part.
        sizes: joined hospital to its samples by split.
        expected: slot to its entries, as the hospitals that joined have them; ``buffers``: those that are no weights.
        run: the run's key; ``begun``: what tells it from one with the same key that began before.
    """

    job: Job
    hospitals: Sequence[str]
    home: Path
    results: Path
    trackers: Sequence[Callback] = ()
    due: Callable[[int], bool] = lambda round_number: True
    expected: Table = field(init=False)
    buffers: frozenset[str] = field(init=False)
    run: str = field(init=False)
    begun: str = field(init=False)

    def __post_init__(self) -> None:
        job = self.job
        for name in NO_HOSPITALS:
            if name in self.hospitals:
                raise ConfigError(
                    f"a hospital cannot be called '{name}', which is what results call the {name} itself; give it "
                    "another name"
                )
        self.settings = job.settings
        self.terms = terms_of(job)
        check_statistics_wanted(job, len(self.hospitals))
        self.roster = tuple(sorted(self.hospitals))
        self.copies = Copies(
            job.mixers, self.roster, Shelf(len(self.roster), self.home), job.settings.encryption is not None
        )
        self._kept: list[set[str]] = []
        files = [ResultFiles(self.results), Report(self.results)]
        self.record = Record(job.name, self.roster, files, [*job.trackers, *self.trackers])
        self.record.begin(self.results)
        self.quorum = Quorum(self.record, self.roster, job.min_clients)
        self.asked = asked_per_round(job.settings, job.min_clients, len(self.roster))
        self._check_asked()
        self.scores = BestRounds(self.record, self.terms.score, self.terms.measures[self.terms.score])
        self.done = 0
        self.joined: list[str] = []
        self.sizes: dict[str, dict[str, int]] = {}
        self._lock = StateLock()
        self._saving = Behind("medpfl-checkpoint")
        self._log = logging.getLogger(__name__)

    def _check_asked(self) -> None:
        for slot, mixer in self.job.mixers.items():
            if self.asked is not None and self.asked < mixer.least_asked:
                raise ConfigError(
                    f"component '{slot}': {type(mixer).__name__} needs at least {mixer.least_asked} hospitals in a "
                    f"round, and the controller's hospitals_per_round asks {self.asked}: ask more"
                )

    def close(self) -> None:
        """Let another job work in this run's state folder, once the last checkpoint is there."""
        try:
            self._saving.close()
        finally:
            self._lock.release()

    def follow(self, plan: Planned | None) -> None:
        """The job's network is the planned one, where it was to be planned."""
        method, task = as_planned(self.job.method, self.job.task, plan)
        self.job = dataclasses.replace(self.job, method=method, task=task)
        self.terms = terms_of(self.job)

    @property
    def min_sites(self) -> int:
        """How many hospitals must answer for a round to count."""
        return self.quorum.least

    @property
    def best(self) -> dict[str, BestRound]:
        """Model to its best round so far and the score there."""
        return self.scores.best

    def payload_bytes(self, site: str) -> int:
        """Bytes of the tensors that a hospital is sent with its next models."""
        return self.copies.byte_count(site)

    def info(self, present: Collection[str]) -> RoundInfo:
        """What components are told of a round in which these hospitals answered."""
        sizes = [float(self.sizes.get(site, {}).get("train", 0)) for site in self.roster]
        here = tuple(site in present for site in self.roster)
        return RoundInfo(self.roster, np.array(sizes), here, buffers=self.buffers)

    def arrived(self, site: str, reply: Message[Reply]) -> Message[Reply]:
        """An answer as soon as it is there: its tensors lie where the hospitals' models lie, and are looked at.

        Raises:
            RefusedUpdate: a value is of a type that models cannot have.
            MedPFLError: the disk is full, or cannot be written.
        """
        if not reply.slots:
            return reply
        reply = dataclasses.replace(reply, slots=self.copies.shelf.take(reply.slots))
        if self.joined and isinstance(reply.header, (TrainReply, RefineReply)):
            with contextlib.suppress(RefusedUpdate):  # when all answers are there, it is refused in its turn
                self.copies.look(site, reply.slots, self.expected, self.buffers)
        return reply

    # -- questions and answers ----------------------------------------------------------------------------------------

    def ask(self, kind: type[Q], round_number: int, **more: object) -> Q:
        """A request of this run; ``more``: the fields of its kind."""
        of_run = {"run": self.run, "begun": self.begun, "rounds": self.settings.rounds, "best": self.best}
        return kind.model_validate({**of_run, "round": round_number, **more})

    def to(self, site: str, header: Q) -> Q:
        """The request as this hospital gets it: where not all are asked, it may be the hospital's first."""
        if self.asked is None or site in self.record.asked:
            return header
        return header.model_copy(update={"fresh": True})

    def answers(
        self,
        asked: Request,
        kind: type[A],
        replies: Replies,
        check: Check[A] = no_tensors,
        refused: str = "answer refused",
    ) -> dict[str, Message[A]]:
        """The replies that count; of the others the events tell.

        Args:
            kind: what answers ``asked``.
            check: looks at a hospital's tensors.
            refused: how the event begins that tells of an answer that does not count.

        Raises:
            MedPFLError: the checkpoint of the round before, which was being written meanwhile, could not be.
        """
        self.settle()  # what it reads changes from here on

        def refuse(site: str, reason: str) -> None:
            self.refuse(site, asked.round, f"{refused}: {reason}")

        return answers(asked, kind, replies, self.terms, check, refuse)

    def refuse(self, site: str, round_number: int, reason: str) -> None:
        """Note that a hospital answered with an error."""
        self.quorum.refuse(site, round_number, reason)

    def take_notes(self, site: str, round_number: int, notes: Sequence[str]) -> None:
        """Keep what a hospital says of its own state."""
        for note in notes:
            self.record.event(round_number, site, note)

    # -- checkpoint ---------------------------------------------------------------------------------------------------

    def begin(self, run: str) -> bool:
        """Take the run's state folder, and take up the run if it is unfinished; returns whether it was.

        Args:
            run: its key.

        Raises:
            StateInUse: the same run is under way in another job.
        """
        self.run, self._state = run, self.home / "state" / run
        self._lock.take(self._state, f"the job whose results go to {self.results}")
        store.sweep(self._state)
        self.history = History(self._state)
        self.copies.shelf.open(self._state / checkpoint.MODELS)
        if self._resume():
            return True
        for text in checkpoint.other_runs(self._state):
            self.record.event(0, "server", text)
        return False

    def settle(self) -> None:
        """Until the checkpoint that is being written is there.

        Raises:
            MedPFLError: it cannot be written.
        """
        self._saving.wait()

    def save(self, finished: bool = False) -> None:
        """Write the checkpoint of the last round that is done; of models that lie in files, their names.

        It is written while the hospitals compute, unless the job is ``finished``: ``answers`` waits for it, before
        anything of what it holds is changed. If this process ends before, the run goes on from the checkpoint before,
        as it does from the older of two where the newer one is damaged.

        Raises:
            MedPFLError: this one, if the job is finished, or the one before cannot be written.
        """
        self.settle()
        shelf = self.copies.shelf
        about = checkpoint.About(
            done=self.done,
            finished=finished,
            roster=list(self.roster),
            best=self.best,
            scores=self.scores.scores,
            more=sorted(self.scores.more),
            history=self.history.add(self.record.unsaved(self.done)),
            saved=time.time(),
            begun=self.begun,
            asked=sorted(self.record.asked),
            versions=versions(),
            files=shelf.names(self.copies.stack) if shelf.on_disk else {},
        )
        self._saving.start(functools.partial(self._write, about, shelf.last))
        if finished:
            self.settle()

    def _write(self, about: checkpoint.About, last: int) -> None:
        shelf, states = self.copies.shelf, self.copies.states()
        if not shelf.on_disk:
            checkpoint.save(self._state, self.copies.compact(), states, about)
            return
        digests = shelf.seal(about.files)
        checkpoint.save(self._state, {}, states, about.model_copy(update={"digests": digests}))
        self._kept = [*self._kept[-1:], set(digests)] if not about.finished else [set(digests)]
        shelf.forget(set().union(*self._kept), last)

    def _resume(self) -> bool:
        """Take up an unfinished run of the same job, settings, seed and roster; a finished one starts fresh."""
        found, told = checkpoint.load(self._state, self.copies.entries(self.expected), self.roster, self.copies.shelf)
        if found is not None:
            self.copies.restore(found.stack, found.mixers)
            self.done, self.begun = found.about.done, found.about.begun
            self._kept = [set(found.about.digests)]
            self.scores.restore(found.about.best, found.about.scores, found.about.more)
            parts, lost = self.history.restore(found.about.history)
            told = [*told, *lost]
            self.record.restore(parts, self.done)
            self.record.asked.update(found.about.asked)
        else:
            self.begun = secrets.token_hex(8)
            self.history.forget()
        for text in told:
            self.record.event(self.done, "server", text)
            self._log.info(text)
        return found is not None


def slots_of(messages: Mapping[str, Message[Part]]) -> dict[str, Slots]:
    """Hospital to the tensors of its message."""
    return {site: message.slots for site, message in messages.items()}
