# SPDX-License-Identifier: Apache-2.0
"""Augmentation in a job: every model of a round sees the same batches, again and again the same."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from medpfl.core.mixers import Mean, SoftPull
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.presented import Presented
from medpfl.methods.site import Batch
from medpfl.methods.softpull import SoftPull as SoftPulled
from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation
from pictures import TABLE, declare, write_images
from tools import assert_same, pieces, ready, round_of, run


def job(augment: Any) -> Job:
    mixers = {"fedavg": Mean(), "model": SoftPull(lam=0.5)}
    task = Segmentation("skin", size=(16, 16), architecture=UNet((4, 8)), augment=augment)
    return Job("small", 1, Settings(rounds=2), mixers, SoftPulled(batch_size=4, epochs=1, lr=0.01), task)


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("skin")
    write_images(folder, count=24, size=(20, 20))
    path = declare(folder, TABLE)
    return {"a": path, "b": path}


@pytest.mark.slow
def test_every_model_of_a_round_sees_the_same_batches_whatever_else_is_drawn(
    sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = pieces(job("dermoscopy"), sites, tmp_path)
    ready(coordinator, runners)
    round_of(coordinator, runners, 1)
    found = {}
    for name, number, lost in (("a", 1, 0), ("a", 1, 5), ("a", 2, 0), ("b", 1, 0)):
        torch.rand(lost)
        if lost:
            runners[name].rounds.presented = Presented()
        site = runners[name].rounds.site(runners[name].method, number)
        found[name, number, lost] = list(site.training_batches())
    first, again, later, other = found.values()
    for one, same in zip(first, again, strict=True):
        assert torch.equal(one.inputs, same.inputs) and torch.equal(one.targets, same.targets)
        assert set(one.targets.unique().tolist()) <= {0, 1}
    kept = list(runners["a"].rounds.site(runners["a"].method, 1).training_batches())
    assert all(torch.equal(one.inputs, same.inputs) for one, same in zip(kept, first, strict=True))
    repeated = list(runners["a"].rounds.site(runners["a"].method, 1).training_batches())
    assert all(one.inputs is same.inputs for one, same in zip(kept, repeated, strict=True))  # augmented once
    for else_drawn in (later, other):
        assert not torch.equal(first[0].inputs, else_drawn[0].inputs)
    check_made_ahead(runners["a"], again)
    rows = runners["a"].data.splits["train"].inputs[:]
    assert not any(torch.equal(seen, row) for seen in first[0].inputs for row in rows)


def check_made_ahead(runner: Any, in_time: list[Batch]) -> None:
    """A thread makes the same batches ahead, and ends with them."""
    running = threading.active_count()
    runner.rounds.presented = Presented(ahead=True)
    batches = runner.rounds.site(runner.method, 1).training_batches()
    made_ahead = [next(batches)]
    assert threading.active_count() == running + 1
    made_ahead += batches
    assert threading.active_count() == running
    for one, other in zip(made_ahead, in_time, strict=True):
        assert torch.equal(one.inputs, other.inputs) and torch.equal(one.targets, other.targets)
        assert one.place == other.place
    left = runner.rounds.site(runner.method, 2).training_batches()
    next(left)
    left.close()  # as if the job were aborted in the midst of a round
    assert threading.active_count() == running


@pytest.mark.slow
def test_an_augmented_job_gives_the_same_bits_again(sites: dict[str, Path], tmp_path: Path) -> None:
    first = run(job("fundus"), sites, tmp_path / "1")
    assert_same(first, run(job("fundus"), sites, tmp_path / "2"))
    assert run(job(()), sites, tmp_path / "3")["scores"] != first["scores"]
