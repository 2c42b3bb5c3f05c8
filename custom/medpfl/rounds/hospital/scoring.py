# SPDX-License-Identifier: Apache-2.0
"""A hospital's models on its own splits: what it tells the server of a round."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from medpfl.data.samples import SiteData
from medpfl.deployed.evaluate import evaluate
from medpfl.methods.contract import Method
from medpfl.methods.returned import numbers_of
from medpfl.results.line import MetricLine
from medpfl.results.schema import number
from medpfl.tasks.contract import Evaluation, Task


@dataclass(frozen=True)
class Scoring:
    """Scores of the ``models`` as they are when they are asked for. ``index``: the hospital's place in the roster."""

    models: nn.ModuleDict
    task: Task
    data: SiteData
    device: torch.device
    index: int

    def validate(self, method: Method, name: str) -> Evaluation | None:
        """The deployed model ``name`` on the validation split; None where that is empty."""
        return evaluate(method, name, self.models, self.task, self.data.splits["validation"], self.device)

    def lines(self, methods: Sequence[Method], round_number: int) -> list[MetricLine]:
        """Validation of every deployed model after a round's mixing, and the methods' own numbers about them."""
        metrics = [
            line_of(name, "validation", round_number, evaluation)
            for method in methods
            for name in method.deploys
            if (evaluation := self.validate(method, name))
        ]
        return metrics + self._diagnoses(methods, round_number)

    def _diagnoses(self, methods: Sequence[Method], round_number: int) -> list[MetricLine]:
        samples = self.data.splits["validation"]
        if not len(samples):
            return []
        return [
            MetricLine(model=name, split="validation", round=round_number, metrics={name: number(float(value))})
            for method in methods
            if method.privacy is None  # some are of the training data, and have no noise
            for name, value in numbers_of(method, self.models, samples, self.index, self.device).items()
        ]


def line_of(model: str, split: Literal["validation", "test"], round_number: int, evaluation: Evaluation) -> MetricLine:
    """An evaluation as it is sent."""
    values = {metric: number(value) for metric, value in evaluation.metrics.items()}
    return MetricLine(model=model, split=split, round=round_number, metrics=values)
