# SPDX-License-Identifier: Apache-2.0
"""Balanced sampling: which samples a pass takes, and that the order of everybody else does not change."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import WeightedRandomSampler

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean
from medpfl.core.seeding import derive_seed
from medpfl.methods.fedavg import FedAvg
from medpfl.tasks import Samples, Tabular
from medpfl.tasks.losses import CrossEntropy
from small_jobs import small_job, write_table_sites
from tools import pieces, ready, round_of

BALANCED = Tabular("blood", sampling="balanced")


def samples(*counts: int) -> Samples:
    targets = torch.from_numpy(np.repeat(np.arange(len(counts)), counts))
    size = len(targets)
    return Samples(torch.arange(size)[:, None].float(), targets, np.arange(size), [""] * size, len(counts))


def test_each_class_comes_equally_often() -> None:
    rare = samples(900, 0, 90, 10)
    orders = [BALANCED.order(rare, torch.Generator().manual_seed(seed)) for seed in range(20)]
    counts = torch.bincount(rare.targets[:][torch.cat(orders)], minlength=4)
    assert counts.sum() == 20_000 and counts[1] == 0
    assert all(abs(int(count) - 20_000 / 3) < 300 for count in counts[[0, 2, 3]])  # 4.5 standard deviations
    weights = (1 / torch.tensor([900.0, 1, 90, 10]))[rare.targets[:]].double()
    theirs = WeightedRandomSampler(weights, 1000, generator=torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    assert orders[3].tolist() == list(theirs)


def test_one_class_and_one_sample() -> None:
    generator = torch.Generator().manual_seed(0)
    assert BALANCED.order(samples(1, 0), generator).tolist() == [0]
    assert set(BALANCED.order(samples(0, 6), generator).tolist()) <= set(range(6))


def test_the_order_of_all_others_is_a_permutation_of_the_same_generator() -> None:
    plain = Tabular("blood").order(samples(5, 3), torch.Generator().manual_seed(7))
    assert torch.equal(plain, torch.randperm(8, generator=torch.Generator().manual_seed(7)))


def test_classes_are_not_balanced_twice() -> None:
    with pytest.raises(ConfigError, match="Tabular balances the classes twice, by its sampling and by the weights"):
        Tabular("blood", sampling="balanced", loss=CrossEntropy("balanced"))


def test_batches_and_what_the_policy_counts(tmp_path: Path) -> None:
    """The hospital's policy asks how many different samples were behind an update."""
    job = small_job(mixers={"fedavg": Mean()}, method=FedAvg(batch_size=4, steps=3), task=BALANCED)
    coordinator, runners = pieces(job, write_table_sites(tmp_path / "sites", ["anna", "berta"]), tmp_path)
    ready(coordinator, runners)
    runner = runners["anna"]
    round_of(coordinator, runners, 1)
    train = runner.data.splits["train"]
    site = runner.rounds.site(job.method, 2)
    batches = list(site.training_batches())
    order = torch.Generator().manual_seed(derive_seed(job.settings.seed, "anna", 2, "batches"))
    rows = BALANCED.order(train, order)[:12]
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), train.inputs[rows])
    assert site.drawn == [len(set(rows.tolist()))]
