# SPDX-License-Identifier: Apache-2.0
"""How many rounds of fine-tuning a hospital keeps: those that validation found best, whatever direction that is."""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl import store
from medpfl.data.samples import Samples
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.fedavg import FedAvg
from medpfl.rounds.simulate import simulate
from medpfl.tasks.metrics.contract import Metric
from medpfl.tasks.metrics.measure import Direction
from medpfl.tasks.tabular import Tabular
from small_jobs import on_its_own

MIXED = 2 * [1.0, 1.0]  # round 1, after the mean and before: validated, and tested as best and last in one


class Scripted(Metric):
    """Says what it is told to say, one value after the other."""

    name = "scripted"
    direction: ClassVar[Direction] = "lower"
    values: ClassVar[list[float]] = []

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return self.values.pop(0)

    def of_resamples(self, decisions: Tensor, samples: Samples, counts: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.full(len(counts), np.nan)  # how sure a test is says nothing here


@dataclass(frozen=True)
class ByScript(Tabular):
    score: str = "scripted"
    metrics: ClassVar[tuple[Metric, ...]] = (Scripted(),)


def tuned(scores: list[float], anna: Path, folder: Path) -> dict[str, Tensor]:
    """The model that was kept of so many rounds of fine-tuning with these validation scores."""
    Scripted.values[:] = [*MIXED, *scores, 1.0]
    settings = Settings(rounds=1, references=(), finetune=len(scores))
    job = Job("small", 1, settings, {}, FedAvg(lr=0.05), ByScript("blood"))
    simulate(job, {"anna": anna}, folder / "results", folder / "home")
    return store.read(folder / "home" / "anna" / "small" / "models" / "fedavg_finetuned-best.safetensors")[0]


@pytest.mark.parametrize(
    ("scores", "kept"),
    [
        ([0.7, 0.5, 0.6], 2),
        ([0.5, float("nan")], 1),  # it diverged
        ([float("nan"), float("nan")], 2),  # nothing to choose by: the last
    ],
)
def test_the_round_with_the_lowest_error_is_kept(
    scores: list[float], kept: int, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    found = tuned(scores, on_its_own(table_sites["anna"]), tmp_path / "all")
    falling = [1.0 / (place + 1) for place in range(kept)]
    expected = tuned(falling, on_its_own(table_sites["anna"]), tmp_path / "so many")
    assert all(torch.equal(found[key], expected[key]) for key in expected) and found.keys() == expected.keys()
