# SPDX-License-Identifier: Apache-2.0
"""A hospital tells what its noise has cost in a job that asks for none, or tells it otherwise than it was asked."""

from collections.abc import Callable
from pathlib import Path

import pytest

from medpfl.core.mixers import Mean
from medpfl.job import Job
from medpfl.methods.fedavg import FedAvg
from medpfl.privacy import ClippedNoise
from medpfl.privacy.contract import Privacy, Spent
from medpfl.results.files import read_summary
from tools import exchange, pieces, ready, retell

UPDATE = ClippedNoise(clip=0.1, noise_multiplier=6.0)
CHEAP = Spent(level="update", epsilon=0.01, delta=1e-5, releases=1)


@pytest.mark.parametrize(
    ("how", "claim", "told"),
    [
        (None, CHEAP, "it tells what noise has cost, and this job asks for none"),
        (UPDATE, CHEAP.model_copy(update={"delta": 0.9}), "it tells its epsilon at delta 0.9, and was asked for 1e-05"),
        (UPDATE, None, "it does not tell what its noise has cost"),
    ],
)
def test_a_claim_of_noise_that_does_not_fit_the_job_is_refused(
    how: Privacy | None,
    claim: Spent | None,
    told: str,
    make_job: Callable[..., Job],
    table_sites: dict[str, Path],
    tmp_path: Path,
) -> None:
    """The report would tell of an epsilon in a job without noise, or of a small one at a delta of no worth."""
    method = FedAvg(lr=0.1, steps=1, batch_size=8, privacy=how)
    job = make_job(rounds=1, mixers={"fedavg": Mean()}, method=method)
    coordinator, runners = pieces(job, table_sites, tmp_path)
    ready(coordinator, runners)
    liar, *others = coordinator.joined
    replies = exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined))
    retell(replies[liar], privacy=claim)
    assert coordinator.rounds.take_train(1, replies) == others
    replies = exchange(runners, coordinator.end.finish_messages(coordinator.joined))
    retell(replies[liar], privacy=claim)
    coordinator.end.take_final(replies)
    summary = read_summary(tmp_path / "r")
    assert list(summary.privacy) == (others if how else [])  # type: ignore[union-attr]
    assert sum(told in event.event for event in summary.events if event.site == liar) == 2
