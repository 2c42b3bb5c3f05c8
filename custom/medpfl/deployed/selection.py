# SPDX-License-Identifier: Apache-2.0
"""A super model at work: one network a case, and what would have been with other thresholds."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Annotated

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.data.samples import Rows, Samples, SiteData
from medpfl.methods.super_model import SuperModel
from medpfl.models.selector import by_case, with_content
from medpfl.tasks.base import Task

BATCH = 64
GAMMAS = (0.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 1.0)
"""The thresholds that are tried: every hospital tries the same ones, so that their answers can be added up."""

Score = Annotated[float, Field(allow_inf_nan=False)] | None


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Point(_Strict):
    """``gamma``: the threshold (None: the selector has no need of one); ``score``: of the super model with it;
    ``counts``: cases served by the global model, then by each hospital's personal model (of an ensemble, cases in which
    that model has the largest weight)."""

    gamma: Annotated[float, Field(ge=0, le=1)] | None
    score: Score
    counts: list[Annotated[int, Field(ge=0)]]


class SplitStudy(_Strict):
    """``cases``: their number; ``alone``: score of the global model, then of each hospital's personal model."""

    cases: Annotated[int, Field(ge=1)]
    alone: list[Score]
    points: Annotated[list[Point], Field(min_length=1)]


class Study(_Strict):
    """What a hospital tells of a super model: numbers only, no case. ``validation``: None where it has none."""

    validation: SplitStudy | None
    test: SplitStudy


def case_scores(
    method: SuperModel, models: nn.ModuleDict, inputs: Rows, case: NDArray[np.int64], device: torch.device
) -> Tensor:
    """Log-probabilities of each case, from the mean over its samples with content: cases x classes.

    Args:
        inputs: N samples.
        case: N indices of their cases, from 0.
    """
    scores, content = [], []
    with torch.inference_mode():
        for start in range(0, len(inputs), BATCH):
            part = inputs[start : start + BATCH]
            scores.append(method.scores(models, part.to(device)).cpu())
            content.append(with_content(part))
    return by_case(torch.cat(scores), case, torch.cat(content))


def decide_by_case(
    method: SuperModel, models: nn.ModuleDict, task: Task, samples: Samples, device: torch.device
) -> Tensor:
    """The task's decisions about all samples, each case by the network chosen for it."""
    chosen, _ = method.choose(case_scores(method, models, samples.inputs, samples.case, device))
    network = chosen[torch.from_numpy(samples.case)]
    decisions: Tensor | None = None
    for index in network.unique().tolist():
        rows = (network == index).nonzero()[:, 0]
        part = _decide(models[method.networks[index]], task, samples.inputs, rows, device)
        if decisions is None:
            decisions = part.new_empty((len(samples), *part.shape[1:]))
        decisions[rows] = part
    assert decisions is not None
    return decisions


def _decide(
    network: Callable[[Tensor], Tensor], task: Task, inputs: Rows, rows: Tensor, device: torch.device
) -> Tensor:
    with torch.inference_mode():
        return torch.cat([task.decide(network(inputs[part].to(device))).cpu() for part in rows.split(BATCH)])


def study(method: SuperModel, models: nn.ModuleDict, task: Task, data: SiteData, device: torch.device) -> Study:
    """Validation and test of a super model with every threshold, and of its networks alone.

    Raises:
        ConfigError: the test split is empty.
    """
    test = _study(method, models, task, data.splits["test"], device)
    if test is None:
        raise ConfigError("the test split is empty")
    return Study(validation=_study(method, models, task, data.splits["validation"], device), test=test)


def _study(
    method: SuperModel, models: nn.ModuleDict, task: Task, samples: Samples, device: torch.device
) -> SplitStudy | None:
    if not len(samples):
        return None
    models.eval()
    case = torch.from_numpy(samples.case)
    scores = case_scores(method, models, samples.inputs, samples.case, device)
    every = torch.arange(len(samples))
    decisions = [_decide(models[name], task, samples.inputs, every, device) for name in method.networks]
    points = []
    for gamma in (None,) if method.gamma is None else GAMMAS:
        chosen, _ = replace(method, gamma=gamma).choose(scores)
        if method.ensemble:
            mixed = _decide(partial(method.predict, "super", models), task, samples.inputs, every, device)
        else:
            mixed = _picked(decisions, chosen[case])
        counts = torch.bincount(chosen, minlength=len(decisions)).tolist()
        points.append(Point(gamma=gamma, score=_score(task, mixed, samples), counts=counts))
    alone = [_score(task, decision, samples) for decision in decisions]
    return SplitStudy(cases=len(samples.names), alone=alone, points=points)


def _picked(decisions: list[Tensor], network: Tensor) -> Tensor:
    """Of every sample the decision of the network with its index."""
    mixed = torch.empty_like(decisions[0])
    for index in network.unique().tolist():
        mixed[network == index] = decisions[index][network == index]
    return mixed


def _score(task: Task, decisions: Tensor, samples: Samples) -> float | None:
    value = task.evaluate(decisions, samples).metrics[task.score]
    return float(value) if value == value else None
