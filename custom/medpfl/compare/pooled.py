# SPDX-License-Identifier: Apache-2.0
"""Pooled: one model trained where all hospitals' data are. Only a comparison on one machine does this.

It is local training at a single hospital that holds the training samples of all of them, each prepared at its own
hospital as for every other method. Its round is chosen as everybody's: by the unweighted mean of the hospitals'
validation scores. With one hospital it is local training, bit for bit.
"""

import dataclasses
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from medpfl.core.devices import training_device
from medpfl.core.errors import ConfigError
from medpfl.core.repeatable import repeatable
from medpfl.data.declared import SPLITS, StorageRule
from medpfl.data.meaning import other_inputs
from medpfl.data.preparation import Spec
from medpfl.data.samples import Budget, Samples, SiteData, joined_rows
from medpfl.data.site_file import SiteFile, read_for_study
from medpfl.deployed.evaluate import Origin, evaluate_test, save_deployed
from medpfl.deployed.model_file import load_deployed
from medpfl.job import Job
from medpfl.results.schema import FinalLine, number
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from medpfl.tasks.contract import Evaluation, Task
from medpfl.tasks.metrics.contract import Metric, at_threshold, threshold_for

SITE = MODEL = "pooled"


@dataclass(frozen=True)
class Together(Task):
    """A task on the data of several hospitals; its scores are the mean of the hospitals' own."""

    task: Task
    _parts: dict[str, SiteData] = field(default_factory=dict, init=False, repr=False, compare=False)
    _splits: dict[str, Samples] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def dataset(self) -> str:  # type: ignore[override]
        return self.task.dataset

    @property
    def score(self) -> str:  # type: ignore[override]
        return self.task.score

    @property
    def metrics(self) -> tuple[Metric, ...]:  # type: ignore[override]
        return self.task.metrics

    @property
    def more_metrics(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.task.more_metrics

    @property
    def spec(self) -> Spec:
        return self.task.spec

    def hold(self, parts: Mapping[str, SiteData]) -> "Together":
        """Take the hospitals' data.

        Raises:
            ConfigError: the hospitals' inputs differ in shape, or in what their entries mean.
        """
        self._parts.update(parts)
        shapes = {site: list(data.input_shape) for site, data in parts.items()}
        first = next(iter(shapes))
        for site, shape in shapes.items():
            if shape != shapes[first]:
                raise ConfigError(
                    f"Pooled: inputs at {site} have the shape {shape}, at {first} {shapes[first]}; data of different "
                    "shapes cannot be pooled"
                )
        for site, data in parts.items():
            if differs := other_inputs(data.meaning, f"{site}'s", parts[first].meaning, f"{first}'s"):
                raise ConfigError(f"Pooled: {differs}")
        if any(data.splits["train"].annotated is not None for data in parts.values()):
            raise ConfigError(
                "Pooled: some hospitals annotate only some of the classes; their data cannot be pooled, leave it out"
            )
        self._splits.update({split: _joined([data.splits[split] for data in parts.values()]) for split in SPLITS})
        return self

    @property
    def train(self) -> Samples:
        return self._splits["train"]

    def load(self, site_file: SiteFile) -> SiteData:
        return SiteData(self._splits, next(iter(self._parts.values())).class_names)

    def informed(self, data: SiteData) -> "Together":
        mine = Together(self.task.informed(data))
        mine._parts.update(self._parts)
        mine._splits.update(self._splits)
        return mine

    def network(self, data: SiteData) -> nn.Module:
        return self.task.network(data)

    def order(self, samples: Samples, generator: torch.Generator) -> Tensor:
        return self.task.order(samples, generator)

    def present(self, samples: Samples, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        return self.task.present(samples, chosen, generator)

    @property
    def augments(self) -> bool:
        return self.task.augments

    @property
    def shows_as_they_are(self) -> bool:
        return self.task.shows_as_they_are

    def infer(self, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        return self.task.infer(forward, inputs)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(outputs, targets)

    def decide(self, outputs: Tensor) -> Tensor:
        return self.task.decide(outputs)

    def metric(self, name: str) -> Metric:
        return self.task.metric(name)

    def evaluate(self, decisions: Tensor, samples: Samples, metrics: Sequence[Metric] | None = None) -> Evaluation:
        split = next(name for name, mine in self._splits.items() if mine is samples)
        parts = [data.splits[split] for data in self._parts.values()]
        given = self.task.tested if metrics is None else metrics
        found = []
        for mine, part in zip(torch.split(decisions, [int(part.entries.sum()) for part in parts]), parts, strict=True):
            # Elsewhere each hospital's validation cases choose the threshold, and the round by what they score at it.
            threshold = threshold_for(given, mine, part) if split == "validation" else None
            found.append(self.task.evaluate(mine, part, at_threshold(given, threshold)).metrics)
        return Evaluation({name: _mean([metrics[name] for metrics in found]) for name in found[0]})


def _mean(values: list[float]) -> float:
    known = [value for value in values if np.isfinite(value)]
    return float(np.mean(known)) if known else float("nan")


def _joined(parts: list[Samples]) -> Samples:
    """The samples of all parts in their order; decoded data beyond the usual budget go into a file."""
    budget = Budget(StorageRule(), Path())
    inputs = joined_rows([part.inputs for part in parts], budget)
    targets = joined_rows([part.targets for part in parts], budget)
    case, names = [], list[str]()
    for part in parts:
        case.append(part.case + len(names))
        names += part.names
    return Samples(inputs, targets, np.concatenate(case), names, parts[0].classes)


def train_pooled(
    job: Job, parts: Mapping[str, SiteData], site_file: Path, folder: Path, test: bool = True
) -> tuple[Coordinator, list[FinalLine]]:
    """Train on all ``parts`` together, and leave every hospital the model as if it had taken part.

    Args:
        job: of the method ``Pooled``, with the hospitals' own task.
        site_file: any hospital's.
        folder: gets ``results`` and, under ``home``, each hospital's models.
        test: False: no test set is read and no model is kept.

    Returns:
        The coordinator, and the lines of the test: one a choice of round and hospital.
    """
    together = Together(job.task).hold(parts)
    alone = dataclasses.replace(job, min_clients=1, task=together)
    home = folder / SITE
    coordinator = simulate(
        alone, {SITE: site_file}, folder / "results", home, read=lambda path, _: read_for_study(path), test=test
    )
    lines, device = [], training_device()
    for choice in ("best", "last") if test else ():
        model = load_deployed(home / SITE / job.name / "models" / f"{MODEL}-{choice}.safetensors")
        assert model.meta.history is not None
        round_number = model.meta.history.round
        for site, data in parts.items():
            with repeatable(device), model.on(device) as networks:
                tested = evaluate_test(job.method, MODEL, networks, job.task, data, device)
            origin = Origin(job.name, site, MODEL, choice, round_number)
            trained = SiteData({**data.splits, "train": together.train}, data.class_names, data.preparation)
            place = folder / "home" / site / job.name / "models"
            save_deployed(place, origin, job.method, MODEL, model.networks, job.task, trained, 1, tested)
            metrics = {name: number(value) for name, value in tested[0].metrics.items()}
            lines.append(FinalLine(site=site, model=MODEL, round=round_number, metrics=metrics, choice=choice))
    shutil.rmtree(home)
    return coordinator, lines
