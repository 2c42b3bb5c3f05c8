# SPDX-License-Identifier: Apache-2.0
"""The server's side of a job, without a transport: what to send to whom, mixing, best rounds, checkpoints, records.

``rounds.loop`` says in which order its methods are called: one that makes messages, then one that takes the answers.
"""

import dataclasses
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np

from medpfl.core.codecs.progress import progress_of
from medpfl.core.mixers import RoundInfo
from medpfl.core.mixing import Matrix
from medpfl.data.fingerprint import Planned
from medpfl.job.contents import Job
from medpfl.results.callbacks import Callback, Report, ResultFiles
from medpfl.results.files import write_slots
from medpfl.results.presence import absences, stretches
from medpfl.results.record import Record
from medpfl.results.schema import BestRound
from medpfl.rounds import checkpoint
from medpfl.rounds.announcing import versions
from medpfl.rounds.answers import Check, answers, no_tensors
from medpfl.rounds.best import BestRounds
from medpfl.rounds.checks import check_statistics, most_common
from medpfl.rounds.copies import Copies
from medpfl.rounds.joining import about, begins_with, join, oddities
from medpfl.rounds.lock import StateLock
from medpfl.rounds.messages import Message, Slots, byte_count, digest_of, table
from medpfl.rounds.planning import Planning, as_planned
from medpfl.rounds.privacy import SPENT, check_statistics_wanted
from medpfl.rounds.protocol import replies as heard
from medpfl.rounds.protocol import requests as ask
from medpfl.rounds.protocol.bounded import Part
from medpfl.rounds.quorum import Quorum
from medpfl.rounds.refining import Refining, refining, show
from medpfl.rounds.terms import terms_of

Replies = Mapping[str, Message[heard.Reply]]
"""Hospital to its answer; who failed or did not answer in time is missing."""
Q = TypeVar("Q", bound=ask.OfRun)
A = TypeVar("A", bound=Part)


class Coordinator:
    """State of a job at the server.

    Args:
        job: what it says.
        roster: the hospitals' names.
        home: folder for checkpoints, outside FLARE's run folder.
        results: folder for what the job leaves behind.
        trackers: are told of every round's end and the job's, beside what writes ``results`` and the job's own.
    """

    def __init__(
        self,
        job: Job,
        roster: Sequence[str],
        home: Path,
        results: Path,
        trackers: Sequence[Callback] = (),
    ):
        self.job, self.settings = job, job.settings
        self.terms = terms_of(job)
        check_statistics_wanted(job, len(roster))
        self.roster = tuple(sorted(roster))
        self.copies = Copies(job.mixers, self.roster, job.settings.encryption is not None)
        self.results = results
        files = [ResultFiles(results), Report(results)]
        self.record = Record(job.name, self.roster, files, [*job.trackers, *trackers])
        self._quorum = Quorum(self.record, self.roster, job.min_clients)
        self.done = 0
        """Rounds that are finished."""
        self.joined: list[str] = []
        """Hospitals that passed the init task; the others take no part."""
        self.sizes: dict[str, dict[str, int]] = {}
        self._home, self._lock = home, StateLock()
        self._log = logging.getLogger(__name__)
        self._refining: Refining | None = None
        self.planning = Planning(job, self.roster, home, self.record, self._quorum)
        self._best = BestRounds(self.record, self.terms.score, self.terms.measures[self.terms.score])

    def close(self) -> None:
        """Let another job work in this run's state folder."""
        self._lock.release()

    def follow(self, plan: Planned | None) -> None:
        """The job's network is the planned one, where it was to be planned."""
        method, task = as_planned(self.job.method, self.job.task, plan)
        self.job = dataclasses.replace(self.job, method=method, task=task)
        self.terms = terms_of(self.job)

    # -- init ---------------------------------------------------------------------------------------------------------

    def init_messages(self) -> dict[str, Message[ask.InitRequest]]:
        return {site: Message(self._init_request()) for site in self.roster}

    def _init_request(self) -> ask.InitRequest:
        mixers = self.copies.mixers
        return ask.InitRequest(
            job=self.job.name,
            rounds=self.settings.rounds,
            roster=self.roster,
            seed=self.settings.seed,
            threads=self.settings.threads,
            planned=self.planning.plan,
            slots={slot: mixer.travels for slot, mixer in mixers.items()},
            gradients=tuple(slot for slot in self.copies.travelling if mixers[slot].takes == "gradients"),
            encryption=self.settings.encryption,
        )

    def take_init(self, replies: Replies) -> None:
        """Take the tensors that most hospitals start from; hospitals whose models differ take no part.

        Raises:
            QuorumLost: fewer than ``min_sites`` hospitals fit together.
            ConfigError: the job names a component for a slot that their networks do not have.
            StateInUse: the same run is under way in another job.
        """
        check = begins_with(self.copies.travelling)
        ready = self._answers(self._init_request(), heard.InitReply, replies, check, "takes no part")
        found = join(ready, self.terms, self.settings.most_samples, self._without)
        self.joined = list(found.sizes) if found else []
        self._quorum.check(0, self.joined, "are ready")
        assert found is not None  # a job needs one hospital at least
        self.sizes = found.sizes
        lacking = self.copies.leave_out(found.slots, self.job.components)
        self.expected, self._buffers = table(found.slots), frozenset(found.header.buffers)
        self._about = about(found, ready, self.terms, self.settings, self.copies.mixers)
        for site, sentences in oddities(found, ready, versions()).items():
            self._take_notes(site, 0, sentences)
        # The roster is part of the run's key: a run with other hospitals neither resumes this one nor overwrites it.
        configs = sorted({ready[site].header.config for site in self.joined})
        components = self._about.components
        self.run = digest_of([self.job.name, dataclasses.asdict(self.settings), components, list(self.roster), configs])
        self._state = self._home / "state" / self.run
        self._lock.take(self._state, f"the job whose results go to {self.results}")
        if not self._resume():
            for text in checkpoint.other_runs(self._state):
                self.record.event(0, "server", text)
            for text in lacking:
                self.record.event(0, "server", text)
            self.copies.start(found.slots)

    # -- rounds -------------------------------------------------------------------------------------------------------

    def train_messages(self, round_number: int, sites: list[str]) -> dict[str, Message[ask.TrainRequest]]:
        header = self._asked(ask.TrainRequest, round_number)
        headers = dict.fromkeys(sites, header)
        if self.terms.adapts:
            sizes = {site: found["train"] for site, found in self.sizes.items()}
            for site, told in progress_of(sizes, self.record.mean_losses()).items():
                if site in headers:
                    progress = ask.Told(losses=told.losses, scale=told.scale)
                    headers[site] = header.model_copy(update={"progress": progress})
        return {site: Message(header, self.copies.of(site, self.copies.travelling)) for site, header in headers.items()}

    def take_train(self, round_number: int, replies: Replies, started: float | None = None) -> list[str]:
        """Mix what the hospitals sent and save the checkpoint; returns the hospitals whose updates were mixed.

        Args:
            started: ``time.monotonic()`` when the round began, to write down how long it took.

        Raises:
            QuorumLost: fewer than ``min_sites`` usable updates came; the checkpoint of the last round stands.
        """
        asked = self._asked(ask.TrainRequest, round_number)
        accepted = self._answers(asked, heard.TrainReply, replies, self._check_update, "update refused")
        self._quorum.check(round_number, accepted, "sent a usable update")
        matrices = self._mix(round_number, self.copies.travelling, accepted)
        for site, message in accepted.items():
            self._best.take(site, message.header.metrics)
            self._take_notes(site, round_number, message.header.notes)
            said = message.header
            self.record.training(round_number, site, said.seconds, said.loss, said.privacy)
            self.record.traffic(round_number, site, self.payload_bytes(), byte_count(message.slots), message.encoded)
        self._best.choose(round_number - 1)
        plan, travelling = self.terms.plan, self.copies.travelling
        self._refining = refining(round_number, list(accepted), plan, travelling, matrices, started)
        if self._refining is None:
            self._end_round(round_number, matrices, started)
        return list(accepted)

    def _check_update(self, site: str, reply: Message[heard.TrainReply]) -> None:
        self.copies.check(site, reply.slots, self.expected, self._buffers)

    def _mix(self, round_number: int, slots: list[str], accepted: Mapping[str, Message[Part]]) -> dict[str, Matrix]:
        sent = _slots_of(accepted)
        for far in self.copies.bound(slots, sent, self._buffers, self.settings.clip_updates):
            self.record.event(round_number, far.site, str(far))
        return self.copies.mix(slots, sent, self._info(accepted))

    def _info(self, present: Collection[str]) -> RoundInfo:
        sizes = [float(self.sizes.get(site, {}).get("train", 0)) for site in self.roster]
        return RoundInfo(self.roster, np.array(sizes), tuple(site in present for site in self.roster))

    def _end_round(self, round_number: int, matrices: dict[str, Matrix], started: float | None) -> None:
        self.record.round(round_number, matrices, time.monotonic() - started if started is not None else 0.0)
        self.done = round_number
        self._save()

    # -- statistics ---------------------------------------------------------------------------------------------------

    def statistics_messages(self, round_number: int, sites: list[str]) -> dict[str, Message[ask.StatisticsRequest]]:
        """Requests for the statistics that components need before this round; empty if none does."""
        names = self.copies.wanted(round_number)
        if not names:
            return {}
        header = self._asked(ask.StatisticsRequest, round_number, names=tuple(sorted(set(names.values()))))
        return {site: Message(header) for site in sites}

    def take_statistics(self, round_number: int, replies: Replies) -> None:
        """Hand the hospitals' statistics to the components that need them.

        Raises:
            QuorumLost: fewer than ``min_sites`` hospitals sent usable ones.
        """
        names = self.copies.wanted(round_number)
        wanted = tuple(sorted(set(names.values())))
        usual = most_common(message.slots for message in replies.values())

        def check(site: str, reply: Message[heard.StatisticsReply]) -> None:
            check_statistics(site, reply.slots, list(wanted), usual)
            self.copies.check_statistics(site, names, reply.slots)

        asked = self._asked(ask.StatisticsRequest, round_number, names=wanted)
        accepted = self._answers(asked, heard.StatisticsReply, replies, check, "statistics refused")
        for site, message in accepted.items():
            self._take_notes(site, round_number, message.header.notes)
            self.record.traffic(round_number - 1, site, 0, byte_count(message.slots))
        self._quorum.check(round_number, accepted, "sent usable statistics")
        self.copies.take_statistics(names, _slots_of(accepted), self._info(accepted))

    # -- exchanges within a round -------------------------------------------------------------------------------------

    def refine_messages(self) -> dict[str, Message[ask.RefineRequest]]:
        """The next exchange within the round, for the hospitals that trained in it; empty when the round is over."""
        if self._refining is None:
            return {}
        now = self._refining
        header = self._asked(ask.RefineRequest, now.round, step=now.step)
        return {site: Message(header, self._refined_slots(site, now)) for site in now.sites}

    def _refined_slots(self, site: str, now: Refining) -> Slots:
        shown = show(self.copies.stack, now.shown, self.roster) if now.step == 1 else {}
        return {**self.copies.of(site, now.slots), **shown}

    def take_refined(self, replies: Replies) -> None:
        """Mix the refined slots; the last exchange ends the round.

        Raises:
            QuorumLost: fewer than ``min_sites`` usable answers came; the checkpoint of the last round stands.
        """
        now = self._refining
        assert now is not None, "no exchange within a round is under way"
        expected = {slot: self.expected[slot] for slot in now.slots}
        accepted = self._answers(
            self._asked(ask.RefineRequest, now.round, step=now.step),
            heard.RefineReply,
            replies,
            lambda site, reply: self.copies.check(site, reply.slots, expected, self._buffers),
            f"update refused in step {now.step}",
        )
        self._quorum.check(now.round, accepted, "sent a usable update")
        for site, message in accepted.items():
            sent = byte_count(self._refined_slots(site, now))
            self.record.traffic(now.round, site, sent, byte_count(message.slots), message.encoded)
        now.matrices.update(self._mix(now.round, now.slots, accepted))
        now.step += 1
        if now.step > now.steps:
            self._refining = None
            self._end_round(now.round, now.matrices, now.started)

    # -- the end ------------------------------------------------------------------------------------------------------

    def validate_messages(self, sites: list[str]) -> dict[str, Message[ask.ValidateRequest]]:
        header = self._asked(ask.ValidateRequest, self.done)
        return {site: Message(header, self.copies.of(site, self.copies.travelling)) for site in sites}

    def take_validation(self, replies: Replies) -> None:
        asked = self._asked(ask.ValidateRequest, self.done)
        for site, message in self._answers(asked, heard.ValidateReply, replies).items():
            self._best.take(site, message.header.metrics)
            self._take_notes(site, self.done, message.header.notes)
            self.record.last_traffic(self.done, site, self.payload_bytes(), message.encoded)
        self._best.choose(self.done)

    def finish_messages(self, sites: list[str]) -> dict[str, Message[ask.FinishRequest]]:
        header = self._asked(ask.FinishRequest, self.done, finetune=self.settings.finetune)
        return {site: Message(header) for site in sites}

    def take_final(self, replies: Replies) -> None:
        """Record the test results and write everything the job leaves behind at the server."""
        trained = stretches(self.record.lines, self.roster)
        for site, text in absences(trained, self.done).items():
            self.record.event(self.done, site, text)
        asked, chosen = self._asked(ask.FinishRequest, self.done, finetune=self.settings.finetune), {}
        spent = {}
        for site, message in self._answers(asked, heard.FinishReply, replies).items():
            if message.header.privacy is not None:
                spent[site] = message.header.privacy
            for line in message.header.metrics:
                self.record.metric(line.tested_at(site))
            self._take_notes(site, self.done, message.header.notes)
            if message.header.chosen is not None:
                chosen[site] = message.header.chosen.chosen_at(site)
        more = {"networks": self.copies.links(), "trained": trained, "chosen": chosen, "privacy": spent}
        said = self._about.model_copy(update=more)
        readable = {} if self.copies.sealed else self.copies.compact()
        self.record.finish(said, self.best, write_slots(self.results, self.job.name, readable))
        self._save(finished=True)
        self.planning.forget()

    def _answers(
        self,
        asked: ask.Request,
        kind: type[A],
        replies: Replies,
        check: Check[A] = no_tensors,
        refused: str = "answer refused",
    ) -> dict[str, Message[A]]:
        """The replies that count; of the others the events tell."""

        def refuse(site: str, reason: str) -> None:
            self.refuse(site, asked.round, f"{refused}: {reason}")

        return answers(asked, kind, replies, self.terms, check, refuse)

    def _without(self, site: str, reason: str) -> None:
        self.refuse(site, 0, f"takes no part: {reason}")

    def _take_notes(self, site: str, round_number: int, notes: Sequence[str]) -> None:
        for note in notes:
            self.record.event(round_number, site, note)

    def refuse(self, site: str, round_number: int, reason: str) -> None:
        """Note that a hospital answered with an error."""
        self._quorum.refuse(site, round_number, reason)

    def _asked(self, kind: type[Q], round_number: int, **more: object) -> Q:
        of_run = {"run": self.run, "round": round_number, "rounds": self.settings.rounds, "best": self.best}
        return kind.model_validate({**of_run, **more})

    def payload_bytes(self) -> int:
        """Bytes of the tensors that one hospital is sent a round."""
        return self.copies.byte_count()

    def ends_early(self, round_number: int) -> bool:
        """Whether hospitals' spent budgets keep this round from being made, and there are rounds to end with."""
        return self.done > 0 and any(SPENT in e.event for e in self.record.events if e.round == round_number)

    @property
    def min_sites(self) -> int:
        """How many hospitals must answer for a round to count."""
        return self._quorum.least

    @property
    def best(self) -> dict[str, BestRound]:
        """Model to its best round so far and the score there."""
        return self._best.best

    # -- checkpoint ---------------------------------------------------------------------------------------------------

    def _save(self, finished: bool = False) -> None:
        about = checkpoint.About(
            done=self.done,
            finished=finished,
            roster=list(self.roster),
            best=self.best,
            scores=self._best.scores,
            record=self.record.dump(),
            saved=time.time(),
        )
        checkpoint.save(self._state, self.copies.compact(), self.copies.states(), about)

    def _resume(self) -> bool:
        """Take up an unfinished run of the same job, settings, seed and roster; a finished one starts fresh."""
        found, told = checkpoint.load(self._state, self.copies.entries(self.expected), self.roster)
        if found is not None:
            self.copies.restore(found.stack, found.mixers)
            self.done = found.about.done
            self._best.restore(found.about.best, found.about.scores)
            self.record.restore(found.about.record, self.done)
        for text in told:
            self.record.event(self.done, "server", text)
            self._log.info(text)
        return found is not None


def _slots_of(messages: Mapping[str, Message[Part]]) -> dict[str, Slots]:
    return {site: message.slots for site, message in messages.items()}
