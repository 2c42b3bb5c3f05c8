# SPDX-License-Identifier: Apache-2.0
"""FedSM's exchanges over FLARE's real controller, communicator and executor: the same result as in process."""

from collections.abc import Callable
from pathlib import Path

import pytest

from in_process import Harness
from medpfl.core.mixers import Mean, Mixer, ServerAdam, SoftPull
from medpfl.job import Job
from medpfl.methods.fedsm import FedSM, FedSMExtra
from tools import assert_same, outcome, run

pytestmark = pytest.mark.harness


@pytest.mark.parametrize("kind", [FedSM, FedSMExtra])
def test_all_exchanges_of_a_round(
    make_job: Callable[..., Job], table_sites: dict[str, Path], tmp_path: Path, kind: type[FedSM]
) -> None:
    def job() -> Job:
        slots: dict[str, Mixer] = {"global": Mean(), "personal": SoftPull(lam=0.5), "selector": ServerAdam(lr=0.02)}
        return make_job(rounds=2, mixers=slots, method=kind(lr=0.05, batch_size=8, selector_steps=3))

    harness = Harness(job(), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(job(), table_sites, tmp_path / "simulated"))
    asked = [name for _, name, _ in harness.wire].count("refine")
    assert asked > 0
