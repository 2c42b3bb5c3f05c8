# SPDX-License-Identifier: Apache-2.0
"""The round loop, once: generators that yield what is asked of the hospitals and are sent their answers.

Who runs one carries messages and nothing else: FLARE's controllers do it over the network, ``simulate`` in this
process, tests by hand. ``carry`` drives a loop with a function that delivers one exchange.
"""

import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from medpfl.rounds.evaluation import EvaluationCoordinator
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.requests import Request
from medpfl.rounds.server.coordinator import Coordinator, Replies
from medpfl.rounds.server.quorum import QuorumLost


@dataclass(frozen=True)
class Exchange:
    """What is asked of whom.

    Attributes:
        messages: hospital to its message; all are of one task and one round.
        timeout: seconds after which hospitals that have not answered are left out.
        quorum: after so many answers the remaining hospitals are waited for only a little longer.
        awaited: so it is when these have answered or failed; None: all that are asked.
    """

    messages: Mapping[str, Message[Request]]
    timeout: float
    quorum: int
    awaited: Collection[str] | None = None


Loop = Generator[Exchange, Replies, Any]


def carry(loop: Loop, deliver: Callable[[Exchange], Replies]) -> None:
    """Run a loop to its end.

    Raises:
        QuorumLost: too few hospitals answered.
        MedPFLError: as ``deliver`` and the coordinator raise it.
    """
    with closing(loop):
        try:
            exchange = next(loop)
            while True:
                exchange = loop.send(deliver(exchange))
        except StopIteration:
            return


@dataclass(frozen=True)
class Watch:
    """What the transport wants to be asked and told as the loop goes on.

    Attributes:
        joined: told once the hospitals that fit together.
        asked: before every round, which of those take part in it; before the end too, with ``None`` for the round.
        ended: told after every round the hospitals whose updates were mixed.
    """

    joined: Callable[[list[str]], None] = lambda joined: None
    asked: Callable[[int | None, list[str]], list[str]] = lambda round_number, joined: joined
    ended: Callable[[int, list[str]], None] = lambda round_number, mixed: None


def training(
    coordinator: Coordinator, watch: Watch | None = None, stop_after: int | None = None, test: bool = True
) -> Loop:
    """A whole job that trains.

    Args:
        stop_after: stop after this round, as if the process had been killed (for tests of resuming).
        test: False: end after the last validation; no test set is read and no model is kept.
    """
    try:
        yield from _training(coordinator, watch or Watch(), stop_after, test)
    finally:
        coordinator.close()


def _training(coordinator: Coordinator, watch: Watch, stop_after: int | None, test: bool) -> Loop:
    yield from beginning(coordinator)
    watch.joined(coordinator.joined)
    for round_number in range(coordinator.done + 1, coordinator.settings.rounds + 1):
        try:
            mixed = yield from one_round(coordinator, round_number, watch.asked(round_number, coordinator.joined))
        except QuorumLost as lost:
            if not coordinator.rounds.ends_early(round_number):
                raise
            why = f"{coordinator.rounds.end_early()}: {lost}"
            coordinator.record.event(round_number, "server", f"the job ends after round {coordinator.done}{why}")
            break
        watch.ended(round_number, mixed)
        if round_number == stop_after:
            return
    yield from ending(coordinator, lambda: watch.asked(None, coordinator.joined), test)


def beginning(coordinator: Coordinator) -> Loop:
    """Who is there, and which of them fit together, after the network was planned where the job wants it; all are
    waited for."""
    planning = coordinator.planning
    if asked := planning.messages():
        planning.take((yield Exchange(asked, coordinator.settings.init_timeout, len(asked))))
    coordinator.follow(planning.plan)
    messages = coordinator.init_messages()
    coordinator.take_init((yield Exchange(messages, coordinator.settings.init_timeout, len(messages))))


def one_round(coordinator: Coordinator, round_number: int, sites: list[str]) -> Generator[Exchange, Replies, list[str]]:
    """One round with these hospitals, or those drawn of them: statistics of all where a component wants them, training,
    and further exchanges where the method wants them. Returns the hospitals whose updates were mixed."""
    started = time.monotonic()
    timeout, quorum = coordinator.settings.train_timeout, coordinator.min_sites
    if requests := coordinator.rounds.statistics_messages(round_number, sites):
        coordinator.rounds.take_statistics(round_number, (yield Exchange(requests, timeout, quorum)))
    asked = coordinator.rounds.drawn(round_number, sites)
    replies = yield Exchange(coordinator.rounds.train_messages(round_number, asked), timeout, quorum)
    mixed = coordinator.rounds.take_train(round_number, replies, started)
    while messages := coordinator.rounds.refine_messages():
        coordinator.rounds.take_refined((yield Exchange(messages, timeout, quorum)))
    return mixed


def ending(coordinator: Coordinator, awaited: Callable[[], list[str]], test: bool = True) -> Loop:
    """The last mixed models on validation and, with ``test``, the chosen ones on the test sets.

    Every hospital that joined is asked, one too that missed the last rounds: it may be back. Only those ``awaited`` are
    waited for, the others a little longer.
    """
    timeout, messages = coordinator.settings.train_timeout, coordinator.end.validate_messages(coordinator.joined)
    coordinator.end.take_validation((yield Exchange(messages, timeout, len(messages), awaited())))
    if test:
        sites = awaited()
        coordinator.end.take_final((yield Exchange(coordinator.end.finish_messages(sites), timeout, len(sites))))


def evaluating(coordinator: EvaluationCoordinator) -> Loop:
    """A whole job that evaluates a given model; all hospitals are waited for."""
    messages = coordinator.messages()
    coordinator.take((yield Exchange(messages, coordinator.settings.timeout, len(messages))))
