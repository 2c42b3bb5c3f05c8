# SPDX-License-Identifier: Apache-2.0
"""Rounds that ask some of the hospitals, over FLARE's controller and executors: as ``simulate``, bit for bit."""

from collections.abc import Callable
from pathlib import Path

import pytest

from in_process import Harness
from medpfl.job import Job
from medpfl.methods.fedbn import FedBN
from tools import assert_same, normed, outcome, run

pytestmark = [pytest.mark.harness, pytest.mark.slow]


def test_a_federation_draws_the_hospitals_that_simulate_draws(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path
) -> None:
    method = FedBN(lr=0.1, batch_size=8)
    job = make_job(method=method, mixers={}, task=normed(), rounds=4, hospitals_per_round=2, min_clients=2)
    harness = Harness(job, table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(run(job, table_sites, tmp_path / "simulate"), outcome(harness.results))
    assert len({site for site, task, _ in harness.wire if task == "train"}) > 2  # others than in the first round
