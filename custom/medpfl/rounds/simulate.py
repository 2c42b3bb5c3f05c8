# SPDX-License-Identifier: Apache-2.0
"""Run a job in this process, one hospital after another, without nvflare: a debugger, a test oracle, and the way to
run on a lone GPU machine. Hospitals that really train together use FLARE."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from medpfl.core.errors import BudgetSpent, CodecError, ConfigError, NotInRound, OutOfMemory, PolicyRefused
from medpfl.core.mapped import release
from medpfl.data.site_file import SiteFile, load_site_file
from medpfl.job import EvaluationJob, Job
from medpfl.results.callbacks import Callback
from medpfl.rounds.coders import links_of
from medpfl.rounds.evaluation import EvaluationCoordinator
from medpfl.rounds.hospital.run_files import Later, RunFiles
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.likeness import Look, look_at, of_inputs
from medpfl.rounds.lock import StateLock
from medpfl.rounds.loop import Exchange, Watch, carry, evaluating, training
from medpfl.rounds.memory import budget
from medpfl.rounds.messages import byte_count
from medpfl.rounds.parking import Parking
from medpfl.rounds.protocol.replies import InitReply
from medpfl.rounds.protocol.requests import OfRun
from medpfl.rounds.server.coordinator import Coordinator, Replies

EVERY = 5.0
"""Seconds of rounds that are cheaper to repeat than to write."""


def simulate(
    job: Job,
    site_files: Mapping[str, Path],
    results: Path,
    home: Path,
    progress: Callable[[Coordinator], None] = lambda coordinator: None,
    stop_after: int | None = None,
    read: Callable[[Path, str], SiteFile] = load_site_file,
    test: bool = True,
    trackers: Sequence[Callback] = (),
    noticed: Callable[[str], None] | None = None,
    every: float = EVERY,
) -> Coordinator:
    """Run ``job`` with one hospital per site file.

    Args:
        site_files: hospital's name to its site file.
        results: folder for what the job leaves behind at the server.
        home: folder for checkpoints and, under each hospital's name, its state and models.
        progress: called after every round.
        stop_after: stop after this round, as if the process had been killed (for tests of resuming); every round is
            written down.
        read: reads a hospital's site file, given its path and the hospital's name.
        test: False: end after the last validation; no test set is read and no model is kept.
        trackers: are told of every round's end and the job's, beside those that the job names.
        noticed: called, before the first round, with a sentence on each hospital whose inputs are oddly like or unlike
            the others'; a federation's server does not see inputs, so the results do not have these sentences.
        every: seconds of hospitals' work that may have to be repeated when this process is killed, about; 0: none.

    Raises:
        StateInUse: another process is simulating with the same ``home``.
        MedPFLError: as the hospitals and the server raise them.
    """
    with _alone(home, results):
        if job.filters:
            raise ConfigError(
                f"job '{job.name}' has filters that FLARE alone can apply ({', '.join(job.filters)}), and this is not "
                "FLARE: run it with ./poc/run, or without them"
            )
        # What codecs and accounts of noise keep is written in every round, and fits to that round's state.
        within = job.codecs or job.settings.encryption is not None or job.method.privacy is not None
        later = Later(0.0 if within or stop_after is not None else every, budget() // 4)
        runners = _runners(job, site_files, home, read, later.of)
        server = home / "server" / job.name

        def due(round_number: int) -> bool:
            if not (round_number == job.settings.rounds or later.due or coordinator.copies.shelf.on_disk):
                return False
            later.write()
            return True

        coordinator = Coordinator(job, list(runners), server, results, trackers, due)
        links = links_of(job.codecs, runners, home / "server", home)

        parking = Parking(home)
        looks: dict[str, Look] = {}

        def deliver(exchange: Exchange) -> Replies:
            replies, started = {}, time.monotonic()
            for site, message in exchange.messages.items():
                handle = runners[site].handle
                try:
                    with _whose(site):
                        reply = links[site].carry(message, handle) if links else handle(message)
                    replies[site] = coordinator.arrived(site, reply)
                    if isinstance(reply.header, InitReply):
                        state = runners[site].networks.state()
                        private = {key: state[key] for key in runners[site].networks.private}
                        later.want(byte_count({"": state}), byte_count({"": private}))
                        if noticed:
                            looks[site] = look_at(runners[site].data.splits["train"])
                except (BudgetSpent, CodecError, NotInRound, OutOfMemory) as error:
                    if not isinstance(message.header, OfRun):
                        raise
                    # As in a federation: this hospital misses the round, or what is left of it.
                    coordinator.refuse(site, message.header.round, f"failed: {error}")
                    runners[site].recover()
                release(tensor for state in message.slots.values() for tensor in state.values())
                parking.leave(runners[site])
            later.worked(time.monotonic() - started)
            if noticed and looks:
                for sentence in of_inputs(looks):
                    noticed(sentence)
                looks.clear()
            return replies

        watch = Watch(ended=lambda round_number, mixed: progress(coordinator))
        try:
            carry(training(coordinator, watch, stop_after, test), deliver)
        finally:
            for runner in runners.values():
                runner.close()
        return coordinator


def simulate_evaluation(
    job: EvaluationJob, site_files: Mapping[str, Path], results: Path, home: Path
) -> EvaluationCoordinator:
    """The same for a job that evaluates a given model."""
    with _alone(home, results):
        runners = _runners(job, site_files, home)
        coordinator = EvaluationCoordinator(
            job.settings, job.name, list(runners), job.min_clients, job.model, results, job.trackers
        )

        def deliver(exchange: Exchange) -> Replies:
            replies = {}
            for site, message in exchange.messages.items():
                with _whose(site):
                    replies[site] = runners[site].handle(message)
            return replies

        carry(evaluating(coordinator), deliver)
        return coordinator


@contextmanager
def _whose(site: str) -> Iterator[None]:
    """A refusal says "this hospital", as its own log does; here there are several."""
    try:
        yield
    except BudgetSpent:  # an event tells it, with the hospital's name
        raise
    except PolicyRefused as error:
        raise PolicyRefused(f"{site}: {error}") from error


@contextmanager
def _alone(home: Path, results: Path) -> Iterator[None]:
    """One simulation at a time keeps its state in ``home``, and writes the results that belong to it."""
    lock = StateLock(".lock", "another simulation writes into the same folder")
    lock.take(home, f"the one whose results go to {results}")
    try:
        yield
    finally:
        lock.release()


def _runners(
    job: Job | EvaluationJob,
    site_files: Mapping[str, Path],
    home: Path,
    read: Callable[[Path, str], SiteFile] = load_site_file,
    files: Callable[[Path], RunFiles] = RunFiles,
) -> dict[str, SiteRunner]:
    if len(site_files) < job.min_clients:
        raise ConfigError(f"job '{job.name}' needs at least {job.min_clients} hospitals, got {len(site_files)}")
    count = len(site_files)
    return {
        site: SiteRunner(
            site, job.method, job.task, partial(read, path, site), home / site, turn=turn, of=count, files=files
        )
        for turn, (site, path) in enumerate(sorted(site_files.items()))
    }
