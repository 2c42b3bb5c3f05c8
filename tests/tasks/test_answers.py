# SPDX-License-Identifier: Apache-2.0
"""Regression, several labels and survival: losses, decisions and metrics against written-down ones."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn

from medpfl.core.errors import ConfigError, DataError
from medpfl.data.preparation import Row
from medpfl.data.samples import Samples, SiteData
from medpfl.data.target import Target
from medpfl.models.conv1d import Conv1d
from medpfl.models.resnet import ResNet
from medpfl.tasks import MultiLabel, Regression, Survival
from medpfl.tasks.contract import Task
from medpfl.tasks.losses import BinaryCrossEntropy
from medpfl.tasks.losses.cox import cox as without_waiting
from medpfl.tasks.metrics.certainty import certainty_of
from medpfl.tasks.metrics.contract import at_threshold, threshold_for

NAN = float("nan")


def samples(targets: Any, shape: tuple[int, ...] = (2,)) -> Samples:
    known = torch.as_tensor(targets, dtype=torch.float32)
    count = len(known)
    inputs = torch.randn(count, *shape, generator=torch.Generator().manual_seed(0))
    return Samples(inputs, known, np.arange(count), [f"case {n}" for n in range(count)], known.shape[1:].numel())


def data(targets: Any, classes: list[str], shape: tuple[int, ...] = (2,)) -> SiteData:
    mine = samples(targets, shape)
    return SiteData({"train": mine, "validation": mine, "test": mine}, classes)


@pytest.mark.parametrize("task", [
    Regression(dataset="d"), MultiLabel(dataset="d"), Survival(dataset="d", horizons=(1.0,)),
])  # fmt: skip
def test_the_network_follows_from_the_data(task: Any) -> None:
    targets = {Target.VALUE: [1.0, 2.0], Target.LABELS: [[0, 1, 1], [1, 0, 1]], Target.SURVIVAL: [[1, 1], [2, 0]]}
    given = targets[task.target]
    classes = ["a", "b", "c"] if task.target is Target.LABELS else []
    outputs = 3 if task.target is Target.LABELS else 1
    for shape, changes in (((2,), {"hidden": (4,)}), ((2, 8), {}), ((1, 16, 16), {"size": (16, 16)})):
        mine = type(task)(**{**{"dataset": "d"}, **({"horizons": (1.0,)} if outputs == 1 and not classes and
                             task.target is Target.SURVIVAL else {}), **changes})  # fmt: skip
        here = data(given, classes, shape)
        found = mine.network(here)(here.splits["train"].inputs[:])
        assert found.shape == (2, outputs) and bool(torch.isfinite(mine.loss(found, here.splits["train"].targets[:])))
        assert mine.spec.forms == (("images",) if changes.get("size") else ("rows", "windows"))


@pytest.mark.parametrize(("kind", "changes", "words"), [
    (Regression, {"spread": 0}, "Regression's spread must be above 0"),
    (Regression, {"unit": "x" * 21}, "at most 20 printable characters"),
    (Regression, {"error": "cubic"}, "must be 'squared', 'absolute' or 'huber', got"),
    (Regression, {"score": "mea"}, "did you mean 'mae'"),
    (Regression, {"augment": "light"}, "are of images, which need a 'size'"),
    (Regression, {"size": [16, 16], "hidden": [4]}, "'hidden' is of the perceptron of rows"),
    (MultiLabel, {"score": "auc"}, "MultiLabel has no metric 'auc'"),
    (Survival, {"horizons": [5, 3]}, "horizons must be ascending times above 0, got [5.0, 3.0]"),
    (Survival, {"horizons": [n + 1.0 for n in range(101)]}, "takes at most 100 horizons, got 101"),
    (Survival, {"horizons": [3], "score": "brier_1"}, "the Brier score needs a baseline"),
    (Survival, {}, "argument 'horizons' of Survival is missing"),
])  # fmt: skip
def test_what_a_job_may_not_say(kind: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(dataset="d", **changes)
    assert words in str(caught.value)


def test_numbers_are_learnt_on_the_jobs_scale() -> None:
    task = Regression(dataset="d", centre=60.0, spread=10.0, unit="years")
    truth = torch.tensor([50.0, 60.0, 85.0])
    outputs = torch.tensor([[-1.0], [0.5], [2.0]])
    assert task.decide(outputs).tolist() == [50.0, 65.0, 80.0]
    assert float(task.loss(outputs, truth)) == pytest.approx((0 + 0.25 + 0.25) / 3)
    assert float(Regression(dataset="d", centre=60, spread=10, error="absolute").loss(outputs, truth)) == pytest.approx(
        1 / 3
    )
    huge = torch.tensor([[5.0]])
    assert float(Regression(dataset="d", error="huber").loss(huge, torch.zeros(1))) == pytest.approx(4.5)
    found = task.evaluate(task.decide(outputs), samples(truth)).metrics
    said, known = task.decide(outputs).numpy(), truth.numpy()
    assert found["mae"] == pytest.approx(sk.mean_absolute_error(known, said))
    assert found["rmse"] == pytest.approx(sk.root_mean_squared_error(known, said))
    assert found["r2"] == pytest.approx(sk.r2_score(known, said))
    assert {key: one.unit for key, one in task.measures.items()} == {"mae": "years", "rmse": "years", "r2": ""}
    assert [one.direction for one in task.measures.values()] == ["lower", "lower", "higher"]
    odd = task.evaluate(torch.tensor([NAN, 1.0, 1.0]), samples(truth)).metrics
    assert all(math.isnan(value) for value in odd.values())
    assert math.isnan(task.evaluate(torch.tensor([1.0, 2.0]), samples([3.0, 3.0])).metrics["r2"])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("error", ["squared", "absolute", "huber"])
def test_numbers_far_from_0_are_learnt_in_half_precision(half: torch.dtype, error: Any) -> None:
    task = Regression(dataset="d", centre=70000.0, spread=10.0, error=error)
    outputs, truth = torch.tensor([[-0.5], [0.25], [1.0]]), torch.tensor([70007.0, 69990.0, 70001.0])
    assert float(task.loss(outputs.to(half), truth)) == pytest.approx(float(task.loss(outputs, truth)))


def test_how_an_exported_models_number_follows_is_told_in_full() -> None:
    """With six digits 1234567.5 was 1.23457e+06, and who followed the text was off by 2.5."""
    task = Regression(dataset="d", centre=1234567.5, spread=0.12345678, unit="mg")
    assert task.reading == "0.12345678 times the output plus 1234567.5 (mg)"
    assert Regression(dataset="d", centre=5.0, spread=4).reading == "4 times the output plus 5"


def test_two_long_horizons_have_a_risk_each() -> None:
    """Of times in seconds, say: both were risk_3.15576e+07, and one was lost."""
    task = Survival(dataset="d", horizons=(31557600.0, 31557604.0), unit="seconds").after_fit((0.5, 0.25))
    told = task.answer(torch.tensor([0.0]), ())
    assert told == {"log_hazard_ratio": 0.0, "risk_31557600": 0.5, "risk_31557604": 0.75}
    assert "at 31557600, " in task.reading and "at 31557604 seconds" in task.reading  # type: ignore[attr-defined]


SAID = torch.tensor([[0.9, 0.2, 0.4], [0.6, 0.8, 0.3], [0.1, 0.7, 0.2], [0.4, 0.1, 0.3]])
TRUE = torch.tensor([[1, 0, NAN], [0, 1, NAN], [0, 0, NAN], [1, NAN, 1.0]])


def test_labels_that_are_not_known_do_not_count() -> None:
    task, some = MultiLabel(dataset="d"), samples(TRUE)
    outputs = SAID.logit().requires_grad_()
    loss = task.loss(outputs, TRUE)
    loss.backward()  # type: ignore[no-untyped-call]
    known = ~TRUE.isnan()
    assert loss.item() == pytest.approx(float(nn.functional.binary_cross_entropy(SAID[known], TRUE[known])))
    assert (
        outputs.grad is not None and bool((outputs.grad[~known] == 0).all()) and bool((outputs.grad[known] != 0).all())
    )
    nothing = BinaryCrossEntropy().of(outputs, torch.full((4, 3), NAN))
    assert nothing.item() == 0.0 and nothing.requires_grad
    found = task.evaluate(SAID, some).metrics
    true, said = TRUE.numpy(), SAID.numpy()
    first = sk.roc_auc_score(true[:, 0], said[:, 0])
    second = sk.roc_auc_score(true[:3, 1], said[:3, 1])
    assert found["macro_auc"] == pytest.approx((first + second) / 2)  # all known of the third are alike
    decided = said >= 0.5
    each = [sk.f1_score(true[:, 0], decided[:, 0]), sk.f1_score(true[:3, 1], decided[:3, 1]), 0.0]
    assert found["macro_f1"] == pytest.approx(float(np.mean(each)))
    assert found["exact_match"] == pytest.approx(1 / 4)  # the first case alone, whose third label nobody knows
    row: Row = task.told(SAID, some)[0]
    assert row == {"case": "case 0", "label_0": 1, "p_0": pytest.approx(0.9), "label_1": 0, "p_1": pytest.approx(0.2),
                   "label_2": "", "p_2": pytest.approx(0.4)}  # fmt: skip
    assert Target.LABELS.counts(TRUE, 3) == [2, 1, 1]
    assert all(math.isnan(value) for value in task.evaluate(SAID * NAN, some).metrics.values())


def test_patients_of_whom_no_label_is_known_make_no_score_surer() -> None:
    """With six patients the interval of a score left, although two of them alone are in it."""
    task = MultiLabel(dataset="d", score="exact_match")
    told = torch.rand(9, 3, generator=torch.Generator().manual_seed(0))
    for known, certain in ((2, False), (6, True)):
        truth = (told > 0.5).float()
        truth[0] = 1 - truth[0]
        truth[known:] = NAN
        sheet = task.sheet(told, samples(truth), task.metrics)
        assert sheet.patients == known and sheet.score == pytest.approx(1 - 1 / known)
        assert (certainty_of(sheet, None, task.measure, 2, "seed") is not None) == certain
    truth[:] = NAN
    assert math.isnan(task.sheet(told, samples(truth), task.metrics).score)


def test_the_threshold_of_labels_comes_from_validation() -> None:
    task, some = MultiLabel(dataset="d"), samples(TRUE)
    chosen = threshold_for(task.tested, SAID, some)
    every = [number / 20 for number in range(1, 20)]
    scores = {one: task.evaluate(SAID, some, at_threshold(task.tested, one)).metrics["macro_f1"] for one in every}
    best = max(scores.values())
    assert chosen == min((one for one in every if scores[one] == best), key=lambda one: abs(one - 0.5))
    assert chosen is not None and scores[chosen] > scores[0.5]
    assert threshold_for(task.tested, SAID * NAN, some) == 0.5


def test_of_cases_without_any_label_no_model_has_a_macro_f1() -> None:
    """A model that rightly said nothing had none, and so no mean in a comparison, and one that said something 0; and
    validation chose a threshold at which something is said."""
    task, none = MultiLabel(dataset="d"), samples(torch.zeros(4, 3))
    for said in (SAID, 0.1 * SAID):
        assert math.isnan(task.evaluate(said, none).metrics["macro_f1"])
    assert threshold_for(task.tested, torch.full((4, 3), 0.42), none) == 0.5


TIMES = torch.tensor([[1.0, 1], [2, 0], [3, 1], [4, 1], [5, 0], [6, 0]])
HAZARD = torch.tensor([1.2, 0.3, -0.4, 0.8, -1.0, 0.1])


def cox(hazard: Tensor, times: Tensor) -> Tensor:
    """Cox's partial likelihood as it is written down, without ties."""
    total = torch.zeros(())
    for row in range(len(times)):
        if times[row, 1]:
            at_risk = times[:, 0] >= times[row, 0]
            total = total - (hazard[row] - torch.logsumexp(hazard[at_risk], 0))
    return total / times[:, 1].sum()


@pytest.mark.parametrize("seed", range(6))
def test_the_loss_of_survival_that_no_gpu_is_waited_for_is_the_same(seed: int) -> None:
    """With tied events, tied times of others, and hazards of any size: the loss and its gradient."""
    generator = torch.Generator().manual_seed(seed)
    hazard = torch.randn(40, generator=generator) * (1, 5)[seed % 2]
    targets = torch.randint(0, 2, (40, 2), generator=generator).float()
    targets[:, 0] = torch.randint(1, (6, 1000, 30)[seed % 3], (40,), generator=generator)
    one, other = (hazard.clone().requires_grad_() for _ in range(2))
    expected = Survival(dataset="d", horizons=(2.5,)).loss(one[:, None], targets)
    found = without_waiting(other, targets[:, 0], targets[:, 1] > 0)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    expected.backward()  # type: ignore[no-untyped-call]
    found.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(other.grad, one.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [1, 0, 3, 2], [3, 2, 1, 0]])
def test_who_was_last_seen_when_an_event_came_was_at_risk(order: list[int]) -> None:
    """Wherever they stand in the batch: times of events and of others tied, no two events."""
    times, hazard = torch.tensor([[1.0, 0], [1, 1], [2, 0], [2, 1]])[order], HAZARD[:4][order]
    found = Survival(dataset="d", horizons=(2.5,)).loss(hazard[:, None], times)
    assert float(found) == pytest.approx(float(cox(hazard, times)))
    assert float(without_waiting(hazard, times[:, 0], times[:, 1] > 0)) == pytest.approx(float(found))


def test_the_same_without_events_with_one_case_and_with_what_is_no_number() -> None:
    for rows in ([1, 4, 5], [0]):
        hazard = HAZARD[rows].clone().requires_grad_()
        loss = without_waiting(hazard, TIMES[rows, 0], TIMES[rows, 1] > 0)
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(loss) == 0 and hazard.grad is not None and bool((hazard.grad == 0).all())
    for number in (NAN, math.inf):
        bad = HAZARD.clone()
        bad[4] = number
        assert math.isnan(float(without_waiting(bad, TIMES[:, 0], TIMES[:, 1] > 0)))


def test_the_loss_of_survival() -> None:
    task = Survival(dataset="d", horizons=(2.5,))
    mine, written = HAZARD[:, None].clone().requires_grad_(), HAZARD.clone().requires_grad_()
    one, other = task.loss(mine, TIMES), cox(written, TIMES)
    one.backward()  # type: ignore[no-untyped-call]
    other.backward()  # type: ignore[no-untyped-call]
    assert mine.grad is not None and written.grad is not None
    assert float(one) == pytest.approx(float(other)) and torch.allclose(mine.grad[:, 0], written.grad, atol=1e-6)
    # A batch without an event, or of one case, changes nothing; what is no number stays so.
    for rows in ([1, 4, 5], [0]):
        outputs = HAZARD[rows, None].clone().requires_grad_()
        loss = task.loss(outputs, TIMES[rows])
        loss.backward()  # type: ignore[no-untyped-call]
        assert float(loss) == 0 and outputs.grad is not None and bool((outputs.grad == 0).all())
    assert math.isnan(float(task.loss(torch.full((6, 1), NAN), TIMES)))


def test_the_baseline_is_breslows_and_gives_risks() -> None:
    task = Survival(dataset="d", horizons=(0.5, 2.5, 4.0), unit="months")
    fitted = task.fit_after(HAZARD, samples(TIMES))
    ratios, total, expected = HAZARD.exp().double(), 0.0, []
    for horizon in task.horizons:
        total = sum(float(1 / ratios[TIMES[:, 0] >= time].sum()) for time, event in TIMES if event and time <= horizon)
        expected.append(math.exp(-total))
    assert fitted[:3] == pytest.approx(expected, abs=1e-6) and fitted[0] == 1.0
    assert fitted[3:] == pytest.approx([-math.log(value) for value in expected])
    told = task.after_fit(fitted).answer(torch.tensor([0.7]), ())
    risk = 1 - expected[1] ** math.exp(0.7)
    assert told == pytest.approx({"log_hazard_ratio": 0.7, "risk_0.5": 0.0, "risk_2.5": risk, "risk_4":
                                  1 - expected[2] ** math.exp(0.7)}, abs=1e-5)  # fmt: skip
    assert task.answer(torch.tensor([0.7]), ()) == {"log_hazard_ratio": pytest.approx(0.7)}  # of a model given away
    assert "2.5" in task.after_fit(fitted).reading and "months" in task.after_fit(fitted).reading  # type: ignore[attr-defined]
    alive = torch.stack([TIMES[:, 0], torch.zeros(len(TIMES))], dim=1)
    assert task.fit_after(HAZARD, samples(alive)) == ()  # nobody had the event: there is nothing to fit


@pytest.mark.parametrize("shift", [-40.0, -4.0, 12.0, 40.0])
def test_risks_do_not_depend_on_where_the_ratios_lie(shift: float) -> None:
    """Cox's likelihood is the same. At -4 the baseline's survival was 0 in a model's file, and everybody's risk 1; at
    40 it was 1, and everybody's risk 0."""
    task = Survival(dataset="d", horizons=(2.5, 3.5), more_metrics=("integrated_brier", "brier_1"))
    some = samples(TIMES)
    moved = [task.after_fit(task.fit_after(HAZARD + far, some)).evaluate(HAZARD + far, some) for far in (0.0, shift)]
    assert moved[1].metrics == pytest.approx(moved[0].metrics, abs=1e-5)
    for here, there in zip(*(each.cases for each in moved), strict=True):
        assert {**here, "log_hazard_ratio": 0} == pytest.approx({**there, "log_hazard_ratio": 0}, abs=1e-5)
    told = task.after_fit(task.fit_after(HAZARD + shift, some)).reading  # type: ignore[attr-defined]
    risk = 1 - math.exp(-float(told.split("which is ")[1].split(" at 2.5")[0]) * math.exp(float(HAZARD[0]) + shift))
    assert risk == pytest.approx(moved[0].cases[0]["risk_2.5"], abs=1e-4)


def test_a_baseline_of_one_training_case_and_of_an_older_file() -> None:
    task = Survival(dataset="d", horizons=(0.5, 2.0))
    assert task.fit_after(torch.tensor([0.0]), samples([[1.0, 1]])) == (1.0, round(math.exp(-1), 8), 0.0, 1.0)
    old = task.after_fit((1.0, 0.0)).answer(torch.tensor([-2.0]), ())
    assert old == {"log_hazard_ratio": -2.0, "risk_0.5": 0.0, "risk_2": 1.0}


def test_the_metrics_of_survival() -> None:
    task: Task = Survival(dataset="d", horizons=(2.5, 3.5), more_metrics=("integrated_brier", "brier_1"))
    some = samples(TIMES)
    unfitted = task.evaluate(HAZARD, some).metrics
    assert math.isnan(unfitted["brier_1"]) and math.isnan(unfitted["integrated_brier"])
    task = task.after_fit((0.8, 0.6))
    found = task.evaluate(HAZARD, some).metrics
    pairs = [(i, j) for i in range(6) for j in range(6) if TIMES[i, 1] and TIMES[i, 0] < TIMES[j, 0]]
    right = np.mean([float(HAZARD[i] > HAZARD[j]) for i, j in pairs])
    assert found["c_index"] == unfitted["c_index"] == pytest.approx(right)
    # Graf's score at 2.5: of the first case with the censoring's survival at 1 (1), of the last four with that at 2.5.
    survival = 0.8 ** HAZARD.exp()
    seen = 1 - 1 / 5  # one of the five cases at risk at 2 was censored
    expected = (float(survival[0] ** 2) + float(((1 - survival[2:]) ** 2).sum()) / seen) / 6
    assert found["brier_1"] == pytest.approx(expected, abs=1e-5) and 0 < found["integrated_brier"] < 1
    assert task.measures["brier_1"].direction == "lower"
    nobody = samples([[1.0, 0], [2, 0]])
    assert all(math.isnan(value) for value in task.evaluate(HAZARD[:2], nobody).metrics.values())
    with pytest.raises(ConfigError, match="'integrated_brier' needs at least 2 horizons"):
        Survival(dataset="d", horizons=(1,), more_metrics=("integrated_brier",)).informed(data(TIMES, []))
    with pytest.raises(DataError, match="no training case has the event"):
        task.informed(data([[1.0, 0], [2, 0]], []))


def test_a_single_test_case_has_a_brier_score() -> None:
    task: Task = Survival(dataset="d", horizons=(1.0, 2.5), more_metrics=("integrated_brier", "brier_2"))
    found = task.after_fit((0.9, 0.8)).evaluate(torch.tensor([0.5]), samples([[5.0, 1]])).metrics
    each = [(1 - survival ** math.exp(0.5)) ** 2 for survival in (0.9, 0.8)]
    assert found["brier_2"] == pytest.approx(each[1]) and found["integrated_brier"] == pytest.approx(sum(each) / 2)
    assert math.isnan(found["c_index"])


def test_an_event_counts_as_censoring_was_just_before_it() -> None:
    """In whole years, two censored and one event at 1: the event was weighed as if the two had gone before it."""
    task: Task = Survival(dataset="d", horizons=(1.5,), more_metrics=("brier_1",)).after_fit((0.8,))
    times = [[1.0, 1], [1, 0], [1, 0], [2, 1], [2, 0], [3, 0]]
    survival = 0.8 ** HAZARD.exp()
    seen = 1 - 2 / 5  # of the five without the event at 1 two were censored there
    expected = (float(survival[0] ** 2) + float(((1 - survival[3:]) ** 2).sum()) / seen) / 6
    for unit in (1, 0.001):  # times may be small numbers
        scaled = dataclasses.replace(task, horizons=(1.5 * unit,)).after_fit((0.8,))  # type: ignore[call-arg]
        found = scaled.evaluate(HAZARD, samples([[unit * time, event] for time, event in times])).metrics
        assert found["brier_1"] == pytest.approx(expected, abs=1e-5)


def test_nobody_is_seen_beyond_a_horizon_at_which_all_were_last_seen() -> None:
    """In single precision, in which times are held, 0.6 is a little more than the job's 0.6."""
    for last in (0.5, 0.6, 0.7):
        task: Task = Survival(dataset="d", horizons=(0.2, last), more_metrics=("brier_1",)).after_fit((0.9, 0.8))
        found = task.evaluate(torch.zeros(4), samples([[0.1, 1], [0.3, 1], [last, 0], [last, 0]]))
        assert math.isnan(found.metrics["brier_1"])


def test_a_network_is_named_as_elsewhere() -> None:
    images = Regression(dataset="d", size=(16, 16), architecture=ResNet(width=2, depth=10), flips=(1,))
    assert images.spec.size == (16, 16) and not images.augments
    windows = MultiLabel(dataset="d", architecture=Conv1d((4,)))
    assert windows.network(data([[1, 0.0]], ["a", "b"], (2, 8)))(torch.zeros(1, 2, 8)).shape == (1, 2)
