# SPDX-License-Identifier: Apache-2.0
"""A metric, a loss, a network and a task of another package with a mistake: one sentence that names the class."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from medpfl.component import spec_of
from medpfl.core.errors import ConfigError
from medpfl.data.preparation import Spec
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import Target
from medpfl.models.contract import Architecture
from medpfl.tasks.contract import Task
from medpfl.tasks.inference import decide_samples
from medpfl.tasks.losses.contract import Loss, both
from medpfl.tasks.metrics.contract import CaseMetric, Metric
from medpfl.tasks.multi_label import MultiLabel
from medpfl.tasks.regression import Regression
from medpfl.tasks.segmentation import Segmentation
from medpfl.tasks.survival import Survival
from medpfl.tasks.tabular import Tabular

DECISIONS = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.5, 0.5]])
SAMPLES = Samples(torch.zeros(3, 1), torch.tensor([1, 0, 1]), np.arange(3), ["p1", "p2", "p3"], 2)


class Mine(Metric):
    name = "mine"

    def of_split(self, decisions: Tensor, samples: Samples) -> float:
        return 0.5


class OfCases(CaseMetric):
    name = "mine"

    def of_cases(self, decisions: Tensor, samples: Samples) -> list[float]:
        return [0.5] * len(samples.names)


def scored_by(metric: Metric) -> Tabular:
    kind = type("Scored", (Tabular,), {"metrics": (*Tabular.metrics, metric)})
    task: Tabular = dataclass(frozen=True)(kind)(dataset="blood")
    return task


def like(kind: type, **members: Any) -> Any:
    return type("Wrong", (kind,), members)()


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ({"name": None}, "Wrong must have a 'name' of 1 to 100 letters, got None"),
        ({"name": ""}, "Wrong must have a 'name' of 1 to 100 letters, got ''"),
        ({"name": "m" * 101}, "Wrong must have a 'name' of 1 to 100 letters, got 'mmm"),
        ({"name": 5}, "Wrong must have a 'name' of 1 to 100 letters, got 5"),
        ({"range": 5}, "metric 'mine': its range must be a least and a largest number, got 5"),
    ],
)
def test_a_metric_that_cannot_be_told_is_refused_when_the_task_is_made(members: dict[str, Any], said: str) -> None:
    """These ended in the first round, with an error of Python's or of the messages' types."""
    with pytest.raises(ConfigError, match=said):
        scored_by(like(Mine, **members))


@pytest.mark.parametrize(
    ("kind", "asked", "given", "said"),
    [
        (Mine, "of_split", lambda self, *given: None, "a number, got None"),
        (Mine, "of_split", lambda self, decisions, samples: decisions, r"a number, got tensor\("),
        (Mine, "of_split", lambda self, *given: np.array([0.5]), r"a number, got array\(\[0\.5\]\)"),
        (OfCases, "of_cases", lambda self, *given: [0.5], r"a list of 3 numbers, one a case, got \[0\.5\]"),
        (OfCases, "of_cases", lambda self, *given: 0.5, r"a list of 3 numbers, one a case, got 0\.5"),
        (OfCases, "of_cases", lambda self, *given: [None, 1.0, 1.0], "a number, got None"),
    ],
)
def test_a_metric_that_gives_something_else_is_named(
    kind: type, asked: str, given: Callable[..., Any], said: str
) -> None:
    with pytest.raises(ConfigError, match=f"metric 'mine': '{asked}' of Wrong must give {said}"):
        scored_by(like(kind, **{asked: given})).evaluate(DECISIONS, SAMPLES)


def test_numbers_of_torch_and_numpy_are_numbers() -> None:
    for found in (torch.tensor(0.25), np.float32(0.25), 0.25):
        task = scored_by(like(Mine, of_split=lambda self, *given, found=found: found))
        assert task.evaluate(DECISIONS, SAMPLES).metrics["mine"] == 0.25
    for each in (torch.full((3,), 0.25), np.full(3, 0.25), (0.25,) * 3):
        task = scored_by(like(OfCases, of_cases=lambda self, *given, each=each: each))
        found = task.evaluate(DECISIONS, SAMPLES)
        assert found.metrics["mine"] == 0.25 and [case["mine"] for case in found.cases] == [0.25] * 3


def test_a_metric_of_cases_does_not_take_the_place_of_their_names() -> None:
    """The list of cases had its values where the cases' names belong, in silence."""
    with pytest.raises(ConfigError, match="metric 'case': the list of cases has such a column already: rename it"):
        scored_by(like(OfCases, name="case")).evaluate(DECISIONS, SAMPLES)


@dataclass(frozen=True)
class OurLoss(Loss):
    answers: ClassVar[tuple[Target, ...]] = (Target.CLASS,)

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(both(outputs), targets.long())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda loss: loss.repeat(2), r"a tensor of one number, the loss; it gives a tensor of the shape \[2\]"),
        (lambda loss: loss.item(), r"a tensor of one number, the loss; it gives 0\.\d+"),
        (lambda loss: None, "a tensor of one number, the loss; it gives None"),
        (lambda loss: loss.detach(), None),
    ],
)
def test_a_loss_that_nothing_can_be_trained_with_is_named(change: Callable[[Tensor], Any], said: str | None) -> None:
    wrong = like(OurLoss, of=lambda self, outputs, targets: change(OurLoss().of(outputs, targets)))
    outputs, targets = torch.zeros(3, 1, requires_grad=True), torch.tensor([1, 0, 1])
    sentence = f"must give {said}" if said else "gives a number that does not depend on the network's outputs any more"
    with pytest.raises(ConfigError, match=f"'of' of Wrong {sentence}"):
        wrong(outputs, targets)
    if said is None:
        with torch.no_grad():
            assert wrong(outputs, targets) == OurLoss()(outputs, targets)  # nothing is trained


def test_a_loss_says_what_it_is_for() -> None:
    with pytest.raises(ConfigError, match="Wrong has no 'answers': the kinds of answers it can be computed of"):
        Tabular(dataset="blood", loss=like(OurLoss, answers=()))


class NoLoss(Loss):
    """Not a dataclass."""

    answers = (Target.CLASS,)

    def of(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return OurLoss().of(outputs, targets)


class NoNetwork(Architecture):
    """Not a dataclass."""

    def build(self, input_shape: tuple[int, ...], outputs: int) -> nn.Module:
        return nn.Linear(input_shape[0], outputs)


@pytest.mark.parametrize("component", [NoLoss(), NoNetwork()])
def test_a_component_that_is_no_dataclass_cannot_be_written_down(component: Loss | Architecture) -> None:
    """A job with it ended in json's words: "Object of type ... is not JSON serializable"."""
    for asked in (component, [component]):
        with pytest.raises(ConfigError, match=r"must be a frozen dataclass \(@dataclass\(frozen=True\)\), and is none"):
            spec_of(asked) if asked is component else spec_of(Holds(parts=asked))


@dataclass(frozen=True)
class Holds:
    """Something with components in it."""

    parts: Any


def decided(kind: type[Task], change: Callable[[Tensor], Any], targets: Tensor, outputs: int, **args: Any) -> Tensor:
    """What a task says of three samples whose ``decide`` makes something else of its parent's decisions."""
    task = dataclass(frozen=True)(type("Wrong", (kind,), {"decide": lambda self, found: change(found)}))(**args)
    samples = Samples(torch.zeros(3, 2, 4, 4), targets, np.arange(3), ["p1", "p2", "p3"], 2)
    network = nn.Conv2d(2, outputs, 1) if kind is Segmentation else nn.Sequential(nn.Flatten(), nn.Linear(32, outputs))
    return decide_samples(task, network, samples, torch.device("cpu"))


@pytest.mark.parametrize(
    ("kind", "change", "outputs", "args", "said"),
    [
        (Regression, lambda found: found, 1, {}, r"\[3\], one number a case, got a tensor of the shape \[3, 1\]"),
        (Regression, lambda found: found.mean(), 1, {}, r"\[3\], one number a case, got a tensor of the shape \[\]"),
        (Regression, lambda found: found.tolist(), 1, {}, r"\[3\], one number a case, got a list"),
        (Survival, lambda found: found, 1, {"horizons": (1.0,)}, r"\[3\], the time until .*, got .* \[3, 1\]"),
        (MultiLabel, lambda found: found[:, 0], 2, {}, r"\[3, 2\], for each label .*, got .* \[3\]"),
        (Tabular, lambda found: found.argmax(dim=1), 2, {}, r"\[3, 2\], one class a case, got .* \[3\]"),
        (Segmentation, lambda found: found, 2, {}, r"\[3, 4, 4\], a class for every .*, got .* \[3, 2, 4, 4\]"),
    ],
)
def test_decisions_of_another_shape_are_named(
    kind: type[Task], change: Callable[[Tensor], Any], outputs: int, args: dict[str, Any], said: str
) -> None:
    """Of numbers N x 1 every error was that of all pairs of cases, in silence, until the hospital's page could not be
    written after the last round; the others ended in an error of Python's."""
    with pytest.raises(ConfigError, match=f"'decide' of Wrong must give a tensor of the shape {said}"):
        decided(kind, change, torch.zeros(3), outputs, dataset="ward", **args)


@dataclass(frozen=True)
class Grade(Task):
    """Derived from ``Task`` itself, as CONTRIBUTING has it."""

    dataset: str
    target: Target = Target.CLASS
    score: str = "mine"
    metrics: ClassVar[tuple[Metric, ...]] = (Mine(),)

    @property
    def spec(self) -> Spec:
        return Spec(self.target, ("rows",))

    def network(self, data: SiteData) -> nn.Module:
        return nn.Linear(1, 2)

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return outputs.mean()

    def decide(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(dim=1)


def test_an_own_task_of_classes_tells_the_same_of_cases_as_ours() -> None:
    """It told their names alone, so every run of a comparison trained to its end and failed with KeyError."""
    found = Grade(dataset="blood").evaluate(DECISIONS, SAMPLES).cases
    assert found == Tabular(dataset="blood").evaluate(DECISIONS, SAMPLES).cases
    assert [row["predicted"] for row in found] == [1, 0, 0]
    assert found[0]["probability"] == pytest.approx(0.7)


def test_an_own_task_of_labels_tells_the_same_of_cases_as_ours() -> None:
    targets = torch.tensor([[1.0, 0.0], [0.0, float("nan")], [1.0, 1.0]])
    samples = Samples(SAMPLES.inputs, targets, SAMPLES.case, SAMPLES.names, 2)
    found = Grade(dataset="blood", target=Target.LABELS).evaluate(DECISIONS, samples).cases
    assert found == MultiLabel(dataset="blood").evaluate(DECISIONS, samples).cases
    assert (found[1]["label_1"], found[1]["p_0"]) == ("", pytest.approx(0.6))
