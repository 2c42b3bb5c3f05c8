# SPDX-License-Identifier: Apache-2.0
"""FedSM-extra and the ensemble: their labels and loss, what travels for them, and their selector's training."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from medpfl.core.errors import ConfigError, MedPFLError
from medpfl.core.mixers import Mean, Mixer, ServerAdam, SoftPull
from medpfl.job import Job
from medpfl.methods.fedsm import FedSM, FedSMEnsemble, FedSMExtra
from medpfl.methods.fedsm.super_model import weighted_sum
from medpfl.models.selector import Signature
from medpfl.privacy import ClippedNoise
from medpfl.privacy.noise import FIXED
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.messages import byte_count
from medpfl.rounds.server.coordinator import Coordinator
from medpfl.rounds.simulate import simulate
from small_jobs import on_its_own
from tools import assert_same, exchange, outcome, pieces, ready, round_of, run

Make = Callable[..., Job]
STEPS = 4


def slots() -> dict[str, Mixer]:
    return {"global": Mean(), "personal": SoftPull(lam=0.7), "selector": ServerAdam(lr=0.02)}


def extra(kind: type[FedSMExtra] = FedSMExtra) -> FedSMExtra:
    return kind(lr=0.05, batch_size=8, selector_steps=STEPS)


def trained(
    job: Job, sites: dict[str, Path], folder: Path
) -> tuple[Coordinator, dict[str, SiteRunner], dict[str, torch.Tensor]]:
    """Before the selector's first exchange: two rounds are trained. With the selector as it was initialised."""
    coordinator, runners = pieces(job, sites, folder)
    ready(coordinator, runners)
    start = coordinator.rounds.train_messages(1, ["anna"])["anna"].slots["selector"]
    start = {key: value.clone() for key, value in start.items()}
    for number in (1, 2):
        coordinator.rounds.take_train(
            number, exchange(runners, coordinator.rounds.train_messages(number, coordinator.joined))
        )
    return coordinator, runners, start


def candidates(coordinator: Coordinator) -> list[tuple[str, dict[str, torch.Tensor]]]:
    """The mixed global model and all mixed personal ones, from the messages that send each hospital its own."""
    messages = coordinator.rounds.train_messages(3, list(coordinator.roster))
    personal = [("personal", messages[site].slots["personal"]) for site in coordinator.roster]
    return [("global", messages["anna"].slots["global"]), *personal]


def test_the_selector_equals_centralised_training_on_the_labels(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Eq. (1) by hand, then full-batch Adam on all hospitals' samples in one place."""
    job = make_job(rounds=2, mixers=slots(), method=extra())
    coordinator, runners, start = trained(job, table_sites, tmp_path)
    central = Signature().build((3,), 5)
    central.load_state_dict({key.removeprefix("selector."): value for key, value in start.items()})
    inputs, labels = [], []
    for site in coordinator.roster:
        samples = runners[site].data.splits["train"]
        columns = []
        for name, state in candidates(coordinator):
            entries = {key.removeprefix(f"{name}."): value for key, value in state.items()}
            with torch.no_grad():
                outputs = functional_call(runners[site].models[name].eval(), entries, (samples.inputs[:],))
            rows = [job.task.loss(outputs[i : i + 1], samples.targets[i : i + 1]) for i in range(len(samples))]
            columns.append(torch.stack(rows))
        inputs.append(samples.inputs[:])
        labels.append(torch.stack(columns).argmin(dim=0))
    assert len(set(torch.cat(labels).tolist())) >= 3  # the test is about something
    before = coordinator.rounds.train_messages(3, ["anna"])["anna"].slots["selector"]
    assert all(torch.equal(before[key], value) for key, value in start.items())  # not trained in the rounds
    steps = 0
    while messages := coordinator.rounds.refine_messages():
        coordinator.rounds.take_refined(exchange(runners, messages))
        steps += 1
    assert steps == STEPS and coordinator.done == 2
    adam = torch.optim.Adam(central.parameters(), lr=0.02)
    for _ in range(STEPS):
        adam.zero_grad()
        cross_entropy(central(torch.cat(inputs)), torch.cat(labels)).backward()
        adam.step()
    after = coordinator.rounds.train_messages(3, ["anna"])["anna"].slots["selector"]
    for key, value in central.state_dict().items():
        torch.testing.assert_close(after[f"selector.{key}"], value, atol=2e-5, rtol=0)
        assert not torch.equal(value, start[f"selector.{key}"])


def test_of_equal_losses_the_first_counts(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """All K + 1 models are one: with lam = 1/K and uniform means they are the same, so every label is 0, global."""
    mixers = {**slots(), "global": Mean(uniform=True), "personal": SoftPull(lam=0.25)}
    coordinator, runners = pieces(make_job(rounds=1, mixers=mixers, method=extra()), table_sites, tmp_path)
    ready(coordinator, runners)
    coordinator.rounds.take_train(1, exchange(runners, coordinator.rounds.train_messages(1, coordinator.joined)))
    for state in coordinator.copies.stack["personal"]:  # equal to the last bit, whatever the order of the sums
        for key, value in state.items():
            value.copy_(coordinator.copies.stack["global"][0][key.replace("personal.", "global.")])
    exchange(runners, coordinator.rounds.refine_messages())
    for runner in runners.values():
        assert runner.rounds.kept["labels"].tolist() == [0] * len(runner.data.splits["train"])


def test_a_model_whose_loss_is_no_number_is_no_samples_class(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """One hospital's model that diverged was the class of every sample at all hospitals."""
    coordinator, runners = pieces(make_job(rounds=1, mixers=slots(), method=extra()), table_sites, tmp_path)
    ready(coordinator, runners)
    messages = coordinator.rounds.train_messages(1, coordinator.joined)
    coordinator.rounds.take_train(1, exchange(runners, messages))
    messages = coordinator.rounds.refine_messages()
    broken = messages["anna"].slots["personal@berta"]
    broken.update({key: torch.full_like(tensor, torch.nan) for key, tensor in broken.items()})
    runners["anna"].handle(messages["anna"])
    labels = runners["anna"].rounds.kept["labels"]
    assert isinstance(labels, torch.Tensor)
    assert len(labels) and 2 not in labels.tolist()


def test_what_travels_for_the_labels(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """The first exchange after the last round brings all models once, later ones the selector; it is counted."""
    coordinator, runners, _ = trained(make_job(rounds=2, mixers=slots(), method=extra()), table_sites, tmp_path)
    network = byte_count({"": coordinator.copies.stack["global"][0]})
    selector = byte_count({"": coordinator.copies.stack["selector"][0]})
    received = []
    while messages := coordinator.rounds.refine_messages():
        received.append(byte_count(messages["anna"].slots))
        replies = exchange(runners, messages)
        assert all(set(reply.slots) == {"selector"} for reply in replies.values())
        coordinator.rounds.take_refined(replies)
    assert received == [selector + 5 * network] + [selector] * (STEPS - 1)
    to_anna = [line for line in coordinator.record.bytes if line.site == "anna" and line.direction == "to_site"]
    rounds = {line.round: line.raw for line in to_anna}
    assert rounds[1] == 2 * network + selector
    assert rounds[2] == rounds[1] + sum(received)


def test_the_ensemble_s_output_and_gradient(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    outputs = torch.tensor([[[1.0], [3.0], [-5.0]]])
    logits = torch.tensor([[0.0, 0.0, -1e9]])
    torch.testing.assert_close(weighted_sum(logits, outputs), torch.tensor([[2.0]]))

    job = make_job(rounds=2, mixers=slots(), method=extra(FedSMEnsemble))
    coordinator, runners, start = trained(job, table_sites, tmp_path)
    models = candidates(coordinator)
    sent = exchange(runners, coordinator.rounds.refine_messages())["berta"].slots["selector"]
    samples = runners["berta"].data.splits["train"]
    selector = Signature().build((3,), 5)
    selector.load_state_dict({key.removeprefix("selector."): value for key, value in start.items()})
    found = []
    for name, state in models:
        entries = {key.removeprefix(f"{name}."): value for key, value in state.items()}
        with torch.no_grad():
            found.append(functional_call(runners["berta"].models[name].eval(), entries, (samples.inputs[:],)))
    weights = selector(samples.inputs[:]).softmax(dim=1)
    mixed = sum((weights[:, k : k + 1] * h for k, h in enumerate(found[1:], start=1)), weights[:, :1] * found[0])
    job.task.loss(mixed, samples.targets[:]).backward()
    for key, weight in selector.named_parameters():
        torch.testing.assert_close(sent[f"selector.{key}"], weight.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("kind", [FedSMExtra, FedSMEnsemble])
@pytest.mark.slow
def test_the_models_are_fedsm_s_and_resuming_changes_nothing(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: type[FedSMExtra]
) -> None:
    def job() -> Job:
        return make_job(rounds=2, mixers=slots(), method=extra(kind))

    whole = run(job(), table_sites, tmp_path / "whole")
    plain = run(replace(job(), method=FedSM(lr=0.05, batch_size=8)), table_sites, tmp_path / "plain")
    for slot in ("global", "personal"):
        assert all(torch.equal(value, plain["slots"][slot][key]) for key, value in whole["slots"][slot].items())
    simulate(job(), table_sites, tmp_path / "a", tmp_path / "home", stop_after=1)
    simulate(job(), table_sites, tmp_path / "b", tmp_path / "home")
    assert_same(whole, outcome(tmp_path / "b"))
    shares = {line["model"]: line["metrics"] for line in whole["scores"] if line["site"] == "anna"}
    assert 0 <= shares["selector_own"]["selector_own"] <= 1


def test_a_hospital_that_missed_the_models_says_so(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    job = make_job(rounds=2, mixers=slots(), method=extra(), min_clients=1)
    coordinator, runners, _ = trained(job, table_sites, tmp_path)
    messages = coordinator.rounds.refine_messages()
    coordinator.rounds.take_refined(exchange(runners, {site: m for site, m in messages.items() if site != "clara"}))
    with pytest.raises(MedPFLError, match="models did not arrive"):
        exchange(runners, coordinator.rounds.refine_messages())


def test_averaged_moments_for_extra(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    """The other way of training: nothing moves before the last round, and then it does."""
    method = replace(extra(), selector_training="averaged_moments", selector_lr=0.02)
    job = make_job(rounds=2, mixers={**slots(), "selector": Mean()}, method=method)
    coordinator, runners, start = trained(job, table_sites, tmp_path)
    before = coordinator.rounds.train_messages(3, ["anna"])["anna"].slots["selector"]
    for key, value in start.items():  # the mean of equal weights, to rounding
        torch.testing.assert_close(before[key], value, atol=1e-6, rtol=0)
    while messages := coordinator.rounds.refine_messages():
        coordinator.rounds.take_refined(exchange(runners, messages))
    after = coordinator.rounds.train_messages(3, ["anna"])["anna"].slots["selector"]
    assert float(after["moments.step"]) == STEPS
    assert not torch.equal(after["selector.layers.0.weight"], start["selector.layers.0.weight"])
    with pytest.raises(ConfigError, match="cannot be 'local_steps'"):
        replace(extra(), selector_training="local_steps", selector_steps=1)


def test_one_hospital_alone(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    job = make_job(mixers={**slots(), "personal": SoftPull(lam=1.0)}, method=extra(), min_clients=1, rounds=2)
    coordinator, runners = pieces(job, {"anna": on_its_own(table_sites["anna"])}, tmp_path)
    ready(coordinator, runners)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    assert runners["anna"].rounds.kept["labels"].unique().tolist() == [0]  # global and personal are the same


def test_noise_does_not_move_a_selector_that_is_not_trained_yet(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the last round its gradient is zero at every hospital; with noise on it the server took Adam's steps along
    nothing else, round by round."""
    monkeypatch.setenv(FIXED, "0")
    method = replace(extra(), optimizer="sgd", privacy=ClippedNoise(clip=0.5, noise_multiplier=2.0))
    coordinator, runners = pieces(make_job(rounds=2, mixers=slots(), method=method), table_sites, tmp_path)
    ready(coordinator, runners)

    def sent() -> dict[str, torch.Tensor]:
        slots = coordinator.rounds.train_messages(1, ["anna"])["anna"].slots
        return {key: value.clone() for slot in ("selector", "global") for key, value in slots[slot].items()}

    start = sent()
    round_of(coordinator, runners, 1)
    first = sent()
    round_of(coordinator, runners, 2)
    for key, value in sent().items():
        selector = key.startswith("selector.")
        assert torch.equal(first[key], start[key]) == selector and not torch.equal(value, first[key]), key
