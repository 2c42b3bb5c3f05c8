# SPDX-License-Identifier: Apache-2.0
"""The rounds at the server: what each hospital is sent, and the mixing of what it sends back; without a transport.

``rounds.loop`` says in which order the methods are called: one that makes messages, then one that takes the answers.
"""

import logging
import time
from collections.abc import Mapping

from medpfl.core.codecs.progress import progress_of
from medpfl.core.mixing import Matrix
from medpfl.job.sampling import drawn
from medpfl.rounds.messages import Message, Slots, byte_count
from medpfl.rounds.privacy import SPENT
from medpfl.rounds.protocol.bounded import Part
from medpfl.rounds.protocol.replies import RefineReply, StatisticsReply, TrainReply
from medpfl.rounds.protocol.requests import RefineRequest, StatisticsRequest, Told, TrainRequest
from medpfl.rounds.refining import Refining, refining, show
from medpfl.rounds.server.checks import check_probabilities, check_statistics, most_common
from medpfl.rounds.server.run import Replies, ServerRun, slots_of


class ServerRounds:
    """Makes a run's messages of every round and takes the answers."""

    def __init__(self, run: ServerRun):
        self._run, self._copies, self._record = run, run.copies, run.record
        self._refining: Refining | None = None
        self._drawn: list[str] | None = None
        self._log = logging.getLogger(__name__)

    def drawn(self, round_number: int, reachable: list[str]) -> list[str]:
        """The hospitals that a round asks; all that can be reached, where the job does not say how many."""
        run = self._run
        if run.asked is None:
            return reachable
        self._drawn = drawn(run.joined, run.asked, run.settings.seed, round_number, reachable)
        self._log.info("round %d asks %s", round_number, ", ".join(self._drawn))
        return self._drawn

    def ends_early(self, round_number: int) -> bool:
        """Whether hospitals' spent budgets keep this round from being made, and there are rounds to end with."""
        events, mixed = self._record.events, self._run.done > 0 or self._refining is not None
        return mixed and any(SPENT in e.event for e in events if e.round == round_number)

    def end_early(self) -> str:
        """End the round that is under way, if its models are mixed: those of the round before are gone. Returns what it
        lacks, for the sentence that tells of it."""
        now, self._refining = self._refining, None
        if now is None:
            return ""
        self._end_round(now.round, now.matrices, now.started)
        return f", of whose {now.steps} further exchanges {now.step - 1} were made"

    # -- statistics ---------------------------------------------------------------------------------------------------

    def statistics_messages(self, round_number: int, sites: list[str]) -> dict[str, Message[StatisticsRequest]]:
        """Requests for the statistics that components need before this round; empty if none does."""
        names = self._copies.wanted(round_number)
        if not names:
            return {}
        header = self._run.ask(StatisticsRequest, round_number, names=tuple(sorted(set(names.values()))))
        return {site: Message(self._run.to(site, header)) for site in sites}

    def take_statistics(self, round_number: int, replies: Replies) -> None:
        """Hand the hospitals' statistics to the components that need them.

        Raises:
            QuorumLost: fewer than ``min_sites`` hospitals sent usable ones.
        """
        names = self._copies.wanted(round_number)
        wanted = tuple(sorted(set(names.values())))
        usual = most_common(message.slots for message in replies.values())

        def check(site: str, reply: Message[StatisticsReply]) -> None:
            check_statistics(site, reply.slots, list(wanted), usual)
            self._copies.check_statistics(site, names, reply.slots)

        asked = self._run.ask(StatisticsRequest, round_number, names=wanted)
        accepted = self._run.answers(asked, StatisticsReply, replies, check, "statistics refused")
        for site, message in accepted.items():
            self._run.take_notes(site, round_number, message.header.notes)
            self._record.traffic(round_number - 1, site, 0, byte_count(message.slots))
        self._run.quorum.check(round_number, accepted, "sent usable statistics")
        self._copies.take_statistics(names, slots_of(accepted), self._run.info(accepted))

    # -- training -----------------------------------------------------------------------------------------------------

    def train_messages(self, round_number: int, sites: list[str]) -> dict[str, Message[TrainRequest]]:
        header = self._run.ask(TrainRequest, round_number)
        headers = dict.fromkeys(sites, header)
        if self._run.terms.adapts:
            sizes = {site: found["train"] for site, found in self._run.sizes.items()}
            for site, told in progress_of(sizes, self._record.mean_losses()).items():
                if site in headers:
                    progress = Told(losses=told.losses, scale=told.scale)
                    headers[site] = header.model_copy(update={"progress": progress})
        return {
            site: Message(self._run.to(site, header), self._copies.of(site, self._copies.travelling))
            for site, header in headers.items()
        }

    def take_train(self, round_number: int, replies: Replies, started: float | None = None) -> list[str]:
        """Mix what the hospitals sent and save the checkpoint; returns the hospitals whose updates were mixed.

        Args:
            started: ``time.monotonic()`` when the round began, to write down how long it took.

        Raises:
            QuorumLost: fewer than ``min_sites`` usable updates came; the checkpoint of the last round stands.
        """
        asked = self._run.ask(TrainRequest, round_number)
        accepted = self._run.answers(asked, TrainReply, replies, self._check_update, "update refused")
        self._run.quorum.check(round_number, accepted, "sent a usable update")
        sent = {site: self._run.payload_bytes(site) for site in accepted}  # what is mixed now is sent in the next round
        matrices = self._mix(round_number, self._copies.travelling, accepted)
        for site, message in accepted.items():
            self._run.scores.take(site, message.header.metrics)
            self._run.take_notes(site, round_number, message.header.notes)
            said = message.header
            self._record.training(round_number, site, said.seconds, said.loss, said.privacy)
            self._record.traffic(round_number, site, sent[site], byte_count(message.slots), message.encoded)
        self._run.scores.choose(round_number - 1, of_all=self._run.asked is None)
        plan, travelling = self._run.terms.plan, self._copies.travelling
        self._refining = refining(round_number, list(accepted), plan, travelling, matrices, started)
        if self._refining is None:
            self._end_round(round_number, matrices, started)
        return list(accepted)

    def _check_update(self, site: str, reply: Message[TrainReply]) -> None:
        self._copies.check(site, reply.slots, self._run.expected, self._run.buffers)
        if not self._copies.sealed:  # of what is encrypted the server cannot know
            check_probabilities(site, reply.slots, self._run.job.method.probabilities)

    def _mix(self, round_number: int, slots: list[str], accepted: Mapping[str, Message[Part]]) -> dict[str, Matrix]:
        sent = slots_of(accepted)
        for far in self._copies.bound(slots, sent, self._run.buffers, self._run.settings.clip_updates):
            self._record.event(round_number, far.site, str(far))
        return self._copies.mix(slots, sent, self._run.info(accepted))

    def _end_round(self, round_number: int, matrices: dict[str, Matrix], started: float | None) -> None:
        self._record.round(
            round_number, matrices, time.monotonic() - started if started is not None else 0.0, self._drawn
        )
        self._run.done = round_number
        if self._run.due(round_number):
            self._run.save()

    # -- exchanges within a round -------------------------------------------------------------------------------------

    def refine_messages(self) -> dict[str, Message[RefineRequest]]:
        """The next exchange within the round, for the hospitals that trained in it; empty when the round is over."""
        if self._refining is None:
            return {}
        now = self._refining
        header = self._run.ask(RefineRequest, now.round, step=now.step)
        return {site: Message(header, self._refined_slots(site, now)) for site in now.sites}

    def _refined_slots(self, site: str, now: Refining) -> Slots:
        shown = show(self._copies.stack, now.shown, self._run.roster) if now.step == 1 else {}
        fixed = [slot for slot in self._run.job.method.delivered if slot in self._copies.travelling]
        return {**self._copies.of(site, [*now.slots, *fixed]), **shown}

    def take_refined(self, replies: Replies) -> None:
        """Mix the refined slots; the last exchange ends the round.

        Raises:
            QuorumLost: fewer than ``min_sites`` usable answers came; the checkpoint of the last round stands.
        """
        now = self._refining
        assert now is not None, "no exchange within a round is under way"
        expected = {slot: self._run.expected[slot] for slot in now.slots}
        accepted = self._run.answers(
            self._run.ask(RefineRequest, now.round, step=now.step),
            RefineReply,
            replies,
            lambda site, reply: self._copies.check(site, reply.slots, expected, self._run.buffers),
            f"update refused in step {now.step}",
        )
        self._run.quorum.check(now.round, accepted, "sent a usable update")
        for site, message in accepted.items():
            sent = byte_count(self._refined_slots(site, now))
            self._record.traffic(now.round, site, sent, byte_count(message.slots), message.encoded)
        now.matrices.update(self._mix(now.round, now.slots, accepted))
        now.step += 1
        if now.step > now.steps:
            self._refining = None
            self._end_round(now.round, now.matrices, now.started)
