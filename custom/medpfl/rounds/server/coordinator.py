# SPDX-License-Identifier: Apache-2.0
"""The server's side of a job, without a transport: who takes part, then the rounds, then the end.

``rounds.loop`` says in which order its methods are called: one that makes messages, then one that takes the answers.
"""

from medpfl.component import class_name, class_paths
from medpfl.core.digest import digest_of
from medpfl.core.errors import meant
from medpfl.core.sources import code_here
from medpfl.rounds.announcing import versions
from medpfl.rounds.messages import Message, table
from medpfl.rounds.planning import Planning
from medpfl.rounds.protocol.replies import InitReply
from medpfl.rounds.protocol.requests import InitRequest
from medpfl.rounds.server.end import ServerEnd
from medpfl.rounds.server.joining import about, begins_with, join, oddities
from medpfl.rounds.server.rounds import ServerRounds
from medpfl.rounds.server.run import Replies, ServerRun

__all__ = ["Coordinator", "Replies"]


class Coordinator(ServerRun):
    """A run at the server, from the first message to the last.

    Args: those of ``ServerRun``.

    Attributes:
        planning: the exchange before the first, where the job has its network planned.
        rounds: messages and answers of the rounds; ``end``: of what follows them.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.planning = Planning(self.job, self.roster, self.home, self.record, self.quorum)
        self.rounds, self.end = ServerRounds(self), ServerEnd(self, self.planning)

    def init_messages(self) -> dict[str, Message[InitRequest]]:
        return {site: Message(self._init_request()) for site in self.roster}

    def _init_request(self) -> InitRequest:
        mixers = self.copies.mixers
        return InitRequest(
            job=self.job.name,
            rounds=self.settings.rounds,
            roster=self.roster,
            seed=self.settings.seed,
            threads=self.settings.threads,
            planned=self.planning.plan,
            slots={slot: mixer.travels for slot, mixer in mixers.items()},
            gradients=tuple(slot for slot in self.copies.travelling if mixers[slot].takes == "gradients"),
            encryption=self.settings.encryption,
            asked=self.asked,
            agreed=self.settings.schema is not None,
            finetune=self.settings.finetune,
        )

    def take_init(self, replies: Replies) -> None:
        """Take the tensors that most hospitals start from; hospitals whose models differ take no part.

        Raises:
            QuorumLost: fewer than ``min_sites`` hospitals fit together.
            ConfigError: the job names a component for a slot that their networks do not have.
            StateInUse: the same run is under way in another job.
        """
        check = begins_with(self.copies.travelling)
        ready = self.answers(self._init_request(), InitReply, replies, check, "takes no part")
        found = join(ready, self.terms, self.settings.most_samples, self._without)
        self.joined = list(found.sizes) if found else []
        self.quorum.check(0, self.joined, "are ready")
        assert found is not None  # a job needs one hospital at least
        self.sizes = found.sizes
        lacking = self.copies.leave_out(found.slots, self.job.components)
        self.expected, self.buffers = table(found.slots), frozenset(found.header.buffers)
        self.end.about = about(found, ready, self.terms, self.settings, self.copies.mixers)
        for site, sentences in oddities(found, ready, versions()).items():
            self.take_notes(site, 0, sentences)
        # The roster is part of the run's key: a run with other hospitals neither resumes this one nor overwrites it.
        configs = sorted({ready[site].header.config for site in self.joined})
        components = self.end.about.components
        said = [self.job.name, self.settings.of_run(), components, list(self.roster), configs]
        codecs = list((self.terms.codecs or {}).values())
        own = [class_name(type(mixer)) for mixer in self.copies.mixers.values()]
        if code := code_here([*own, *class_paths(codecs)]):
            said.append(code)
        if not self.begin(digest_of(said)):
            self._tell_sampling()
            self._tell_names()
            for text in lacking:
                self.record.event(0, "server", text)
            self.copies.start(found.slots)

    def _tell_sampling(self) -> None:
        if self.asked is not None:
            number, there = min(self.asked, len(self.joined)), len(self.joined)
            self.record.event(0, "server", f"every round asks {number} of {there} hospitals, drawn by the seed")

    def _tell_names(self) -> None:
        """A name with a slip in it would leave its hospital with what the others have, unnoticed."""
        for part in (self.job.method, self.job.task):
            for name in sorted(set(part.named_hospitals) - set(self.roster)):
                free = [site for site in self.roster if site not in part.named_hospitals]
                text = f"{type(part).__name__} names the hospital '{name}', which is not in this run{meant(name, free)}"
                self.record.event(0, "server", text)

    def _without(self, site: str, reason: str) -> None:
        self.refuse(site, 0, f"takes no part: {reason}")
