# SPDX-License-Identifier: Apache-2.0
"""What a metric or a method of one's own gives as NumPy's or torch's number counts as the number that it is."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from baselines import begin, play
from medpfl.core.errors import ConfigError
from medpfl.data.samples import Samples
from medpfl.methods.softpull import SoftPull
from medpfl.tasks.metrics.contract import CaseMetric, Metric
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job
from tools import exchange

Kind = Callable[[float], Any]
KINDS: list[Kind] = [np.float32, torch.tensor]


class Half(Metric):
    name = "half"

    def __init__(self, kind: Kind):
        self.kind = kind

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        given: float = self.kind(0.5)
        return given


class Quarter(CaseMetric):
    name = "quarter"

    def __init__(self, kind: Kind):
        self.kind = kind

    def of_cases(self, decisions: Tensor, samples: Samples) -> list[float]:
        return [self.kind(0.25) for _ in samples.names]


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_of_another_library_is_told(kind: Kind, table_sites: dict[str, Path], tmp_path: Path) -> None:
    @dataclass(frozen=True)
    class Scored(Tabular):
        score: str = "half"
        metrics: ClassVar = (*Tabular.metrics, Half(kind), Quarter(kind))

    @dataclass(frozen=True, kw_only=True)
    class Diagnosed(SoftPull):
        diagnoses: ClassVar = ("eighth",)

        def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: Any) -> dict[str, float]:
            return {"eighth": kind(0.125)}

    job = small_job(2, method=Diagnosed(), task=Scored("blood"))
    coordinator, runners = begin(job, table_sites, tmp_path)
    play(coordinator, runners, 1)
    answer = exchange(runners, coordinator.rounds.train_messages(2, ["anna"]))["anna"]
    told = {line.model: line.metrics for line in answer.header.metrics}
    assert (told["personal"]["half"], told["personal"]["quarter"]) == (0.5, 0.25)
    assert told["eighth"] == {"eighth": 0.125}
    samples = runners["anna"].data.splits["test"]
    evaluation = job.task.evaluate(torch.full((len(samples), 2), 0.5), samples)
    assert {type(row["quarter"]) for row in evaluation.cases} == {float}


def test_what_cannot_be_told_of_a_metric_is_said_when_the_job_is_made() -> None:
    """A unit that is too long for headings ended the job with a traceback of pydantic's, once it had begun."""
    for changed, told in (
        ({"unit": "milligrams per decilitre"}, r"metric 'half': its unit: .*at most 20.*'milligrams per decilitre'"),
        ({"direction": "up"}, "metric 'half': its direction: .*'higher' or 'lower'.*'up'"),
    ):
        kind = type("Changed", (Half,), changed)

        @dataclass(frozen=True)
        class Scored(Tabular):
            metrics: ClassVar = (*Tabular.metrics, kind(float))

        with pytest.raises(ConfigError, match=told):
            Scored(dataset="blood")
