# SPDX-License-Identifier: Apache-2.0
"""CusFL over FLARE: as in ``simulate``, with the head at home, and through a round that a hospital misses."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from in_process import Harness, tensors_of
from medpfl import store
from medpfl.core.mixers import Identity
from medpfl.job import Job
from medpfl.methods.cusfl import CusFL
from tools import assert_same, normed, outcome, run

pytestmark = pytest.mark.harness
Make = Callable[..., Job]


def cusfl(make_job: Make, **job: float) -> Job:
    method = CusFL(lr=0.05, batch_size=8, split="2", projection=3)
    return make_job(mixers={"local": Identity(), **method.components()}, method=method, task=normed(), **job)


def test_equals_simulate_and_the_head_stays(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    harness = Harness(cusfl(make_job), table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    assert_same(outcome(harness.results), run(cusfl(make_job), table_sites, tmp_path / "simulated"))
    sent = {name for _, _, payload in harness.wire for name in tensors_of(payload)}
    layers = {name.removeprefix("federated::federated.").rpartition(".")[0] for name in sent}
    assert layers == {"extractor.network.0", "extractor.network.1", "projection.0", "projection.2"}
    for site in table_sites:
        models = harness.folder / site / "medpfl" / "small" / "models"
        head = store.read(models / "personal-last.safetensors")[0]["personal.3.weight"].numpy().tobytes()
        assert all(head not in payload for _, _, payload in harness.wire)


def test_a_round_that_a_hospital_misses(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "silent" if (site, task, round_number) == ("clara", "train", 2) else None

    harness = Harness(cusfl(make_job, train_timeout=2.0), table_sites, tmp_path, script).run()
    assert harness.engine.panic is None
    with np.load(harness.results / "mixing.npz") as stored:
        np.testing.assert_allclose(stored["federated/00002"], 0.25)  # her newest model still counts
    slots = outcome(harness.results)["slots"]["federated"]
    assert slots and all(np.isfinite(tensor.numpy()).all() for tensor in slots.values())
