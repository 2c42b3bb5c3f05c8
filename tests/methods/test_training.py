# SPDX-License-Identifier: Apache-2.0
"""What every method's training is made of: optimisers, clipping, accumulation. A round against torch's own loop."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from baselines import begin, play
from medpfl.component import build, spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mean
from medpfl.job import load_job
from medpfl.methods.batches import Place
from medpfl.methods.contract import Method
from medpfl.methods.fedavg import FedAvg
from medpfl.methods.optimizers import Adam, AdamW, Optimizer, Sgd
from medpfl.methods.references import like
from medpfl.methods.site import Site
from medpfl.methods.softpull import SoftPull
from small_jobs import small_job
from tools import Make, run, write_job

NNUNET = Sgd(momentum=0.99, nesterov=True, weight_decay=3e-5)


def site_of(make_job: Make, sites: dict[str, Path], folder: Path, **training: Any) -> Site:
    """anna in round 2, whose optimiser has a state by then."""
    method = FedAvg(lr=0.05, batch_size=6, **training)
    coordinator, runners = begin(make_job(mixers={"fedavg": Mean()}, method=method), sites, folder)
    play(coordinator, runners, 1)
    runners["anna"].run.optimizers.clear()
    return runners["anna"].rounds.site(method, 2)


def by_hand(
    site: Site, make: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], clip: float | None, groups: list[int]
) -> list[Tensor]:
    """The weights after a round of torch's own loop, with so many batches in each step."""
    network = site.task.network(site.data)
    network.load_state_dict(site.models["fedavg"].state_dict())
    optimizer = make(network.parameters())
    batches = list(site.training_batches())
    assert sum(groups) == len(batches)
    for size in groups:
        optimizer.zero_grad()
        for batch in [batches.pop(0) for _ in range(size)]:
            loss = site.task.loss(network(batch.inputs), batch.targets) / size
            loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(network.parameters(), clip)
        optimizer.step()
    return list(network.parameters())


LOOPS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "adam": ({}, lambda weights: torch.optim.Adam(weights, lr=0.05)),
    "AdamW": (
        {"optimizer": AdamW(weight_decay=0.3, betas=(0.8, 0.99), eps=1e-6)},
        lambda weights: torch.optim.AdamW(weights, lr=0.05, weight_decay=0.3, betas=(0.8, 0.99), eps=1e-6),
    ),
    "Adam with weight decay": (
        {"optimizer": Adam(weight_decay=0.3)},
        lambda weights: torch.optim.Adam(weights, lr=0.05, weight_decay=0.3),
    ),
    "nnU-Net's": (
        {"optimizer": NNUNET},
        lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.99, nesterov=True, weight_decay=3e-5),
    ),
    "momentum": ({"optimizer": Sgd(momentum=0.9)}, lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_round_equals_torchs_own_loop(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, name: str
) -> None:
    training, make = LOOPS[name]
    site = site_of(make_job, table_sites, tmp_path, **training)
    expected = by_hand(site, make, None, [1] * 4)
    before = [weight.detach().clone() for weight in site.models["fedavg"].parameters()]
    site.fit("fedavg")
    for weight, wanted, old in zip(site.models["fedavg"].parameters(), expected, before, strict=True):
        torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=1e-5)
        assert not torch.equal(weight, old)


@pytest.mark.parametrize(("accumulate", "groups"), [(1, [1] * 4), (2, [2, 2]), (3, [3, 1]), (9, [4])])
@pytest.mark.parametrize("clip", [None, 0.02])
def test_batches_are_gathered_and_gradients_are_clipped(
    make_job: Make,
    table_sites: dict[str, Path],
    tmp_path: Path,
    accumulate: int,
    groups: list[int],
    clip: float | None,
) -> None:
    """The last step of a pass takes what is left, down the mean of its own batches."""
    training = {"optimizer": Sgd(momentum=0.9), "accumulate": accumulate, "clip_gradient": clip}
    site = site_of(make_job, table_sites, tmp_path, **training)
    expected = by_hand(site, lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9), clip, groups)
    site.fit("fedavg")
    for weight, wanted in zip(site.models["fedavg"].parameters(), expected, strict=True):
        torch.testing.assert_close(weight, wanted, atol=1e-6, rtol=1e-5)


def test_clipping_shortens_what_is_too_long(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    site = site_of(make_job, table_sites, tmp_path, optimizer="sgd", clip_gradient=0.01)
    before = [weight.detach().clone() for weight in site.models["fedavg"].parameters()]
    batch = next(site.training_batches())
    site.step("fedavg", 100 * site.task.loss(site.models["fedavg"](batch.inputs), batch.targets))
    moved = [new - old for new, old in zip(site.models["fedavg"].parameters(), before, strict=True)]
    assert float(nn.utils.get_total_norm(moved)) == pytest.approx(0.05 * 0.01, rel=1e-3)


def test_a_term_is_added_once_a_step(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    site, called = site_of(make_job, table_sites, tmp_path, accumulate=3), list[int]()
    site.fit("fedavg", lambda: called.append(1))
    assert len(called) == 2


@pytest.mark.parametrize("size", [1, 6, 7, 100])
def test_a_pass_over_the_data_and_its_places(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, size: int
) -> None:
    """Only a rest of a single sample is left out; with batches of one sample each is taken."""
    method = FedAvg(batch_size=size, epochs=2)
    _, runners = begin(make_job(mixers={"fedavg": Mean()}, method=method), table_sites, tmp_path)
    runners["anna"].run.optimizers = {}
    site = runners["anna"].rounds.site(method, 1)
    batches = list(site.training_batches())
    count = len(site.data.splits["train"])
    taken = sum(len(batch.inputs) for batch in batches)
    assert taken == 2 * (count - (count % size == 1 and size > 1))
    assert [batch.place for batch in batches] == [Place(number, len(batches)) for number in range(len(batches))]


def test_a_short_name_is_its_component(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    for name, component in (("adam", Adam()), ("sgd", Sgd())):
        short, long = (
            site_of(make_job, table_sites, tmp_path / f"{name}{place}", optimizer=given)
            for place, given in enumerate((name, component))
        )
        for site in (short, long):
            site.fit("fedavg")
        state = long.models["fedavg"].state_dict()
        assert all(torch.equal(value, state[key]) for key, value in short.models["fedavg"].state_dict().items())


@pytest.mark.parametrize("optimizer", [AdamW(), NNUNET, Adam(betas=(0.5, 0.9))])
def test_a_job_names_the_optimiser(optimizer: Optimizer, tmp_path: Path) -> None:
    method = SoftPull(optimizer=optimizer, clip_gradient=12, accumulate=2)
    assert load_job(write_job(small_job(method=method), tmp_path / "job")).method == method
    assert build(spec_of(method), Method, "method") == method
    assert like("fedavg", method) == FedAvg(optimizer=optimizer, clip_gradient=12, accumulate=2)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Sgd(momentum=1.0), r"Sgd's momentum must be in \[0, 1\), got 1"),
        (lambda: Sgd(nesterov=True), "Sgd's nesterov needs a momentum above 0"),
        (lambda: AdamW(weight_decay=-1.0), "AdamW's weight_decay must be at least 0, got -1"),
        (lambda: Adam(betas=(0.9, 1.0)), r"Adam's betas must be in \[0, 1\), got \[0.9, 1.0\]"),
        (lambda: Adam(eps=0.0), "Adam's eps must be above 0, got 0"),
        (lambda: FedAvg(clip_gradient=0.0), "FedAvg's clip_gradient must be above 0, or null, got 0"),
        (lambda: FedAvg(accumulate=0), "FedAvg's accumulate must be at least 1, got 0"),
        (lambda: FedAvg(optimizer="lion"), "'optimizer' of FedAvg must be 'adam' or 'sgd' or an Optimizer, got 'lion'"),
        (lambda: FedAvg(clip_gradients=1.0), r"unknown argument 'clip_gradients' .* did you mean 'clip_gradient'\?"),
    ],
)
def test_what_makes_no_sense_is_refused(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        make()


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", [NNUNET, AdamW()])
def test_resumed_run_equals_an_uninterrupted_one(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, optimizer: Optimizer
) -> None:
    from baselines import assert_resumes

    method = SoftPull(lr=0.05, batch_size=6, optimizer=optimizer, clip_gradient=0.5, accumulate=2)
    assert_resumes(lambda: make_job(rounds=4, method=method), table_sites, tmp_path)
    plain = SoftPull(lr=0.05, batch_size=6)
    assert (
        run(make_job(rounds=1, method=method), table_sites, tmp_path / "1")["scores"]
        != (run(make_job(rounds=1, method=plain), table_sites, tmp_path / "2")["scores"])
    )
