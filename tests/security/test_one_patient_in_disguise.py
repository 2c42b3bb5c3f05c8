# SPDX-License-Identifier: Apache-2.0
"""A job takes enough patients a round for every hospital's policy, one a step, and is set up so that what leaves is
one patient's gradient all the same: what the others' steps did is taken back, or counts next to nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from answers import declare
from baselines import begin, play
from medpfl.core.errors import ConfigError, PolicyRefused
from medpfl.core.mixers import AttentiveMessages, Mean, Mixer
from medpfl.methods.contract import Method
from medpfl.methods.effective_samples import EffectiveSamples
from medpfl.methods.fedamp import FedAMP
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedprox import FedProx
from medpfl.methods.optimizers import Adam, AdamW, Sgd
from medpfl.methods.per_fedavg import PerFedAvg
from medpfl.methods.schedules import Polynomial, StepDown, WarmUp
from medpfl.rounds.hospital import policy
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.tasks.losses import BinaryCrossEntropy, CrossEntropy, Focal
from medpfl.tasks.multi_label import MultiLabel
from medpfl.tasks.survival import Survival
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job, write_table_sites

ONE_PASS = FedAvg(epochs=1, batch_size=8, lr=0.1, optimizer="sgd")
MANY: dict[str, Any] = {"steps": 20, "batch_size": 1, "lr": 0.1, "optimizer": "sgd"}
NEAR = "in this job few of them have nearly all the weight"


def started(folder: Path, method: Method, task: Tabular | None = None) -> tuple[Any, dict[str, SiteRunner]]:
    slots: dict[str, Mixer] = {"fedavg": Mean()} if type(method) is FedAvg else {"model": Mean()}
    if isinstance(method, FedAMP):
        slots = {"anchor": AttentiveMessages(alpha=0.1, sigma=1.0)}
    job = small_job(mixers=slots, method=method, task=task, min_clients=1)
    return begin(job, write_table_sites(folder / "sites", ["anna", "berta"]), folder / "run")


@pytest.mark.parametrize(
    "method",
    [
        FedProx(mu=10, **MANY),  # lr mu = 1: every step goes back to the start
        FedProx(mu=1e12, **MANY),  # the first one grows beyond all others
        FedAMP(mu=10, **MANY),
        FedAvg(**{**MANY, "optimizer": Sgd(weight_decay=10)}),
        FedAvg(**{**MANY, "optimizer": AdamW(weight_decay=10)}),
        FedProx(mu=1e-3, **{**MANY, "lr": 1e9, "optimizer": Adam(betas=(0, 0), eps=1e9, weight_decay=1)}),
        FedAvg(**MANY, schedule=Polynomial(power=1e6)),
        FedAvg(**MANY, schedule=StepDown(at=(0.02,), by=1e-9)),
        FedAvg(**MANY, schedule=WarmUp(rounds=1e-9, start=1.0, then=Polynomial(power=1e6))),
    ],
    ids=lambda method: f"{type(method).__name__} {getattr(method, 'mu', '')} {type(method.schedule).__name__}",
)
def test_one_step_of_many_is_left(tmp_path: Path, method: Method) -> None:
    coordinator, runners = started(tmp_path, method)
    with pytest.raises(PolicyRefused, match=rf"\('least_update'\).*at least 8.*{NEAR}"):
        play(coordinator, runners, 1)


def test_what_the_attack_would_have_got(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the rule: the update of twenty patients is the last one's gradient, and no other's."""
    monkeypatch.setattr(policy, "EVEN", 0.0)
    coordinator, runners = started(tmp_path, FedProx(mu=10, **MANY))
    sent_first = coordinator.rounds.train_messages(1, ["anna"])["anna"].slots["model"]
    before = {key: one.clone() for key, one in sent_first.items()}
    task, data = runners["anna"].task, runners["anna"].data.splits["train"]
    shown: list[tuple[torch.Tensor, torch.Tensor]] = []
    present = type(task).present

    def seen(self: Any, samples: Any, chosen: torch.Tensor, generator: torch.Generator) -> Any:
        batch = present(self, samples, chosen, generator)
        if samples is data:
            shown.append(batch)
        return batch

    monkeypatch.setattr(type(task), "present", seen)
    sent = play(coordinator, runners, 1)["anna"]["model"]
    update = {key: sent[key] - before[key] for key in sent}
    model = runners["anna"].models["model"]
    model.load_state_dict({key.partition(".")[2]: value for key, value in before.items()})
    assert len(shown) == 20
    inputs, targets = shown[-1]
    model.zero_grad()
    task.loss(model(inputs), targets).backward()
    gradient = torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])
    flat = torch.cat([update[f"model.{key}"].flatten() for key, _ in model.named_parameters()])
    assert float(torch.cosine_similarity(flat, -gradient, dim=0)) > 0.95


def test_a_class_that_one_patient_has_weighs_all(tmp_path: Path) -> None:
    """Weights of classes: what counts is the rare one's, of whom there is one."""
    files = write_table_sites(tmp_path / "sites", ["anna", "berta"])
    task = Tabular(dataset="blood", hidden=(4,), loss=CrossEntropy(weights=(1.0, 1e-6)))
    method = FedAvg(epochs=1, batch_size=24, lr=0.1, optimizer="sgd")
    job = small_job(mixers={"fedavg": Mean()}, method=method, task=task, min_clients=1)
    coordinator, runners = begin(job, files, tmp_path / "run")
    targets = runners["anna"].data.splits["train"].targets
    assert isinstance(targets, torch.Tensor)
    targets[:] = 1
    targets[3] = 0
    with pytest.raises(PolicyRefused, match=NEAR):
        play(coordinator, runners, 1)


def test_of_several_labels_patients_of_whom_none_is_known_do_not_count(tmp_path: Path) -> None:
    """The loss leaves them out: the update is of the three patients of whom a label is known."""
    files = {site: declare(tmp_path / "sites", site, "several") for site in ("anna", "berta")}
    job = small_job(mixers={"fedavg": Mean()}, method=ONE_PASS, task=MultiLabel(dataset="ward"), min_clients=1)
    coordinator, runners = begin(job, files, tmp_path / "run")
    play(coordinator, runners, 1)  # where every sixth or so is not known
    targets = runners["anna"].data.splits["train"].targets
    assert isinstance(targets, torch.Tensor)
    targets[3:] = float("nan")
    with pytest.raises(PolicyRefused, match=NEAR):
        play(coordinator, runners, 2)


def test_one_event_of_a_survival_study_weighs_half(tmp_path: Path) -> None:
    """Cox's loss is of events and of who was at risk then. One step down that of a single event shows its patient's
    row, less the mean of the others'."""
    files = {site: declare(tmp_path / "sites", site, "survival") for site in ("anna", "berta")}
    task = Survival(dataset="ward", horizons=(50.0,))
    job = small_job(mixers={"fedavg": Mean()}, method=ONE_PASS, task=task, min_clients=1)
    coordinator, runners = begin(job, files, tmp_path / "run")
    play(coordinator, runners, 1)
    targets = runners["anna"].data.splits["train"].targets
    assert isinstance(targets, torch.Tensor)
    targets[:, 1] = 0
    targets[targets[:, 0].argmin(), 1] = 1
    with pytest.raises(PolicyRefused, match=NEAR):
        play(coordinator, runners, 2)


def test_whose_labels_and_events_are_behind_a_step() -> None:
    labels = torch.tensor([[1, 0, 1], [float("nan"), 1, 0], [float("nan")] * 3])
    assert BinaryCrossEntropy().importance(labels).tolist() == pytest.approx([9 / 5, 6 / 5, 0])  # type: ignore[union-attr]
    assert BinaryCrossEntropy().importance(labels[:1]) is None
    task = Survival(dataset="d", horizons=(1.0,))
    times = torch.tensor([[2.0, 1], [1, 0], [3, 1], [3, 0], [3, 1], [5, 0], [6, 1]])
    hazards = torch.zeros(len(times), requires_grad=True)
    expected = torch.zeros(len(times))
    for time, _, number in [(*row, place) for place, row in enumerate(times.tolist()) if row[1]]:
        term = torch.where(times[:, 0] >= time, hazards, -torch.inf).logsumexp(dim=0) - hazards[number]
        expected += torch.autograd.grad(term, hazards)[0].abs()
    assert task.importance(times).tolist() == pytest.approx((expected * 7 / 4).tolist())
    assert task.importance(times)[1] == 0 and task.importance(times[3:4]).tolist() == [0]
    assert task.importance(times[6:]).tolist() == [0]  # who was alone at risk


def test_a_focal_loss_that_one_sample_decides() -> None:
    with pytest.raises(ConfigError, match=r"Focal's gamma must be in \[0, 10\], got 1000"):
        Focal(gamma=1000.0)


@pytest.mark.parametrize("variant", ["first-order", "hessian-free"])
def test_two_patients_decide_where_the_others_gradient_is_taken(tmp_path: Path, variant: Any) -> None:
    """Per-FedAvg moves along one batch, as far as a job likes, and sends the gradient of another one from there."""
    method = PerFedAvg(
        epochs=1, batch_size=22, optimizer="sgd", inner_lr=1e6, variant=variant, schedule=Polynomial(power=1e6)
    )
    coordinator, runners = started(tmp_path, method)
    with pytest.raises(PolicyRefused, match=NEAR):
        play(coordinator, runners, 1)


@pytest.mark.parametrize(
    "method",
    [
        FedAvg(steps=1, batch_size=8),
        PerFedAvg(epochs=1, batch_size=22, variant="hessian-free"),
        FedAvg(steps=8, batch_size=1, optimizer="sgd"),
        FedAvg(epochs=1, batch_size=22),  # a last batch of two
        FedAvg(epochs=2, batch_size=4, schedule="cosine", accumulate=2),
        FedProx(mu=1.0, steps=10, batch_size=4, lr=0.01, optimizer=Sgd(momentum=0.9, weight_decay=1e-3)),
        FedProx(mu=10, steps=2, batch_size=8, lr=0.1, optimizer="sgd"),  # one step is left, and it is of eight
    ],
    ids=str,
)
def test_training_as_it_is_done_is_allowed(tmp_path: Path, method: Method) -> None:
    coordinator, runners = started(tmp_path, method)
    for number in (1, 2, 3):
        play(coordinator, runners, number)


def test_how_many_samples_count() -> None:
    behind = EffectiveSamples(10)
    assert behind.effective == float("inf")
    for row in range(4):
        behind.batch(torch.tensor([row, row + 4]), torch.tensor([0.5, 0.5]))
        behind.moved(0.1, 0.0)
    assert behind.effective == pytest.approx(8)
    behind.batch(torch.tensor([8]), torch.tensor([1.0]))
    behind.moved(0.1, 0.5)  # what was before counts half: (8 x 0.025 + 0.1)^2 / (8 x 0.025^2 + 0.1^2) = 6
    assert behind.effective == pytest.approx(6)
    behind.batch(torch.tensor([9]), torch.tensor([1.0]))
    behind.moved(0.1, 1.0)
    assert behind.effective == pytest.approx(1)
    for _ in range(3):
        behind.moved(0.1, 1e308)
    assert behind.effective == 0


@pytest.mark.parametrize("taken_back", [0.01, 0.9, 1.0, 3.0])
def test_what_steps_take_back_is_counted_as_if_every_weight_was_multiplied(taken_back: float) -> None:
    """Over so many steps that the common factor of the weights leaves the range of float64."""
    generator = torch.Generator().manual_seed(3)
    behind, weights = EffectiveSamples(50), torch.zeros(50, dtype=torch.float64)
    for number in range(400):
        rows = torch.randperm(50, generator=generator)[: 1 + number % 7]
        given = torch.rand(len(rows), generator=generator) / len(rows) if number % 3 else None
        behind.batch(rows, given)
        behind.moved(0.1, taken_back if number % 5 else 0.0)
        weights *= abs(1 - taken_back) if number % 5 else 1
        weights[rows] += 0.1 * (torch.full((len(rows),), 1 / len(rows)) if given is None else given).double()
    assert behind.effective == pytest.approx(float(weights.sum() ** 2 / weights.square().sum()), rel=1e-6)
