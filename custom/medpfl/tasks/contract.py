# SPDX-License-Identifier: Apache-2.0
"""What a task is: how declared data become samples, and what network, loss and metrics go with them."""

import dataclasses
import difflib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from pydantic import JsonValue
from torch import Tensor, nn

from medpfl.component import build, import_named
from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError
from medpfl.data.fingerprint import Fingerprint, Planned
from medpfl.data.kinds import read_preparation
from medpfl.data.preparation import NewCase, Row, Spec
from medpfl.data.rows import take
from medpfl.data.samples import Samples, SiteData
from medpfl.data.site_file import SiteFile
from medpfl.data.target import Target
from medpfl.models.auto import Auto
from medpfl.models.by_hospital import OwnChoice
from medpfl.models.contract import Architecture
from medpfl.tasks.case_rows import rows_of
from medpfl.tasks.losses.contract import Loss
from medpfl.tasks.metrics.constant import one_answer
from medpfl.tasks.metrics.contract import CaseMetric, Metric
from medpfl.tasks.metrics.digits import rounded
from medpfl.tasks.metrics.measure import Measure
from medpfl.tasks.metrics.sheet import Sheet, sheet_of, sheet_of_cases


@dataclass(frozen=True)
class Evaluation:
    """Metrics of one model on one split.

    Attributes:
        metrics: metric name to its value; NaN where it is not defined (AUC with one class).
        cases: one row a case with its own metrics or prediction; stays at the hospital.
        threshold: that validation chose and the metrics use; None where they use none.
        one_answer: whether every sample was given the same class though there are several (``metrics.constant``).
        fitted: what the task fitted for the model (``Task.fit_after``).
        sheet: what the score of any resample of the patients follows from; stays at the hospital. Of tests only.
    """

    metrics: dict[str, float]
    cases: list[Row] = field(default_factory=list)
    threshold: float | None = None
    one_answer: bool = False
    fitted: tuple[float, ...] = ()
    sheet: Sheet | None = field(default=None, repr=False, compare=False)


class Task(Checked):
    """A frozen dataclass whose fields are the job's arguments; ``dataset`` names a dataset the site file declares."""

    dataset: str
    score: str
    """Name of the metric that chooses the best round."""
    metrics: ClassVar[tuple[Metric, ...]]
    """By these every validation and every test scores."""
    more_metrics: tuple[str, ...] = ()
    """Names of further ones, by which tests score too; in our tasks it is a field."""
    by_batch: ClassVar[bool] = False
    """Whether the loss of a case depends on the other cases of its batch, so that no case has a gradient of its own."""

    fits_after: ClassVar[bool] = False
    """Whether a deployed model needs something of its hospital's training part before it can answer."""

    def __post_init__(self) -> None:
        for metric in (*self.metrics, *self.offered):
            metric.check()
        for name in (self.score, *self.more_metrics):
            self.metric(name)
        for metric in self.tested:
            _ = metric.measure  # it refuses what cannot be told of it

    @property
    def offered(self) -> tuple[Metric, ...]:
        """What ``score`` and ``more_metrics`` may name beside ``metrics``."""
        return ()

    def metric(self, name: str) -> Metric:
        """The metric of that name.

        Raises:
            ConfigError: the task has none.
        """
        known = {metric.name: metric for metric in self.metrics}
        known |= {metric.name: metric for metric in self.offered if metric.name not in known}
        if name not in known:
            meant = difflib.get_close_matches(name, known, 1)
            raise ConfigError(
                f"{type(self).__name__} has no metric '{name}'"
                f"{f'; did you mean {meant[0]!r}?' if meant else ''}; its metrics are: {', '.join(known) or 'none'}"
            )
        return known[name]

    @property
    def watched(self) -> tuple[Metric, ...]:
        """What every validation scores by: ``metrics`` and, where it is another, the score. The others may take longer
        than a small hospital's round."""
        return self._with(self.score)

    @property
    def tested(self) -> tuple[Metric, ...]:
        """What tests score by: all that the job names."""
        return self._with(self.score, *self.more_metrics)

    def _with(self, *names: str) -> tuple[Metric, ...]:
        every = {metric.name: metric for metric in self.metrics}
        return tuple({**every, **{name: self.metric(name) for name in names}}.values())

    @property
    def measure(self) -> Measure:
        """Which scores are better, and their unit."""
        return self.metric(self.score).measure

    @property
    def measures(self) -> dict[str, Measure]:
        """The same of every metric, by its name."""
        return {metric.name: metric.measure for metric in self.tested}

    def at(self, site: str) -> "Task":
        """The task as this hospital does it: with its own network, where the job gives hospitals different ones."""
        architecture = getattr(self, "architecture", None)
        if not isinstance(architecture, Architecture):
            return self
        return dataclasses.replace(self, architecture=architecture.at(site))  # type: ignore[type-var]

    @property
    def named_hospitals(self) -> Collection[str]:
        """Hospitals that its network's arguments name; it is told where no hospital of a run has such a name."""
        architecture = getattr(self, "architecture", None)
        return architecture.named_hospitals if isinstance(architecture, Architecture) else ()

    def chosen(self, site_file: SiteFile) -> "Task":
        """The task with the network of the hospital's own choice, where the job leaves it to hospitals.

        Raises:
            SiteFileError: the site file names none for the dataset, or one that cannot be used.
        """
        if not isinstance(getattr(self, "architecture", None), OwnChoice):
            return self
        spec = site_file.network(self.dataset)
        import_named(spec)
        try:
            network = build(spec, Architecture, "the network")
            if network.differs:
                raise ConfigError(f"expected one network, got {network}")
            return dataclasses.replace(self, architecture=network)  # type: ignore[type-var]
        except ConfigError as error:
            raise site_file.unusable_network(self.dataset, error) from error

    def informed(self, data: SiteData) -> "Task":
        """The task as this hospital trains it, which may weigh classes by its own counts.

        What it learns of the data is no argument: it is in no configuration, and no message holds it.

        Raises:
            ConfigError: the task's loss or one of its metrics does not fit the data.
        """
        for metric in self.tested:
            metric.suits(data)
        loss = getattr(self, "loss")  # noqa: B009 (to mypy, a method)
        if not isinstance(loss, Loss):
            return self
        train = data.splits["train"]
        counts = self.spec.target.counts(train.targets[:], train.classes) if self.spec.target is Target.CLASS else None
        return dataclasses.replace(self, loss=loss.informed(data.class_names, counts))  # type: ignore[type-var]

    @property
    def to_be_planned(self) -> bool:
        """Whether its network is planned when the job starts, from what the hospitals' data are like (``Auto``)."""
        return isinstance(getattr(self, "architecture", None), Auto)

    def plan(self, hospitals: Sequence[Fingerprint]) -> Planned:
        """A plan for these hospitals' data.

        Raises:
            ConfigError: there is none for them, or for such a task.
        """
        raise ConfigError(f"{type(self).__name__} has no network that could be planned")

    def as_planned(self, plan: Planned) -> "Task":
        """The task with what was planned.

        Raises:
            ConfigError: the plan does not fit it.
        """
        raise ConfigError(f"{type(self).__name__} has no network that could be planned")

    @property
    def networks_differ(self) -> bool:
        """Whether hospitals have different networks, whose weights cannot be averaged."""
        architecture = getattr(self, "architecture", None)
        return isinstance(architecture, Architecture) and architecture.differs

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """What the task wants of its dataset."""

    def load(self, site_file: SiteFile) -> SiteData:
        """Read the hospital's data.

        Raises:
            SiteFileError: the dataset is not declared or of the wrong kind.
            DataError: the data are not as declared.
        """
        return site_file.load(self.dataset, self.spec)

    def order(self, samples: Samples, generator: torch.Generator) -> Tensor:
        """The numbers of the training samples that one pass over them takes, in their order: by default each once.
        Every pass takes as many.

        Args:
            generator: the order is drawn from it, and nothing else.
        """
        return torch.randperm(len(samples), generator=generator)

    def strata(self, samples: Samples) -> list[Tensor]:
        """Numbers of samples, in groups of which training draws each as often as the others: by default one of all.
        The mean of the groups' losses is then, of whatever split, the loss that training descends."""
        return [torch.arange(len(samples))]

    def present(self, samples: Samples, chosen: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """What the networks see in one training step: by default the samples as they are.

        Args:
            chosen: B numbers of samples.
            generator: for whatever is drawn. It depends on the job's seed, the hospital, the round and the step alone,
                so that all models of a round see the same; the order of the samples is drawn from another one.

        Returns:
            Inputs, B x ... float32, and targets, B x ..., copies on the CPU.
        """
        return take(samples.inputs, chosen), take(samples.targets, chosen)

    @property
    def augments(self) -> bool:
        """Whether ``present`` changes samples at random: what it gave is then kept for the round's other networks."""
        return False

    @property
    def shows_as_they_are(self) -> bool:
        """Whether ``present`` gives samples of one shape as they are, so that they may lie on a GPU."""
        return type(self).present is Task.present

    def infer(self, forward: Callable[[Tensor], Tensor], inputs: Tensor) -> Tensor:
        """What a network says of whole samples: by default ``forward(inputs)``.

        Args:
            forward: the network, in evaluation mode: B x ... to B x ...
            inputs: B x ..., on the network's device; of samples that differ in shape one whole case.
        """
        return forward(inputs)

    @abstractmethod
    def network(self, data: SiteData) -> nn.Module:
        """A new network; its weights come from torch's global generator, which the caller seeds."""

    @abstractmethod
    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Scalar training loss of a batch; ``outputs`` are the network's. In our tasks it is a field, a ``Loss``."""

    def importance(self, targets: Tensor) -> Tensor | None:
        """How much each sample of a batch counts in its loss, B, >= 0; None, as by default: all alike."""
        loss = getattr(self, "loss")  # noqa: B009 (to mypy, a method)
        return loss.importance(targets) if isinstance(loss, Loss) else None

    @abstractmethod
    def decide(self, outputs: Tensor) -> Tensor:
        """What is kept of a batch's outputs for evaluation, N x ..., as ``Target`` has it."""

    def fit_after(self, decisions: Tensor, samples: Samples) -> tuple[float, ...]:
        """Where ``fits_after``: what a deployed model needs, from its decisions about the training samples. It is kept
        in the model's file, which stays at the hospital."""
        return ()

    def after_fit(self, values: Sequence[float]) -> "Task":
        """The task as it answers for the model for which it fitted these values."""
        return self

    @property
    def reading(self) -> str:
        """How a number, or a time, follows from a network's outputs, for users of exported models."""
        return "only the task knows how it follows from the outputs"

    def answer(self, decisions: Tensor, class_names: Sequence[str]) -> dict[str, str | float]:
        """What people are told of a new case, by column of predictions.csv; not asked for masks, which are written.

        Args:
            decisions: about its samples, N x ...; a recording's windows count alike.
        """
        mean = decisions.double().mean(dim=0)
        if self.spec.target is Target.VALUE:
            return {"predicted": rounded(float(mean))}
        shares = {f"p_{name}": round(share, 6) for name, share in zip(class_names, mean.tolist(), strict=True)}
        if self.spec.target is Target.LABELS:
            return {**shares}
        return {"predicted": class_names[int(mean.argmax())], **shares}

    def new_cases(self, path: Path, saved: Mapping[str, JsonValue]) -> Iterator[NewCase]:
        """Cases to predict: a file or folder without a site file, prepared as the training data were.

        Args:
            saved: ``SiteData.preparation`` of the training data as JSON; a model's file has it.

        Raises:
            DataError: a file cannot be read, with the file, expected and got; or ``saved`` says too little.
        """
        return read_preparation(saved, self.spec, path).new_cases(path, self.spec)

    def structures(self, classes: int) -> list[tuple[int, ...]]:
        """Of a task that segments, the labels of each structure whose Dice counts: by default each class but the first
        by itself."""
        return [(number,) for number in range(1, classes)]

    def told(self, decisions: Tensor, samples: Samples) -> list[Row]:
        """What is told of each of ``samples.names`` beside the metrics of cases: by default what ``rows_of`` tells."""
        return rows_of(self.spec.target, decisions, samples)

    def evaluate(self, decisions: Tensor, samples: Samples, metrics: Sequence[Metric] | None = None) -> Evaluation:
        """Metrics of the decisions about a non-empty split; by default all that are ``tested``."""
        cases = self.told(decisions, samples)
        values: dict[str, float] = {}
        for metric in self.tested if metrics is None else metrics:
            if isinstance(metric, CaseMetric):
                each = metric.values_of(decisions, samples)
                if any(metric.name in case for case in cases):
                    raise ConfigError(f"metric '{metric.name}': the list of cases has such a column already: rename it")
                cases = [{**case, metric.name: value} for case, value in zip(cases, each, strict=True)]
                values[metric.name] = float(np.mean(each))
            else:
                values[metric.name] = metric.value_of(decisions, samples)
        return Evaluation(values, cases, one_answer=one_answer(decisions, samples, self.spec.target))

    def sheet(self, decisions: Tensor, samples: Samples, metrics: Sequence[Metric], cases: Sequence[Row] = ()) -> Sheet:
        """What is kept of decisions about a non-empty split so that the score of any resample follows.

        Args:
            metrics: the score is among them, at its threshold, if it has one.
            cases: of the split's evaluation, which hold the score's values already, if it is a metric of cases.
        """
        metric = next(one for one in metrics if one.name == self.score)
        if isinstance(metric, CaseMetric) and cases:
            return sheet_of_cases(metric, [float(case[metric.name]) for case in cases], samples)
        return sheet_of(metric, decisions, samples)
