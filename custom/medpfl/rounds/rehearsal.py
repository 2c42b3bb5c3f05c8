# SPDX-License-Identifier: Apache-2.0
"""The beginning of a job with hospitals' site files: who would take part, and why the others would not; nothing is
trained, and nothing of it is kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from medpfl.core.errors import MedPFLError
from medpfl.core.temporary import temporary_folder
from medpfl.data.site_file import load_site_file
from medpfl.job import Job
from medpfl.rounds.coders import links_of
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.likeness import Look, look_at, of_inputs
from medpfl.rounds.loop import Exchange, beginning, carry
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import Reply
from medpfl.rounds.protocol.requests import InitRequest
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.server.quorum import QuorumLost


@dataclass(frozen=True)
class Rehearsal:
    """How a job would begin.

    Attributes:
        sizes: hospital that would take part to its samples by split.
        told: hospital to sentences: why it would not, or what is odd about it.
        lacking: why the job could not begin, though; None: it could.
        likeness: hospitals whose inputs are oddly alike or very different (``rounds.likeness``).
    """

    sizes: Mapping[str, Mapping[str, int]]
    told: Mapping[str, list[str]]
    lacking: str | None = None
    likeness: Sequence[str] = ()


def rehearse(job: Job, site_files: Mapping[str, Path]) -> Rehearsal:
    """Ask every hospital to get ready, as the server does: its policy, its data and its networks are looked at, and
    whether they fit together.

    Raises:
        ConfigError: the job itself cannot run with so many hospitals.
    """
    told: dict[str, list[str]] = {}
    sizes: dict[str, dict[str, int]] = {}
    looks: dict[str, Look] = {}
    lacking = None
    with temporary_folder() as scratch:
        runners = {
            site: SiteRunner(site, job.method, job.task, partial(load_site_file, path, site), scratch / site)
            for site, path in sorted(site_files.items())
        }
        coordinator = Coordinator(job, list(runners), scratch / "server", scratch / "results")
        links = links_of(job.codecs, runners, scratch / "server", scratch)

        def deliver(exchange: Exchange) -> dict[str, Message[Reply]]:
            replies = {}
            for site, message in exchange.messages.items():
                try:
                    handle = runners[site].handle
                    replies[site] = links[site].carry(message, handle) if links else handle(message)
                    if isinstance(message.header, InitRequest):  # what comes before it reads no data
                        sizes[site] = {split: len(samples) for split, samples in runners[site].data.splits.items()}
                        looks[site] = look_at(runners[site].data.splits["train"])
                except MedPFLError as error:  # this hospital's; the others are asked all the same
                    told.setdefault(site, []).append(str(error))
            return replies

        try:
            carry(beginning(coordinator), deliver)
        except QuorumLost as error:
            lacking = str(error)
        finally:
            coordinator.close()
            for runner in runners.values():
                runner.close()
        for event in coordinator.record.events:
            if event.site not in told:
                told.setdefault(event.site, []).append(event.event)
    alike = of_inputs({site: looks[site] for site in coordinator.joined})
    return Rehearsal({site: sizes[site] for site in coordinator.joined}, told, lacking, alike)
