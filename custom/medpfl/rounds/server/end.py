# SPDX-License-Identifier: Apache-2.0
"""The end of a job at the server, without a transport: the last validation, the tests, and what the job leaves."""

from medpfl.methods.panels import AtServer
from medpfl.results.files import write_slots
from medpfl.results.presence import absences, asked_in, spent_in, stretches
from medpfl.results.schema import AboutTraining
from medpfl.rounds.messages import Message
from medpfl.rounds.planning import Planning
from medpfl.rounds.protocol.replies import FinishReply, ValidateReply
from medpfl.rounds.protocol.requests import FinishRequest, ValidateRequest
from medpfl.rounds.server.run import Replies, ServerRun

TOLD_LAST = "what its noise has cost is told as of round"
"""How the event begins on a hospital that does not say so in the end."""


class ServerEnd:
    """Asks for a run's last validation and its tests, and writes what it leaves.

    Args:
        planning: is over when the job is.
    """

    about: AboutTraining
    """What the job said of itself when the hospitals joined."""

    def __init__(self, run: ServerRun, planning: Planning):
        self._run, self._planning = run, planning

    def validate_messages(self, sites: list[str]) -> dict[str, Message[ValidateRequest]]:
        run = self._run
        header = run.ask(ValidateRequest, run.done)
        return {site: Message(run.to(site, header), run.copies.of(site, run.copies.travelling)) for site in sites}

    def take_validation(self, replies: Replies) -> None:
        run = self._run
        asked = run.ask(ValidateRequest, run.done)
        for site, message in run.answers(asked, ValidateReply, replies).items():
            run.scores.take(site, message.header.metrics)
            run.take_notes(site, run.done, message.header.notes)
            run.record.last_traffic(run.done, site, run.payload_bytes(site), message.encoded)
        run.scores.choose(run.done)

    def finish_messages(self, sites: list[str]) -> dict[str, Message[FinishRequest]]:
        run = self._run
        header = run.ask(FinishRequest, run.done, finetune=run.settings.finetune)
        return {site: Message(header) for site in sites}

    def take_final(self, replies: Replies) -> None:
        """Record the test results and write everything the job leaves behind at the server."""
        run = self._run
        trained = stretches(run.record.lines, run.roster)
        asked = asked_in(run.record.lines, run.roster) if run.asked is not None else {}
        for site, text in absences(trained, run.done, asked).items():
            run.record.event(run.done, site, text)
        header, chosen = run.ask(FinishRequest, run.done, finetune=run.settings.finetune), {}
        spent = spent_in(run.record.lines, run.roster)
        gone = set(spent)  # and those who do not answer now: what they have sent since they said so is unknown here
        for site, message in run.answers(header, FinishReply, replies).items():
            if message.header.privacy is not None:
                spent[site] = message.header.privacy
                gone.discard(site)
            for line in message.header.metrics:
                run.record.metric(line.tested_at(site))
            run.take_notes(site, run.done, message.header.notes)
            if message.header.chosen is not None:
                chosen[site] = message.header.chosen.chosen_at(site)
        for site in sorted(gone):
            last = f"{TOLD_LAST} {trained[site][-1][1]}, its last answer that counted"
            run.record.event(run.done, site, f"{last}; what it sent since is in its own account alone")
        panels = run.job.method.report_panels(AtServer(links=run.copies.links()))
        more = {"panels": panels, "trained": trained, "asked": asked, "chosen": chosen, "privacy": spent}
        said = self.about.model_copy(update=more)
        readable = {} if run.copies.sealed else run.copies.compact()
        run.record.finish(said, run.best, write_slots(run.results, run.job.name, readable))
        self._planning.forget()  # before: of a run that is finished nobody would forget it any more
        run.save(finished=True)
