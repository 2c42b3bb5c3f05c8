# SPDX-License-Identifier: Apache-2.0
"""A hospital's noise against a server that tries to get round it, and against jobs at the same moment."""

import contextlib
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from medpfl.core.codecs import STC
from medpfl.core.errors import BudgetSpent, CodecError, ConfigError, ProtocolError
from medpfl.core.mixers import Mean
from medpfl.data.policy import Policy
from medpfl.data.samples import SiteData
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.lg_fedavg import LGFedAvg
from medpfl.methods.optimizers import Sgd
from medpfl.methods.softpull import SoftPull
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.accountant import epsilon
from medpfl.privacy.contract import SHORTEST, Mechanism
from medpfl.privacy.ledger import FILE, Ledger, read
from medpfl.privacy.noise import FIXED, Gaussian
from medpfl.rounds.coders import SiteCoder
from medpfl.rounds.messages import Message, flatten
from medpfl.rounds.privacy import Guard
from medpfl.rounds.protocol.requests import FinishRequest, RefineRequest, TrainRequest
from medpfl.rounds.protocol.text import Coded
from medpfl.tasks.tabular import Tabular
from small_jobs import small_job, write_table_sites
from tools import exchange, pieces, ready, round_of

DELTA = 1e-5
RECORD = DPSGD(noise_multiplier=1.5, max_grad_norm=0.5)
UPDATE = ClippedNoise(clip=0.1, noise_multiplier=6.0)


@pytest.fixture
def sites(tmp_path: Path) -> dict[str, Path]:
    return write_table_sites(tmp_path / "sites", ["anna", "berta", "clara"])


def test_a_server_cannot_ask_for_weights_without_noise_within_a_round(sites: dict[str, Path], tmp_path: Path) -> None:
    job = small_job(1, method=SoftPull(lr=0.1, batch_size=6, privacy=RECORD))
    coordinator, runners = pieces(job, sites, tmp_path)
    ready(coordinator, runners)
    exchange(runners, coordinator.rounds.train_messages(1, ["anna"]))
    request = RefineRequest(run=coordinator.run, round=1, rounds=1, best={}, step=1)
    for slot in ("local", "model"):
        with pytest.raises(ProtocolError, match=f"SoftPull exchanges no slot '{slot}' within a round"):
            runners["anna"].handle(Message(request, {slot: {}}))


@pytest.mark.parametrize("privacy", [RECORD, UPDATE])
def test_a_server_cannot_send_weights_that_overflow_for_one_patient(
    privacy: DPSGD | ClippedNoise, sites: dict[str, Path], tmp_path: Path
) -> None:
    """Noise does not hide a NaN: it would tell whether the patient is there."""
    method = FedAvg(lr=0.1, steps=3, batch_size=100, optimizer="sgd", privacy=privacy)
    job = small_job(2, {"fedavg": Mean()}, method)
    coordinator, runners = pieces(job, sites, tmp_path)
    ready(coordinator, runners)
    runners["anna"].data.splits["train"].inputs[0] = 1e6
    message = coordinator.rounds.train_messages(1, ["anna"])["anna"]
    for name, tensor in flatten(message.slots).items():  # infinity times zero, for this patient alone
        tensor.fill_(1e33 if ".0." in name else 0.0)
    sent = flatten(runners["anna"].handle(message).slots)
    assert all(tensor.isfinite().all() for tensor in sent.values())


@pytest.mark.slow
def test_a_server_cannot_ask_for_a_round_that_goes_on_from_fine_tuning(
    sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fine-tuning has no noise, and its momentum would be in the next round's steps. The hospital sends what it sends
    if nobody asks it to fine-tune, here with hardly any noise; what its training data are then shows nowhere."""

    def sent(others: bool, finetune: int) -> dict[str, torch.Tensor]:
        how = DPSGD(noise_multiplier=1.0, max_grad_norm=1e-9)
        method = FedAvg(lr=0.1, steps=3, batch_size=12, optimizer=Sgd(momentum=0.9), privacy=how)
        coordinator, runners = pieces(
            small_job(3, {"fedavg": Mean()}, method), sites, tmp_path / f"{others} {finetune}"
        )
        ready(coordinator, runners)
        if others:
            runners["anna"].data.splits["train"].inputs.mul_(-3).add_(0.5)
        for number in (1, 2):
            round_of(coordinator, runners, number)
        message = coordinator.rounds.train_messages(3, ["anna"])["anna"]
        if finetune:
            asked = FinishRequest(run=coordinator.run, round=1, rounds=3, best={}, finetune=finetune)
            runners["anna"].handle(Message(asked))
        return flatten(runners["anna"].handle(message).slots)

    plain, one, other = sent(False, 0), sent(False, 2), sent(True, 2)
    assert all(torch.allclose(one[name], other[name], atol=1e-5) for name in one)
    assert all(torch.allclose(one[name], plain[name], atol=1e-5) for name in one)


@pytest.mark.parametrize("privacy", [RECORD, UPDATE])
def test_an_account_that_was_put_back_makes_no_noise_twice(
    privacy: DPSGD | ClippedNoise, sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hospital's machine is set back to yesterday's snapshot, and the server asks for the same round again, with
    weights of its choice: two messages with one noise would show what is under it."""
    monkeypatch.delenv(FIXED, raising=False)
    method = FedAvg(lr=0.1, steps=3, batch_size=100, optimizer="sgd", privacy=privacy)
    coordinator, runners = pieces(small_job(2, {"fedavg": Mean()}, method), sites, tmp_path)
    ready(coordinator, runners)
    account = tmp_path / "anna" / "small" / FILE
    before, message = account.read_bytes(), coordinator.rounds.train_messages(1, ["anna"])["anna"]
    one = flatten(runners["anna"].handle(message).slots)
    account.write_bytes(before)
    other = flatten(runners["anna"].handle(message).slots)
    assert not any(torch.equal(one[name], other[name]) for name in one)


def test_a_patient_counts_no_more_than_the_length_also_where_float32_ends() -> None:
    """A factor below 1.2e-38 is rounded, up to twice its size, and so is the patient's part in the sum."""

    def longest(clip: float) -> float:
        found = []
        for gradient in (1.8e19, 1.6e19, 1e19, 3e18):
            total = Gaussian([torch.zeros(2)], clip, 1.0)
            total.add([torch.tensor([gradient, 0.0])])
            found.append(float(total.clipped[0].double().norm()) / clip)
        return max(found)

    assert longest(1.3e-26) > 1.1 and longest(SHORTEST) < 1 + 1e-6
    assert DPSGD(noise_multiplier=1.0, max_grad_norm=SHORTEST) and ClippedNoise(clip=SHORTEST, noise_multiplier=1.0)
    for clip in (1.3e-26, 0.9 * SHORTEST):
        with pytest.raises(ConfigError, match="DPSGD's max_grad_norm must be at least 1e-18, got"):
            DPSGD(noise_multiplier=1.0, max_grad_norm=clip)
        with pytest.raises(ConfigError, match="ClippedNoise's clip must be at least 1e-18, got"):
            ClippedNoise(clip=clip, noise_multiplier=1.0)


def test_two_jobs_at_the_same_moment_do_not_both_spend_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is room for one. Both would look before either has written."""
    costs, written = [Mechanism(1.0, 1.0, 1)], Ledger.release
    refused: list[str] = []
    policy = Policy(least_hospitals=1, most_epsilon=1.2 * epsilon(costs, DELTA), delta=DELTA)
    method = FedAvg(lr=0.1, privacy=ClippedNoise(clip=0.1, noise_multiplier=2.0))
    meeting = threading.Barrier(2)

    def late(self: Ledger, *sent: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(2)
        written(self, *sent)

    monkeypatch.setattr(Ledger, "release", late)
    state = {"fedavg": {"weight": torch.zeros(3)}}

    def job(name: str) -> None:
        guard = Guard(tmp_path / name, "anna", policy, [method], 1, ())
        guard.begin()
        try:
            guard.release(state, state, TrainRequest(run=name, round=1, rounds=1, best={}))
        except BudgetSpent as error:
            refused.append(str(error))

    jobs = [threading.Thread(target=job, args=(name,)) for name in ("one", "other")]
    for one in jobs:
        one.start()
    for one in jobs:
        one.join()
    assert len(refused) == 1
    assert Ledger(tmp_path / "one", "anna").with_others([], DELTA) <= policy.most_epsilon  # type: ignore[operator]


def test_two_runs_of_one_job_do_not_write_over_each_other(tmp_path: Path) -> None:
    costs, count = [Mechanism(1.0, 1.0, 1)], 15

    def of_it() -> None:
        ledger = Ledger(tmp_path / "job", "anna")
        ledger.open()
        for _ in range(count):
            with ledger.alone():
                ledger.release(costs, "update")

    runs = [threading.Thread(target=of_it) for _ in range(3)]
    for one in runs:
        one.start()
    for one in runs:
        one.join()
    assert read(tmp_path / "job" / FILE).releases == 3 * count


def test_a_server_cannot_have_a_round_go_on_from_what_another_job_trained_without_noise(
    sites: dict[str, Path], tmp_path: Path
) -> None:
    """Under ClippedNoise the momentum at the hospital has none. The next job of this name has DPSGD, whose steps would
    go on from it: the server names the run before."""

    def begun(privacy: DPSGD | ClippedNoise) -> tuple[Any, Any]:
        method = FedAvg(lr=0.1, steps=3, batch_size=12, optimizer=Sgd(momentum=0.9), privacy=privacy)
        coordinator, runners = pieces(small_job(3, {"fedavg": Mean()}, method), sites, tmp_path)
        ready(coordinator, runners)
        return coordinator, runners

    before, runners = begun(UPDATE)
    for number in (1, 2):
        round_of(before, runners, number)
    for runner in runners.values():
        runner.close()
    coordinator, runners = begun(RECORD)
    message = coordinator.rounds.train_messages(1, ["anna"])["anna"]
    forged = TrainRequest(run=before.run, begun=before.begun, round=3, rounds=3, best={})
    with pytest.raises(ProtocolError, match="a run of another method, task, noise or encryption than this job's"):
        runners["anna"].handle(Message(forged, message.slots))
    assert read(tmp_path / "anna" / "small" / FILE).releases == 2


def test_a_server_cannot_have_what_compression_lost_without_noise_sent_with_an_update_under_noise(
    sites: dict[str, Path], tmp_path: Path
) -> None:
    """Of updates without noise a codec has left nearly everything at the hospital, to be sent with the next update. The
    next job of this name has DPSGD: the server names the run before, in its first round, and its last exchange."""

    def begun(privacy: DPSGD | None) -> tuple[Any, SiteCoder]:
        method = FedAvg(lr=0.1, steps=3, batch_size=12, optimizer="sgd", privacy=privacy)
        coordinator, runners = pieces(small_job(3, {"fedavg": Mean()}, method), sites, tmp_path)
        coder = SiteCoder(tmp_path / "anna", "anna")
        asked = coder.receive(coordinator.init_messages()["anna"])
        coder.send(runners["anna"].handle(asked), STC(0.05))
        return runners["anna"], coder

    def answer(anna: Any, coder: SiteCoder, run: str, coded: Coded) -> None:
        asked = TrainRequest(run=run, round=1, rounds=3, best={})
        message = Message(asked, {"fedavg": anna.networks.gather()["fedavg"]}, coded)
        coder.send(anna.handle(coder.receive(message)), STC(0.05))

    anna, coder = begun(None)
    answer(anna, coder, "run", Coded(number=1, base=None))
    anna.close()
    anna, coder = begun(RECORD)
    with pytest.raises(CodecError, match="anna: nothing is kept here of exchange 1"):
        answer(anna, coder, "run", Coded(number=2, base=1))


class Centred(nn.Module):
    """Keeps a mean of what it has seen, as no layer of torch's own but BatchNorm's kind does."""

    seen: torch.Tensor

    def __init__(self, width: int):
        super().__init__()
        self.register_buffer("seen", torch.zeros(width))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen.lerp_(inputs.detach().mean(0), 0.5)
        return inputs - self.seen


@dataclass(frozen=True)
class CentredTabular(Tabular):
    def network(self, data: SiteData) -> nn.Module:
        return nn.Sequential(Centred(data.input_shape[0]), *super().network(data).children())


@pytest.mark.parametrize("personal", [False, True])
def test_what_a_layer_keeps_of_its_inputs_does_not_leave_without_noise(
    personal: bool, sites: dict[str, Path], tmp_path: Path
) -> None:
    """A running mean is no trained weight: no gradient of it is shortened, and no noise is on it. Where it stays at the
    hospital itself, the gradients of all other cases depend on it."""
    task = CentredTabular(dataset="blood", hidden=(4,))
    method = LGFedAvg if personal else FedAvg
    slot = "model" if personal else "fedavg"
    job = small_job(1, {slot: Mean()}, method(lr=0.1, steps=2, batch_size=10, privacy=RECORD), task=task)
    coordinator, runners = pieces(job, sites, tmp_path)
    ready(coordinator, runners)
    with pytest.raises(ConfigError, match=r"training changes its buffer '0\.seen', which is no trained weight"):
        exchange(runners, coordinator.rounds.train_messages(1, ["anna"]))
    assert read(tmp_path / "anna" / "small" / FILE).releases == 0
