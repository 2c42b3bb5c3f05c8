# SPDX-License-Identifier: Apache-2.0
"""What noise does for a method of another package: nothing is promised of which its class says nothing."""

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean
from medpfl.methods.contract import Batch, Method, Site
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.fedrep import FedRep
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.contract import Cover, Spent
from medpfl.privacy.noise import FIXED
from medpfl.rounds.messages import Message, Slots
from medpfl.rounds.protocol.requests import FinishRequest, ValidateRequest
from medpfl.rounds.simulate import simulate
from own_method import Ours
from small_jobs import small_job, write_table_sites
from tools import pieces, ready, round_of

RECORD, UPDATE = DPSGD(noise_multiplier=1.0), ClippedNoise(clip=1.0, noise_multiplier=1.0)


@dataclass(frozen=True, kw_only=True)
class OwnLoop(FedRep):
    """Trains by an optimiser of its own, which knows of no noise."""

    def local_round(self, site: Site) -> None:
        network, train = site.models["model"], site.data.splits["train"]
        optimizer = torch.optim.SGD(network.parameters(), lr=self.lr)
        site.task.loss(network(train.inputs[:]), train.targets[:]).backward()
        optimizer.step()


@dataclass(frozen=True, kw_only=True)
class Renamed(FedAvg):
    """Changes nothing of what leaves."""

    warm: int = 0


@dataclass(frozen=True, kw_only=True)
class Said(OwnLoop):
    """Says what holds of it."""

    cover: ClassVar[Cover] = Cover(record="it trains without noise")


@pytest.mark.parametrize("privacy", [RECORD, UPDATE])
def test_what_trains_otherwise_is_not_covered_by_what_it_derives_from(privacy: DPSGD | ClippedNoise) -> None:
    """Its weights left without noise, and the account told of the references' noise alone."""
    for base in (OwnLoop, Ours, dataclass(frozen=True, kw_only=True)(type("Deeper", (OwnLoop,), {}))):
        with pytest.raises(ConfigError, match=f"{base.__name__} cannot be trained .* its class does not say which"):
            base(privacy=privacy)
    assert Renamed(privacy=privacy).privacy is privacy
    assert Said(privacy=UPDATE).privacy is UPDATE
    with pytest.raises(ConfigError, match=r"Said cannot be trained with DPSGD .*: it trains without noise"):
        Said(privacy=RECORD)


class Loop:
    """What several methods share, and no method itself."""

    def local_round(self, site: Site) -> None:
        own_optimizer(site)


@dataclass(frozen=True, kw_only=True)
class Beside(Loop, FedAvg):
    """Takes its training from a class beside the method that it derives from."""


@dataclass(frozen=True, kw_only=True)
class OwnPart(FedRep):
    """Overrides what the training of its parent calls."""

    def _train(self, site: Site, train_head: bool, batches: Iterator[Batch]) -> None:
        own_optimizer(site)


@dataclass(frozen=True, kw_only=True)
class Further(FedRep):
    """Adds what nothing calls of its parent, and other numbers for the report."""

    diagnoses: ClassVar[Sequence[str]] = ("gap",)

    def _gap(self) -> float:
        return 0.0

    def diagnose(self, *given: Any, **named: Any) -> dict[str, float]:
        return {"gap": self._gap()}


@pytest.mark.parametrize("privacy", [RECORD, UPDATE])
def test_nor_is_what_has_its_code_from_beside_or_overrides_a_part(privacy: DPSGD | ClippedNoise) -> None:
    """These passed for what they derive from: their weights left without noise, and an epsilon of 0 was told."""
    for kind in (Beside, OwnPart):
        with pytest.raises(ConfigError, match=f"{kind.__name__} cannot be trained .* its class does not say which"):
            kind(privacy=privacy)
    assert Further.cover == FedRep.cover


@dataclass(frozen=True, kw_only=True)
class Forgetful(Ours):
    """Its __post_init__ does not call Method's."""

    alpha: float = 1.0

    def __post_init__(self) -> None:
        assert self.alpha > 0


def test_a_hospital_asks_the_class_again_what_noise_does_for_it(tmp_path: Path) -> None:
    """Nobody had, and noise was promised that nobody knew to be enough."""
    with pytest.raises(ConfigError, match=r"Forgetful cannot be trained with DPSGD .* its class does not say which"):
        job = small_job(1, {"model": Mean()}, Forgetful(privacy=RECORD))
        simulate(job, write_table_sites(tmp_path / "sites"), tmp_path / "results", tmp_path / "home")


def own_optimizer(site: Site) -> None:
    """Knows of no noise."""
    network = next(iter(site.models.values()))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    for batch in site.training_batches():
        optimizer.zero_grad()
        site.task.loss(network(batch.inputs), batch.targets).backward()
        optimizer.step()


def summed(site: Site) -> None:
    """One step down the losses of three batches."""
    losses: list[torch.Tensor] = []
    for batch in site.training_batches():
        losses.append(site.task.loss(site.models["model"](batch.inputs), batch.targets))
        if len(losses) == 3:
            site.step("model", torch.stack(losses).mean())
            losses.clear()


def every_second(site: Site) -> None:
    """Leaves cases out, but adds their losses to others'."""
    loss = torch.zeros(())
    for number, batch in enumerate(site.training_batches()):
        loss = loss + site.task.loss(site.models["model"](batch.inputs), batch.targets)
        if (number if batch.place.lot is None else batch.place.lot.number) % 2 == 0:
            site.step("model", loss)
            loss = torch.zeros(())


def in_advance(site: Site) -> None:
    """Reads all batches before the first step."""
    for batch in list(site.training_batches()):
        site.step("model", site.task.loss(site.models["model"](batch.inputs), batch.targets))


def again_and_again(site: Site) -> None:
    """Takes two steps on every batch."""
    for batch in site.training_batches():
        for _ in range(2):
            site.step("model", site.task.loss(site.models["model"](batch.inputs), batch.targets))


def own(local_round: Callable[[Site], None], privacy: DPSGD = RECORD, **members: Any) -> Method:
    """A method of one's own, which says that it is covered."""
    members = {"local_round": lambda self, site: local_round(site), "cover": Cover(), **members}
    kind: type[Ours] = dataclass(frozen=True, kw_only=True)(type("Own", (Ours,), members))
    return kind(lr=0.1, batch_size=12, optimizer="sgd", privacy=privacy)


def sent(folder: Path, method: Method, rounds: int = 1, others: bool = False) -> tuple[Slots, Spent]:
    """What anna sends in the last round, of her data or of others, and what it has cost."""
    job = small_job(rounds, dict(method.components()), method)
    sites = write_table_sites(folder / "sites", ["anna", "berta"])
    coordinator, runners = pieces(job, sites, folder / str(others))
    ready(coordinator, runners)
    if others:
        samples = runners["anna"].data.splits["train"]
        assert isinstance(samples.inputs, torch.Tensor)
        samples.inputs.mul_(-3).add_(0.5)
    for number in range(1, rounds):
        round_of(coordinator, runners, number)
    reply = runners["anna"].handle(coordinator.rounds.train_messages(rounds, ["anna"])["anna"])
    assert reply.header.privacy is not None
    return reply.slots, reply.header.privacy


@pytest.mark.parametrize("local_round", [summed, every_second, in_advance, again_and_again])
def test_a_step_of_several_cases_at_once_is_not_taken_for_one_of_each(
    local_round: Callable[[Site], None], tmp_path: Path
) -> None:
    """Two cases' losses made one addend, by which either could move the sum twice as far as the noise is made for, and
    epsilon was told as of one; or Python's KeyError ended the round."""
    with pytest.raises(ConfigError, match=r"the step of 'model' does not take each of them once: call 'site\.step'"):
        sent(tmp_path, own(local_round))


def of_its_own_samples(site: Site) -> None:
    """Draws its batches itself."""
    network, train = site.models["model"], site.data.splits["train"]
    for rows in torch.arange(len(train)).split(8):
        site.step("model", site.task.loss(network(train.inputs[rows]), train.targets[rows]))


def a_gradient_as_it_is(site: Site) -> None:
    """Sends the mean gradient, without a step."""
    network, train = site.models["model"], site.data.splits["train"]
    found = torch.autograd.grad(site.task.loss(network(train.inputs[:]), train.targets[:]), list(network.parameters()))
    site.learnt_from("model", torch.arange(len(train)))
    names = [f"model.{key}" for key, _ in network.named_parameters()]
    site.outbox["model"] = dict(zip(names, found, strict=True))


@pytest.mark.parametrize("local_round", [of_its_own_samples, a_gradient_as_it_is])
def test_a_gradient_that_gets_no_noise_is_refused(local_round: Callable[[Site], None], tmp_path: Path) -> None:
    """It left as it was, and the hospital told an epsilon of 0."""
    with pytest.raises(ConfigError, match="Own makes gradients of its own, or of samples that 'site"):
        sent(tmp_path, own(local_round))


class Prototypes(nn.Module):
    """``mean``: of each class's inputs."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(2, 3))


def with_prototypes(site: Site) -> None:
    site.fit("model")
    train, prototypes = site.data.splits["train"], site.models["prototypes"]
    assert isinstance(prototypes, Prototypes) and isinstance(train.targets, torch.Tensor)
    for label in (0, 1):
        prototypes.mean[label] = train.inputs[:][train.targets.flatten() == label].mean(dim=0)


def halved(site: Site) -> None:
    """Sends of a network beside the model half of its first layer."""
    site.fit("model")
    site.outbox["prototypes"] = {"prototypes.mean": next(site.models["model"].parameters())[:2].detach() / 2}


TWO: dict[str, Any] = {
    "models": lambda self, build: {"model": build.network(), "prototypes": Prototypes()},
    "components": lambda self: {"model": Mean(), "prototypes": Mean()},
}


def test_what_no_step_with_noise_has_made_is_not_sent(tmp_path: Path) -> None:
    """Weights of an optimiser of the method's own, and means of the classes, left as they were; what was told was an
    epsilon of 0, or that of the other weights."""
    said = r"Own changes '{}', which is sent, and DPSGD has put no noise on it: .* Cover\(derived=\('{}',\)\)"
    with pytest.raises(ConfigError, match=said.format(r"model\.0\.weight", "model")):
        sent(tmp_path / "optimizer", own(own_optimizer))
    with pytest.raises(ConfigError, match=said.format(r"prototypes\.mean", "prototypes")):
        sent(tmp_path / "means", own(with_prototypes, **TWO))
    with pytest.raises(ConfigError, match=said.format(r"prototypes\.mean", "prototypes")):
        sent(tmp_path / "derived", own(halved, **TWO))
    slots, spent = sent(tmp_path / "said", own(halved, **{**TWO, "cover": Cover(derived=("prototypes",))}))
    assert spent.epsilon > 1
    assert torch.equal(slots["prototypes"]["prototypes.mean"], slots["model"]["model.0.weight"][:2] / 2)


def test_what_is_trained_after_the_mixing_has_noise_and_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The round's training goes on from there: ordinary steps on the patients' data left without noise, uncounted."""
    monkeypatch.setenv(FIXED, "0")
    before = {"after_mixing": lambda self, site: site.fit("model")}

    def found(others: bool, **members: Any) -> tuple[torch.Tensor, float]:
        folder = tmp_path / f"{others} {len(members)}"
        hidden = DPSGD(noise_multiplier=1.0, max_grad_norm=1e-9)
        slots, spent = sent(folder, own(lambda site: site.fit("model"), hidden, **members), 2, others)
        return slots["model"]["model.0.weight"], spent.epsilon

    (one, costs), (other, _), (_, usual) = found(False, **before), found(True, **before), found(False)
    assert torch.allclose(one, other, atol=1e-6)
    assert costs > 1.1 * usual


def test_what_was_trained_where_nothing_is_sent_is_in_no_later_round(tmp_path: Path) -> None:
    """A server asks for the validation or the end of the job between two rounds: what is trained there, with noise that
    is not counted or with none, stays in the part of the network that is the hospital's own."""
    began: list[torch.Tensor] = []

    def trained(self: Method, site: Site) -> None:
        began.append(site.models["model"].state_dict()["2.weight"].clone())
        site.fit("model")

    members: dict[str, Any] = {
        "slots": lambda self, models: {"body": [key for key in models.state_dict() if ".0." in key]},
        "components": lambda self: {"body": Mean()},
        "after_mixing": trained,
        "fine_tuned": "mine",
    }

    def began_from(name: str, *between: type[ValidateRequest] | type[FinishRequest], fresh: bool = False) -> bool:
        """Whether round 2 begins with the hospital's own part as round 1 left it, or as it was before."""
        method = own(lambda site: site.fit("model"), **members)
        job = small_job(3, {"body": Mean()}, method)
        coordinator, runners = pieces(
            job, write_table_sites(tmp_path / name, ["anna", "berta"]), tmp_path / f"{name} x"
        )
        ready(coordinator, runners)
        anna = runners["anna"]
        first = anna.models["model"].state_dict()["2.weight"].clone()
        round_of(coordinator, runners, 1)
        left = first if fresh else anna.models["model"].state_dict()["2.weight"].clone()
        message = coordinator.rounds.train_messages(2, ["anna"])["anna"]
        for kind in between:
            more = {"finetune": 2} if kind is FinishRequest else {}
            asked = kind(run=coordinator.run, begun=message.header.begun, round=1, rounds=3, best={}, **more)  # type: ignore[arg-type]
            anna.handle(Message(asked, deepcopy(message.slots) if kind is ValidateRequest else {}))
        began.clear()
        anna.handle(Message(message.header.model_copy(update={"fresh": fresh}), message.slots))
        return torch.equal(began[0], left)

    assert began_from("plain")
    assert began_from("validated", ValidateRequest)
    assert began_from("ended", ValidateRequest, FinishRequest)
    assert began_from("ended afresh", ValidateRequest, FinishRequest, fresh=True)


def fitted_twice(site: Site) -> None:
    site.fit("model")
    site.fit("model")


def test_a_job_that_would_cost_more_than_its_target_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    """The noise was made for one pass over the data a round, and the job cost twice as much, in silence."""
    how = DPSGD(target_epsilon=4.0)
    with pytest.raises(
        ConfigError, match=r"Own makes more steps with noise .* its 'passes' says \(1\).* epsilon of [56]"
    ):
        sent(tmp_path / "one", own(fitted_twice, how))
    _, spent = sent(tmp_path / "two", own(fitted_twice, how, passes=2))
    assert 3.9 < spent.epsilon <= 4.0
