# SPDX-License-Identifier: Apache-2.0
"""float16 with scaled losses: near float32, its scale kept on disk, refused where a method's gradients forbid it."""

import itertools
from functools import partial
from pathlib import Path

import pytest
import torch

from baselines import assert_resumes, begin
from every_method import EVERY, write_both
from medpfl.core.errors import ConfigError, PolicyRefused
from medpfl.methods.optimizers import Adam, Optimizer, Sgd
from medpfl.methods.precision import kept_of, left_out, restored, step_scaled, unscale
from medpfl.privacy import DPSGD
from tools import round_of

pytestmark = pytest.mark.slow

REFUSED = {name for name in EVERY if name.split(",")[0] in ("APFL", "PerFedAvg", "Scaffold")}
UNCLIPPED = {"L2GD"}
"""Refuses to have its gradients shortened."""
QUICK = {"FedAvg", "FedProx", "CusFL, both taught", *UNCLIPPED}
TRAINED = [
    pytest.param(name, device, marks=[pytest.mark.cuda] if device == "cuda" else [])
    for device in ("cpu", "cuda")
    for name in EVERY
    if name not in REFUSED and (device == "cuda" or name in QUICK)
]


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, dict[str, Path]]:
    return write_both(tmp_path_factory.mktemp("sites"))


@pytest.mark.parametrize(("name", "device"), TRAINED, indirect=["device"])
def test_float16_trains_nearly_alike(
    name: str, device: str, sites: dict[bool, dict[str, Path]], tmp_path: Path
) -> None:
    small, found = EVERY[name], {}
    for precision in ("fp32", "fp16"):
        job = small.job(precision=precision, optimizer="sgd", clip_gradient=None if name in UNCLIPPED else 1.0)
        coordinator, runners = begin(job, sites[small.images], tmp_path / precision)
        for number in (1, 2):
            round_of(coordinator, runners, number)
        found[precision] = runners["anna"]
    scalers = found["fp16"].run.scalers
    assert scalers and not found["fp32"].run.scalers
    assert all(scaler.get_scale() >= 2**8 for scaler in scalers.values())
    whole = found["fp32"].models.state_dict()
    for key, tensor in found["fp16"].models.state_dict().items():
        assert tensor.isfinite().all(), key
        if tensor.is_floating_point():
            assert (whole[key] - tensor).norm() <= 0.1 * whole[key].norm() + 0.05, key


def test_a_killed_job_goes_on_with_its_scale(sites: dict[bool, dict[str, Path]], tmp_path: Path) -> None:
    assert_resumes(lambda: EVERY["FedProx"].job(rounds=3, precision="fp16"), sites[False], tmp_path)


def test_the_scale_is_kept() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    scaler.scale(torch.ones(()))
    scaler.load_state_dict({**scaler.state_dict(), "_growth_tracker": 7})
    again = restored(kept_of({"model": scaler}), torch.device("cpu"))["model"]
    assert again.state_dict() == scaler.state_dict()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_gradients_of_a_method_s_own_are_not_lost_in_silence(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot train with the precision fp16: "):
        EVERY[name].method(precision="fp16")


def test_record_level_privacy_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot train in fp16 with DPSGD"):
        EVERY["FedAvg"].method(precision="fp16", privacy=DPSGD(noise_multiplier=1.0))


class Coarse(torch.amp.GradScaler):
    """Begins with a scale at which several steps are left out, and soon comes back to it."""

    def __init__(self, device: str = "cpu", init_scale: float = 2.0**19):
        super().__init__(device, init_scale=init_scale, growth_interval=7)


@pytest.mark.parametrize("name", ["CusFL, both taught", "MHpFLID"])
def test_networks_that_make_a_step_together_leave_it_out_together(
    name: str, sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One network's NaN is in the length to which clip_gradient shortens the others' gradients, too."""
    monkeypatch.setattr(torch.amp, "GradScaler", Coarse)
    small = EVERY[name]
    job = small.job(precision="fp16", optimizer="sgd", clip_gradient=1.0, batch_size=4)
    coordinator, runners = begin(job, sites[small.images], tmp_path)
    for number in (1, 2):
        round_of(coordinator, runners, number)
    for site, runner in runners.items():
        assert all(scaler.get_scale() < 2.0**19 for scaler in runner.run.scalers.values())
        for key, tensor in runner.models.state_dict().items():
            assert tensor.isfinite().all(), (site, key)


@pytest.mark.parametrize("kind", [Adam(), Sgd(momentum=0.9), Sgd()], ids=repr)
@pytest.mark.parametrize("wrong", [float("inf"), float("nan")])
def test_none_of_them_moves(kind: Optimizer, wrong: float) -> None:
    weights = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
    optimizers = [kind.build([weight], 0.1) for weight in weights]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for value, moves in ((wrong, False), (1.0, True)):
        scaler.scale(torch.ones(()))
        weights[0].grad = torch.tensor([1.0, value])
        weights[1].grad = torch.ones(2)  # the third has none
        unscale(scaler, optimizers)
        torch.nn.utils.clip_grad_norm_(weights, 0.5)
        told = [left_out(scaler, one) for one in optimizers[:2]]
        assert [found is not None and bool(found) for found in told] == [not moves, not moves]
        step_scaled(scaler, optimizers)
        assert [not torch.equal(weight, torch.ones(2)) for weight in weights] == [moves, moves, False]
    assert scaler.get_scale() == 2.0


def test_exchanges_within_a_round_go_on_with_their_scale(
    sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each began anew with the largest one: where all its few steps were left out, the shared part stayed as it was."""
    monkeypatch.setattr(torch.amp, "GradScaler", partial(Coarse, init_scale=2.0**26))
    job = EVERY["PFedNet, alternating"].job(rounds=8, precision="fp16", optimizer="sgd")
    coordinator, runners = begin(job, sites[False], tmp_path)
    shared = coordinator.rounds.train_messages(1, ["anna"])["anna"].slots["shared"]
    for number in range(1, 9):
        round_of(coordinator, runners, number)
    after = coordinator.rounds.train_messages(9, ["anna"])["anna"].slots["shared"]
    assert all(not torch.equal(shared[key], after[key]) for key in shared if key.endswith("weight"))
    assert runners["anna"].run.scalers.keys() == {"model", "model.apart"}


def test_a_killed_job_goes_on_with_the_scale_of_its_exchanges(
    sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.amp, "GradScaler", Coarse)
    small = EVERY["PFedNet, alternating"]
    assert_resumes(lambda: small.job(rounds=4, precision="fp16"), sites[False], tmp_path)


def test_a_step_that_was_left_out_has_no_samples_behind_it(sites: dict[bool, dict[str, Path]], tmp_path: Path) -> None:
    """A hospital's policy asks for a least number of samples behind what leaves."""
    small, found = EVERY["FedAvg"], {}
    for scale in (2.0**16, 2.0**120):  # beyond all gradients: no step is made
        job = small.job(precision="fp16", optimizer="sgd")
        coordinator, runners = begin(job, sites[small.images], tmp_path / str(scale))
        round_of(coordinator, runners, 1)
        site = runners["anna"].rounds.site(runners["anna"].method, 2)
        first = next(iter(site.models))
        site._scalers[first] = torch.amp.GradScaler("cpu", init_scale=scale)
        before = {key: tensor.detach().clone() for key, tensor in site.models[first].named_parameters()}
        site.fit(first)
        moved = any(not torch.equal(tensor, before[key]) for key, tensor in site.models[first].named_parameters())
        found[scale] = moved, site.behind[first, 0].effective
    assert found[2.0**16][0] and 1 < found[2.0**16][1] < float("inf")
    assert found[2.0**120] == (False, float("inf"))


def test_where_nearly_all_steps_were_left_out_the_refusal_says_so(
    sites: dict[bool, dict[str, Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It named schedules, decay and weights of classes, of which the job has none."""
    made = itertools.chain([0.0], itertools.repeat(1.0))
    monkeypatch.setattr("medpfl.methods.site.left_out", lambda scaler, optimizer: torch.tensor(next(made)))
    coordinator, runners = begin(EVERY["FedAvg"].job(precision="fp16", batch_size=2), sites[False], tmp_path)
    with pytest.raises(PolicyRefused, match="weights of classes, or because fp16 left out most of the steps"):
        round_of(coordinator, runners, 1)
