# SPDX-License-Identifier: Apache-2.0
"""Learning rates by hand, where they come from in a job, and that a run which goes on has the same ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from baselines import assert_resumes, begin, held, play, same
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import ControlVariates, Mean
from medpfl.job import load_job
from medpfl.methods.batches import Span
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.mh_pflid import MHpFLID
from medpfl.methods.optimizers import Sgd
from medpfl.methods.scaffold import Scaffold
from medpfl.methods.schedules import Constant, Cosine, Polynomial, Schedule, StepDown, WarmUp
from medpfl.methods.site import Site
from medpfl.methods.softpull import SoftPull
from medpfl.rounds.hospital.run_state import RunState
from medpfl.rounds.hospital.site import SiteRunner
from medpfl.rounds.leaves import leaves_of
from small_jobs import small_job
from tools import Make, exchange, retell, write_job

WARM = WarmUp(rounds=2, start=0.2, then="cosine")


@pytest.mark.parametrize(
    ("schedule", "passed", "rounds", "factor"),
    [
        (Constant(), 7.3, 10, 1.0),
        (Polynomial(), 0, 1000, 1.0),
        (Polynomial(), 500, 1000, 0.5358867312681466),  # nnU-Net's PolyLRScheduler at epoch 500 of 1000
        (Polynomial(), 999, 1000, 0.0019952623149688794),
        (Polynomial(power=1), 2.5, 10, 0.75),
        (Cosine(), 0, 10, 1.0),
        (Cosine(), 5, 10, 0.5),
        (Cosine(), 2.5, 10, (1 + math.sqrt(0.5)) / 2),
        (StepDown(), 4.99, 10, 1.0),
        (StepDown(), 5, 10, 0.1),
        (StepDown(at=(0.55,)), 55, 100, 0.1),
        (StepDown(at=(0.5, 0.75), by=0.5), 7.5, 10, 0.25),
        (WARM, 0, 10, 0.2),
        (WARM, 1, 10, 0.6),
        (WARM, 2, 10, 1.0),
        (WARM, 6, 10, 0.5),  # half of the eight rounds that are left
        (WARM, 2, 2, 1.0),
        (WarmUp(rounds=4, start=0.5), 1, 2, 0.625),
    ],
)
def test_by_hand(schedule: Schedule, passed: float, rounds: float, factor: float) -> None:
    assert schedule.factor(passed, rounds) == pytest.approx(factor, rel=1e-12)


def test_it_is_torchs_cosine_and_ends_at_nothing() -> None:
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=12)
    for step in range(12):
        assert Cosine().factor(step / 4, 3) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9)
        optimizer.step()
        theirs.step()
    for schedule in (Polynomial(), Cosine(), WARM):
        assert schedule.factor(12, 12) == pytest.approx(0, abs=1e-12)


def test_time_never_passes_the_last_round() -> None:
    span = Span(4, 3)
    assert [span.passed(4, 0), span.passed(5, 0.5), span.passed(6, 0.75), span.passed(9, 0.5)] == [0, 1.5, 2.75, 3]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Polynomial(power=0.0), "Polynomial's power must be above 0, got 0"),
        (lambda: StepDown(at=(0.5, 0.5)), r"StepDown's at must be parts .*, got \[0.5, 0.5\]"),
        (lambda: StepDown(at=(30.0,)), r"StepDown's at must be parts .*, got \[30.0\]"),
        (lambda: StepDown(by=1.0), r"StepDown's by must be in \(0, 1\), got 1"),
        (lambda: WarmUp(rounds=0.0), "WarmUp's rounds must be above 0, got 0"),
        (lambda: WarmUp(start=0.0), r"WarmUp's start must be in \(0, 1\], got 0"),
        (lambda: FedAvg(schedule="poly"), "'schedule' of FedAvg must be 'constant', 'polynomial' or 'cosine' or a Sch"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.parametrize("schedule", ["cosine", WARM, WarmUp(then=StepDown())])
def test_a_job_names_the_schedule(schedule: Any, tmp_path: Path) -> None:
    method = SoftPull(schedule=schedule)
    assert load_job(write_job(small_job(method=method), tmp_path / "job")).method == method


def rates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """Gets the hospital, the round and the learning rate of every step that is made from now on."""
    found: list[tuple[str, int, float]] = []
    original = Site._move

    def told(self: Site, models: Any, pull: float = 0.0) -> None:
        original(self, models, pull)
        found.extend((self.name, self.round, self._optimizer(name).param_groups[0]["lr"]) for name in models)

    monkeypatch.setattr(Site, "_move", told)
    return found


def test_every_step_has_the_rate_of_its_moment(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds of four steps: t counts twelfths, and each of the hospitals counts its own steps."""
    method = FedAvg(lr=0.05, steps=4, batch_size=6, schedule=Polynomial(power=2.0))
    coordinator, runners = begin(make_job(rounds=3, mixers={"fedavg": Mean()}, method=method), table_sites, tmp_path)
    found = rates(monkeypatch)
    for number in (1, 2, 3):
        play(coordinator, runners, number)
    for site in table_sites:
        seen = [rate for name, _, rate in found if name == site]
        assert seen == pytest.approx([0.05 * (1 - t / 12) ** 2 for t in range(12)])


@dataclass(frozen=True, kw_only=True)
class Falls(Schedule):
    """Of another package; in a straight line, to 0 at ``end`` of the rounds, and on."""

    end: float

    def factor(self, passed: float, rounds: float) -> float:
        return 1 - passed / (self.end * rounds) if self.end else math.nan


@pytest.mark.parametrize(("end", "said"), [(0.5, r"round 1\.75 of 3, got -0\.166"), (0.0, "round 0 of 3, got nan")])
def test_a_factor_that_is_none_is_refused(
    end: float, said: str, make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Below zero it trained uphill, in silence, and with NaN all weights became NaN."""
    method = FedAvg(lr=0.05, steps=4, batch_size=6, schedule=Falls(end=end))
    coordinator, runners = begin(make_job(rounds=3, mixers={"fedavg": Mean()}, method=method), table_sites, tmp_path)
    with pytest.raises(ConfigError, match=f"'factor' of Falls must give a number from 0 to 1, after {said}"):
        for number in (1, 2, 3):
            play(coordinator, runners, number)


def test_the_number_of_rounds_is_the_servers(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hospital knows it from each request, and nothing that it keeps."""
    method = FedAvg(lr=0.05, steps=1, schedule=Polynomial(power=1.0))
    coordinator, runners = begin(make_job(rounds=4, mixers={"fedavg": Mean()}, method=method), table_sites, tmp_path)
    found = rates(monkeypatch)
    for told, rate in ((4, 0.05 * 0.75), (8, 0.05 * 0.875)):
        message = coordinator.rounds.train_messages(2, ["anna"])["anna"]
        retell(message, rounds=told)
        exchange(runners, {"anna": message})
        assert found[-1] == ("anna", 2, pytest.approx(rate))


@pytest.mark.slow
def test_fine_tuning_begins_its_own_schedule(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tools import run

    found = rates(monkeypatch)
    method = FedAvg(lr=0.05, steps=2, schedule=Polynomial(power=1.0))
    run(make_job(rounds=2, mixers={"fedavg": Mean()}, method=method), table_sites, tmp_path)
    falling = [0.05, 0.0375, 0.025, 0.0125]
    assert [rate for name, _, rate in found if name == "anna"] == pytest.approx([*falling, *falling])


def test_networks_with_rates_of_their_own_follow_too() -> None:
    method = MHpFLID(lr=0.1, distill_lr=0.01)
    assert [method.rate(name) for name in ("local_network", "receiver", "messenger", "transmitter")] == [
        0.1, 0.1, 0.01, 0.01,
    ]  # fmt: skip


def test_scaffolds_controls_are_mean_gradients_under_a_schedule(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """In round 1 all controls are zero, so that c_i is (x - y) over the sum of the rates."""
    method = Scaffold(lr=0.2, steps=4, schedule=Polynomial(power=1.0))
    mixers = {"model": Mean(uniform=True), "control": ControlVariates()}
    coordinator, runners = begin(make_job(rounds=2, mixers=mixers, method=method), table_sites, tmp_path)
    start = held(runners["anna"], "model")
    play(coordinator, runners, 1)
    total = 0.2 * sum(1 - t / 8 for t in range(4))
    for (key, old), own in zip(start.items(), held(runners["anna"], "own").values(), strict=True):
        torch.testing.assert_close(own, (old - held(runners["anna"], "model")[key]) / total, atol=1e-6, rtol=0)


@dataclass(frozen=True, kw_only=True)
class SecondRoundAlone(Schedule):
    others: float

    def factor(self, passed: float, rounds: float) -> float:
        return 1.0 if 1 <= passed < 2 else self.others


@pytest.mark.parametrize("nothing", [0.0, 1e-320, -1e-10])
def test_scaffolds_controls_stay_in_a_round_without_steps(
    nothing: float, make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    method = Scaffold(lr=0.2, steps=4, schedule=SecondRoundAlone(others=nothing))
    mixers = {"model": Mean(uniform=True), "control": ControlVariates()}
    coordinator, runners = begin(make_job(rounds=3, mixers=mixers, method=method), table_sites, tmp_path)
    controls = []
    for number in (1, 2, 3):
        play(coordinator, runners, number)
        controls.append(held(runners["anna"], "own"))
    assert not any(control.any() for control in controls[0].values())
    assert all(control.any() for control in controls[1].values()) and same(controls[1], controls[2])


def test_no_option_makes_more_leave_the_hospital() -> None:
    every = SoftPull(optimizer=Sgd(momentum=0.9), schedule=WARM, clip_gradient=1, accumulate=2, optimizer_state="reset")
    assert leaves_of(small_job(method=every)) == leaves_of(small_job(method=SoftPull()))


@pytest.mark.slow
@pytest.mark.parametrize("training", [{"schedule": WARM}, {"schedule": "polynomial", "optimizer_state": "reset"}])
def test_resumed_run_equals_an_uninterrupted_one(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, training: dict[str, Any]
) -> None:
    method = SoftPull(lr=0.05, batch_size=6, **training)
    assert_resumes(lambda: make_job(rounds=4, method=method), table_sites, tmp_path)


# -- the optimiser's state, and precision -----------------------------------------------------------------------------


def moments(runner: SiteRunner) -> float:
    """Steps that Adam's moments of anna's common network have seen."""
    (state, *_) = runner.run.optimizers["fedavg"].state.values()
    return float(state["step"])


@pytest.mark.parametrize(("state", "steps"), [("keep", 6.0), ("reset", 2.0)])
def test_the_state_is_kept_or_begins_anew(
    make_job: Make,
    table_sites: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    state: Any,
    steps: float,
) -> None:
    method = FedAvg(lr=0.05, steps=2, optimizer_state=state)
    coordinator, runners = begin(make_job(mixers={"fedavg": Mean()}, method=method), table_sites, tmp_path)
    for number in (1, 2, 3):
        play(coordinator, runners, number)
    assert moments(runners["anna"]) == steps
    exchange(runners, coordinator.end.validate_messages(coordinator.joined))
    fine_tuned, forget = list[float](), RunState.forget

    def looked_at(run: RunState) -> None:
        if run is runners["anna"].run:
            fine_tuned.append(moments(runners["anna"]))
        forget(run)

    monkeypatch.setattr(RunState, "forget", looked_at)  # which a hospital does in the end
    exchange(runners, coordinator.end.finish_messages(coordinator.joined))  # two rounds of fine-tuning, of two steps
    assert fine_tuned == [{"keep": 4.0, "reset": 2.0}[state]]


@pytest.mark.parametrize(("precision", "half"), [("auto", False), ("fp32", False), ("bf16", True)])
def test_precision_on_a_cpu(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, precision: Any, half: bool
) -> None:
    """bfloat16 in the forward pass only: weights, and what is sent, stay float32."""
    method = FedAvg(lr=0.05, batch_size=6, precision=precision)
    coordinator, runners = begin(make_job(mixers={"fedavg": Mean()}, method=method), table_sites, tmp_path)
    sent = play(coordinator, runners, 1)
    assert {tensor.dtype for tensor in sent["anna"]["fedavg"].values()} == {torch.float32}
    site = runners["anna"].rounds.site(method, 2)
    with site.autocast():
        outputs = site.models["fedavg"](next(site.training_batches()).inputs)
    assert (outputs.dtype == torch.bfloat16) is half
