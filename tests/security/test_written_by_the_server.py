# SPDX-License-Identifier: Apache-2.0
"""A server sends a hospital more than the job's slots, or entries of other shapes: nothing of it gets into networks."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from medpfl.core.errors import ProtocolError
from medpfl.core.mixers import Mean
from medpfl.methods.ditto import Ditto
from medpfl.rounds.messages import Message, Slots
from medpfl.rounds.protocol.requests import TrainRequest, ValidateRequest
from small_jobs import small_job, write_table_sites
from tools import pieces, ready

PRIVATE, SENT = "personal.0.weight", "global.0.weight"


def private_entry(slots: Slots) -> None:
    slots["global"][PRIVATE] = torch.full_like(slots["global"][SENT], 7.0)


def private_slot(slots: Slots) -> None:
    slots["personal"] = {PRIVATE: torch.full_like(slots["global"][SENT], 7.0)}


def one_number(slots: Slots) -> None:
    slots["global"][SENT] = torch.tensor(3.0)


def whole_numbers(slots: Slots) -> None:
    slots["global"][SENT] = slots["global"][SENT].long()


def missing_entry(slots: Slots) -> None:
    del slots["global"][SENT]


def missing_slot(slots: Slots) -> None:
    slots.clear()


@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (private_entry, f"entry 'global::{PRIVATE}' does not travel"),
        (private_slot, f"entry 'personal::{PRIVATE}' does not travel"),
        (one_number, rf"entry 'global::{SENT}': expected shape \[4, 3\] torch.float32, got \[\] torch.float32"),
        (whole_numbers, r"expected shape \[4, 3\] torch.float32, got \[4, 3\] torch.int64"),
        (missing_entry, f"entry 'global::{SENT}' is missing"),
        (missing_slot, "entry 'global::global.0.weight' is missing"),
    ],
)
@pytest.mark.parametrize("kind", [TrainRequest, ValidateRequest])
def test_a_server_writes_the_travelling_slots_and_nothing_else(
    kind: type[Any], attack: Callable[[Slots], None], words: str, tmp_path: Path
) -> None:
    sites = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    coordinator, runners = pieces(small_job(2, {"global": Mean()}, Ditto(lr=0.1, batch_size=6)), sites, tmp_path)
    ready(coordinator, runners)
    message = coordinator.rounds.train_messages(1, ["anna"])["anna"]
    slots = {slot: {key: tensor.clone() for key, tensor in state.items()} for slot, state in message.slots.items()}
    attack(slots)
    before = {key: tensor.clone() for key, tensor in runners["anna"].models.state_dict().items()}
    request = kind(run=coordinator.run, round=1, rounds=2, best={})
    with pytest.raises(ProtocolError, match=words):
        runners["anna"].handle(Message(request, slots))
    assert all(torch.equal(before[key], tensor) for key, tensor in runners["anna"].models.state_dict().items())
