# SPDX-License-Identifier: Apache-2.0
"""FedAP over FLARE: equal to ``simulate``, and what is in the encoded messages."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from in_process import Harness, tensors_of
from medpfl import store
from medpfl.core.mixers import Identity, Mixer, StatisticsDistance
from medpfl.job import Job
from medpfl.methods.fedap import FedAP
from tools import assert_same, normed, outcome, run

pytestmark = pytest.mark.harness
Make = Callable[..., Job]
TRAVELS = {"model.0.weight", "model.0.bias", "model.3.weight", "model.3.bias"}


def fedap_job(make_job: Make, mixer: Mixer, **more: Any) -> Job:
    mixers = {"local": Identity(), "model": mixer}
    return make_job(rounds=4, mixers=mixers, method=FedAP(lr=0.05, batch_size=8), task=normed(), **more)


@pytest.mark.parametrize(
    "mixer",
    [
        StatisticsDistance(lam=0.4),
        StatisticsDistance(statistics="head_inputs"),
        StatisticsDistance(statistics="batch_norm_running", from_round=3),
    ],
    ids=["original", "d-FedAP", "f-FedAP"],
)
def test_equals_simulate_and_batch_norm_never_leaves(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, mixer: StatisticsDistance
) -> None:
    job = fedap_job(make_job, mixer)
    harness = Harness(job, table_sites, tmp_path / "flare").run()
    assert harness.engine.panic is None
    asked = [(site, payload) for site, task, payload in harness.wire if task == "statistics"]
    assert [site for site, _ in asked] and {site for site, _ in asked} == set(table_sites)
    layer = "3" if mixer.statistics == "head_inputs" else "1"
    names = {f"{mixer.statistics}::{layer}.mean", f"{mixer.statistics}::{layer}.variance"}
    for _, payload in asked:
        sent = tensors_of(payload)
        assert set(sent) == names
        assert all(array.shape == (4,) and array.dtype == np.float64 for array in sent.values())
    for site in table_sites:
        private = store.read(harness.folder / site / "medpfl" / "small" / "models" / "personal-last.safetensors")[0]
        norm = {key: tensor.numpy() for key, tensor in private.items() if key.startswith("model.1.")}
        assert len(norm) == 5
        for sender, task, payload in harness.wire:
            if task != "statistics":
                assert {name.partition("::")[2] for name in tensors_of(payload)} in (set(), TRAVELS), task
            for key, values in norm.items():
                if sender == site and values.ndim:  # a count of steps is too short to look for
                    assert values.tobytes() not in payload, (task, key)
    again = dataclasses.replace(job, components={"model": type(mixer)(**_arguments(mixer))})
    assert_same(outcome(harness.results), run(again, table_sites, tmp_path / "simulated"))


def _arguments(mixer: StatisticsDistance) -> dict[str, Any]:
    return {"lam": mixer.lam, "statistics": mixer.statistics, "from_round": mixer.from_round}


def test_a_hospital_that_does_not_answer_about_its_statistics(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    def script(site: str, task: str, round_number: int) -> str | None:
        return "silent" if (site, task) == ("clara", "statistics") else None

    job = fedap_job(make_job, StatisticsDistance(lam=0.4), train_timeout=3.0)
    harness = Harness(job, table_sites, tmp_path, script).run()
    assert harness.engine.panic is None
    with np.load(harness.results / "mixing.npz") as stored:
        matrix = stored["model/00004"]
    np.testing.assert_allclose(matrix[2], [0.2, 0.2, 0.4, 0.2])
    assert (matrix[[0, 1, 3], 2] == 0).all()
