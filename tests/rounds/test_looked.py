# SPDX-License-Identifier: Apache-2.0
"""What an answer's values and lengths are is found as it comes; what counts is decided when all are there."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medpfl.job import Job
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.memory import WANTED
from medpfl.rounds.messages import Message, Slots
from medpfl.rounds.protocol.replies import TrainReply
from medpfl.rounds.server import bounds, checks
from medpfl.rounds.server.coordinator import Coordinator
from tools import exchange, pieces, ready

Make = Callable[..., Job]
Started = tuple[Coordinator, dict[str, SiteRunner]]


@pytest.fixture
def started(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> Started:
    coordinator, runners = pieces(make_job(rounds=2), table_sites, tmp_path)
    ready(coordinator, runners)
    return coordinator, runners


def answers(started: Started, number: int) -> dict[str, Message[Any]]:
    coordinator, runners = started
    return exchange(runners, coordinator.rounds.train_messages(number, coordinator.joined))


def spoiled(slots: Slots) -> Slots:
    changed = {slot: {key: tensor.clone() for key, tensor in state.items()} for slot, state in slots.items()}
    next(iter(next(iter(changed.values())).values())).view(-1)[0] = torch.nan
    return changed


@pytest.mark.parametrize("memory", ["1000", "0"])
def test_the_server_looks_once_as_answers_come(memory: str, monkeypatch: pytest.MonkeyPatch, started: Started) -> None:
    """So that nobody waits for it once the last is there."""
    monkeypatch.setenv(WANTED, memory)
    looked = []
    for module in (bounds, checks):
        plain = module.pieces

        def watched(*tensors: torch.Tensor, plain: Callable[..., Any] = plain, **more: int) -> Any:
            looked.append(tensors[0])
            return plain(*tensors, **more)

        monkeypatch.setattr(module, "pieces", watched)
    coordinator, _ = started
    for number in (1, 2):
        kept = {site: coordinator.arrived(site, reply) for site, reply in answers(started, number).items()}
        before = len(looked)
        assert before >= 2 * len(kept)
        assert coordinator.rounds.take_train(number, kept) == sorted(kept)
        assert len(looked) == before
        looked.clear()
    coordinator.close()


def test_what_may_not_be_mixed_is_refused_in_its_turn(started: Started) -> None:
    coordinator, _ = started
    replies = answers(started, 1)
    first = min(replies)
    replies[first] = dataclasses.replace(replies[first], slots=spoiled(replies[first].slots))
    kept = {site: coordinator.arrived(site, reply) for site, reply in replies.items()}
    assert not coordinator.record.events
    assert coordinator.rounds.take_train(1, kept) == sorted(replies)[1:]
    (event,) = coordinator.record.events
    assert event.site == first and "holds NaN" in event.event
    coordinator.close()


def test_only_the_very_answer_that_was_looked_at_counts_as_such(started: Started) -> None:
    coordinator, _ = started
    kept = {site: coordinator.arrived(site, reply) for site, reply in answers(started, 1).items()}
    first = min(kept)
    kept[first] = dataclasses.replace(kept[first], slots=spoiled(kept[first].slots))
    assert coordinator.rounds.take_train(1, kept) == sorted(kept)[1:]
    coordinator.close()


def test_an_update_before_anybody_was_asked_for_one_is_not_looked_at(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """The server does not know yet what it should be like; what was asked, says who takes the answer."""
    coordinator, _ = pieces(make_job(), table_sites, tmp_path)
    early: Message[Any] = Message(
        TrainReply(round=1, metrics=(), loss={}, notes=(), seconds=1.0), {"model": {"weight": torch.zeros(3)}}
    )
    assert torch.equal(coordinator.arrived("anna", early).slots["model"]["weight"], torch.zeros(3))
    coordinator.close()


def test_an_update_of_other_slots_is_refused(started: Started) -> None:
    """Also where what is there is as it should be, or what was not asked for comes with it."""
    coordinator, _ = started
    replies = answers(started, 1)
    first, second, *others = sorted(replies)
    replies[first] = dataclasses.replace(replies[first], slots={})
    more = replies[second].slots | {"more": {"weight": torch.zeros(3)}}
    replies[second] = dataclasses.replace(replies[second], slots=more)
    kept = {site: coordinator.arrived(site, reply) for site, reply in replies.items()}
    assert coordinator.rounds.take_train(1, kept) == others
    coordinator.close()
