# SPDX-License-Identifier: Apache-2.0
"""A hospital whose answer was lost on its way is asked for it once more, and gives the same one."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from every_method import EVERY, Small, write_both
from exchanging import Asked, slots
from medpfl.job import Job
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import Message, flatten
from medpfl.rounds.protocol.replies import Reply
from tools import exchange, pieces, ready, round_of

Make = Callable[..., Job]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


def tensors(reply: Message[Reply]) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in flatten(reply.slots).items()}


def state(runner: SiteRunner) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in runner.models.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(tensor, other[key]) for key, tensor in one.items())


def told(reply: Message[Reply]) -> dict[str, object]:
    return reply.header.model_dump(exclude={"seconds", "notes"})


@pytest.mark.slow
@pytest.mark.parametrize("small", EVERY.values(), ids=EVERY)
def test_every_method_answers_a_round_again_as_before(
    small: Small, both: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    """In the first round, where nothing is kept yet, in the third, and for the validation after the last one, before
    which methods on public data train and Auto counts a loss."""
    coordinator, runners = pieces(small.job(rounds=4), both[small.images], tmp_path)
    ready(coordinator, runners)
    for number in (1, 2, 3):
        messages = coordinator.rounds.train_messages(number, coordinator.joined)
        first = {site: runners[site].handle(message) for site, message in messages.items()}
        if number != 2:
            kept = {site: (tensors(first[site]), state(runners[site])) for site in first}
            for site, message in messages.items():
                again = runners[site].handle(message)
                assert equal(tensors(again), kept[site][0]) and equal(state(runners[site]), kept[site][1])
                assert told(again) == told(first[site])
        coordinator.rounds.take_train(number, first)
        while more := coordinator.rounds.refine_messages():
            coordinator.rounds.take_refined(exchange(runners, more))
    for site, message in coordinator.end.validate_messages(coordinator.joined).items():
        once, left = runners[site].handle(message), state(runners[site])
        assert told(runners[site].handle(message)) == told(once) and equal(state(runners[site]), left)


def test_statistics_are_told_again(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers=slots(), method=Asked(lr=0.05, batch_size=8))
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    messages = coordinator.rounds.statistics_messages(3, coordinator.joined)
    assert messages
    for site, message in messages.items():
        first = tensors(runners[site].handle(message))
        assert first and equal(first, tensors(runners[site].handle(message)))
