# SPDX-License-Identifier: Apache-2.0
"""Where nobody else needs the tensors that a hospital was sent, its answer lies in them: a model less in its memory."""

from pathlib import Path
from typing import Any

import pytest
import torch

from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.privacy import ClippedNoise
from medpfl.privacy.noise import FIXED
from medpfl.rounds.messages import Message, flatten, unflatten
from small_jobs import small_job, write_table_sites
from tools import pieces, ready

MIXERS: Any = {"fedavg": Mean()}
Sent = list[dict[str, torch.Tensor]]


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Path]:
    return write_table_sites(tmp_path / "sites", ["anna", "berta"])


def played(job: Job, sites: dict[str, Path], folder: Path, own: bool) -> tuple[Sent, Sent, Sent]:
    """Two rounds: what each hospital was sent, as it was and as it is after the answer, and the answers."""
    coordinator, runners = pieces(job, sites, folder)
    ready(coordinator, runners)
    before, after, answers = [], [], []
    for number in (1, 2):
        replies = {}
        for site, message in coordinator.rounds.train_messages(number, coordinator.roster).items():
            before.append({key: value.clone() for key, value in flatten(message.slots).items()})
            slots = unflatten({key: value.clone() for key, value in before[-1].items()})
            replies[site] = runners[site].handle(Message(message.header, slots, own=own))
            after.append({key: value.clone() for key, value in flatten(slots).items()})
            answers.append({key: value.clone() for key, value in flatten(replies[site].slots).items()})
            places = {value.data_ptr() for value in flatten(slots).values()}
            lies_there = {value.data_ptr() in places for value in flatten(replies[site].slots).values()}
            assert lies_there == {own and job.method.privacy is None}
        coordinator.rounds.take_train(number, replies)
    return before, after, answers


def same(left: Sent, right: Sent) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(left, right, strict=True)
    )


def test_the_answer_is_the_same(sites: dict[str, Path], tmp_path: Path) -> None:
    job = small_job(3)
    before, after, answers = played(job, sites, tmp_path / "own", own=True)
    assert not same(before, after) and same(after, answers)
    others = played(job, sites, tmp_path / "others", own=False)
    assert same(others[0], others[1])  # of whoever has them besides
    assert same(answers, others[2]) and same(before, others[0])


def test_what_noise_is_measured_by_stays(
    sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FIXED, "0")
    method = FedAvg(lr=0.1, steps=3, batch_size=6, privacy=ClippedNoise(clip=0.1, noise_multiplier=0.5))
    job = small_job(3, MIXERS, method)
    before, after, answers = played(job, sites, tmp_path / "own", own=True)
    assert same(before, after)
    assert same(answers, played(job, sites, tmp_path / "others", own=False)[2])
