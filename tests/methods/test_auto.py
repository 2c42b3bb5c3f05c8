# SPDX-License-Identifier: Apache-2.0
"""Auto: what travels, what each of its models is, and that a hospital's mixture is the best on its validation cases,
by the rounds so far."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from baselines import assert_resumes, begin, held, play, same, served
from medpfl.core.mixers import Identity, Mean
from medpfl.data.samples import empty_like
from medpfl.data.target import Target
from medpfl.deployed.export import export
from medpfl.job import Job
from medpfl.methods.auto import KEPT, MEMBERS, MIXTURES, Auto, Mixture, Record
from medpfl.methods.contract import Site
from tools import normed, run

Make = Callable[..., Job]
BESIDE = {"local": Identity(), "fedavg": Mean(), "shared": Mean()}
SETTINGS = {"lr": 0.05, "batch_size": 4, "epochs": 2}


def forget(site: Site) -> None:
    """As if no round had been before."""
    for buffer in site.models["record"].buffers():
        buffer.zero_()


def losses_of(probabilities: list[Tensor], truth: Tensor) -> Tensor:
    """Every mixture's mean loss, from the members' probabilities of class 1."""
    mixed = (sum(share * one for share, one in zip(shares, probabilities, strict=True)) for shares in MIXTURES)
    return torch.stack([nn.functional.binary_cross_entropy(one, truth) for one in mixed])


@pytest.mark.slow
def test_its_own_model_is_local_training_and_all_of_the_common_one_travels(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(make_job(mixers=BESIDE, method=Auto(**SETTINGS), task=normed()), table_sites, tmp_path)
    for number in (1, 2):
        before = {site: held(runner, "shared") for site, runner in runners.items()}
        sent = play(coordinator, runners, number)
        for site, runner in runners.items():
            assert same(held(runner, "own"), held(runner, "local"))
            tuned = held(runner, "tuned")
            assert same({key.partition(".")[2]: tensor for key, tensor in sent[site]["shared"].items()}, tuned)
            assert not same(before[site], tuned)
    runner = runners["anna"]
    play(coordinator, runners, 3)
    assert not same(held(runner, "tuned"), held(runner, "own"))


def test_of_the_mixed_batch_norm_and_its_own_a_hospital_keeps_what_loses_less(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Both kinds of layers are made, and the losses of the common model with each computed apart."""
    coordinator, runners = begin(make_job(mixers=BESIDE, method=Auto(**SETTINGS), task=normed()), table_sites, tmp_path)
    play(coordinator, runners, 1)
    taken = set()
    for runner in runners.values():
        for scale in (1.0, -2.0, 0.3):
            site = runner.rounds.site(runner.method, 2)
            samples, shared, tuned = site.data.splits["validation"], site.models["shared"], site.models["tuned"]
            torch.nn.init.constant_(tuned.get_parameter("1.weight"), scale)
            tuned.get_buffer("1.running_mean").add_(0.1)
            mixed, own = copy.deepcopy(shared).eval(), copy.deepcopy(shared).eval()
            own[1].load_state_dict(tuned[1].state_dict())
            losses = []
            for network in (mixed, own):
                with torch.no_grad():
                    said = network(samples.inputs[:]).double().flatten()
                truth = samples.targets[:].double().flatten()
                losses.append(nn.functional.binary_cross_entropy_with_logits(said, truth).item())
            forget(site)
            site.method.after_mixing(site)
            at_home = losses[1] < losses[0]
            assert same(dict(shared.state_dict()), dict((own if at_home else mixed).state_dict()))
            taken.add(at_home)
    assert taken == {True, False}


def test_without_validation_cases_batch_norm_stays_at_home(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(make_job(mixers=BESIDE, method=Auto(**SETTINGS), task=normed()), table_sites, tmp_path)
    play(coordinator, runners, 1)
    site = runners["anna"].rounds.site(runners["anna"].method, 2)
    site.data.splits["validation"] = empty_like(site.data.splits["validation"])
    tuned = site.models["tuned"]
    for name, tensor in (("0.weight", tuned[0].weight), ("1.running_mean", tuned[1].running_mean)):
        assert torch.equal(site.models["shared"].state_dict()[name], tensor)  # nothing is mixed yet
        tensor.data.add_(1.0)
    site.method.after_mixing(site)
    shared = site.models["shared"]
    assert same(dict(shared[1].state_dict()), dict(tuned[1].state_dict()))
    assert not torch.equal(shared[0].weight, tuned[0].weight)
    assert site.models["mix"].get_buffer("weights").tolist() == pytest.approx(MIXTURES[0])


@pytest.mark.slow
def test_without_batch_norm_all_of_it_travels_as_in_fedavg(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    coordinator, runners = begin(make_job(mixers=BESIDE, method=Auto(**SETTINGS)), table_sites, tmp_path)
    for number in (1, 2):
        play(coordinator, runners, number)
        mixed = coordinator.rounds.train_messages(number + 1, coordinator.joined)["anna"].slots
        assert same(served(coordinator, "shared"), {key.partition(".")[2]: t for key, t in mixed["fedavg"].items()})


def test_the_mixture_has_the_least_validation_loss(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Every mixture's loss computed apart, from its probabilities."""
    coordinator, runners = begin(make_job(mixers=BESIDE, method=Auto(**SETTINGS)), table_sites, tmp_path)
    for number in (1, 2):
        play(coordinator, runners, number)
    taken = []
    for runner in runners.values():
        for better in MEMBERS:  # the output of one of them is made to be right, of the others to be wrong
            site = runner.rounds.site(runner.method, 3)
            samples = site.data.splits["validation"]
            probabilities = []
            for name in MEMBERS:
                network = site.models[name].eval()
                if name != better:
                    for weight in network.parameters():
                        weight.data.mul_(-0.5)
                with torch.no_grad():
                    probabilities.append(network(samples.inputs[:]).sigmoid().double().flatten())
            forget(site)
            site.method.after_mixing(site)
            found = site.models["mix"].get_buffer("weights")
            best = int(losses_of(probabilities, samples.targets[:].double().flatten()).argmin())
            assert torch.equal(found, torch.tensor(MIXTURES[best]))
            taken.append(best)
    assert len(set(taken)) > 1


def test_the_mixture_goes_by_the_mean_loss_of_the_rounds_so_far(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Each round's losses computed apart, and their weighted mean; some round alone would have chosen otherwise."""
    coordinator, runners = begin(make_job(mixers=BESIDE, method=Auto(**SETTINGS)), table_sites, tmp_path)
    play(coordinator, runners, 1)
    differed = False
    for runner in runners.values():
        samples = runner.data.splits["validation"]
        rounds: list[Tensor] = []
        for better in ("own", "own", "shared", "shared", "shared", "shared", "tuned"):
            site = runner.rounds.site(runner.method, len(rounds) + 1)
            for name in MEMBERS:  # right with probability 0.7, the others with 0.4
                for module in site.models[name].modules():
                    if isinstance(module, nn.Linear):
                        nn.init.zeros_(module.weight)
                        nn.init.constant_(module.bias, 0.7 if name == better else 0.4)
            said = [torch.full((len(samples),), bias).double().sigmoid() for bias in (0.0, 0.0, 0.0)]
            for place, name in enumerate(MEMBERS):
                with torch.no_grad():
                    said[place] = site.models[name].eval()(samples.inputs[:]).sigmoid().double().flatten()
            rounds.append(losses_of(said, samples.targets[:].double().flatten()))
            site.method.after_mixing(site)
            ages = reversed(range(len(rounds)))
            mean = sum(KEPT**age * one for age, one in zip(ages, rounds, strict=True))
            best, alone = int(mean.argmin()), int(rounds[-1].argmin())
            assert torch.equal(site.models["mix"].get_buffer("weights"), torch.tensor(MIXTURES[best]))
            differed |= best != alone
    assert differed


@pytest.mark.slow
def test_the_record_of_losses_survives_a_restart_and_is_no_part_of_the_deployed_model(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    assert_resumes(
        lambda: make_job(rounds=4, mixers=BESIDE, method=Auto(**SETTINGS), task=normed()), table_sites, tmp_path
    )
    found = []
    for home in (tmp_path / "whole" / "home", tmp_path / "home"):
        folder = home / "anna" / "small"
        assert not any("record." in key for key in load_file(folder / "models" / "personal-last.safetensors"))
        newest = max(folder.glob("state/*/private-*.safetensors"), key=lambda path: path.name)
        found.append({key: tensor for key, tensor in load_file(newest).items() if key.startswith("model/record.")})
    assert len(found[0]) == 2 and same(*found)
    assert float(found[0]["model/record.weight"]) == pytest.approx(1 - KEPT**3)  # after the rounds 1, 2 and 3


def test_where_training_draws_all_classes_alike_the_mixtures_loss_counts_them_alike(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path
) -> None:
    """Each model says one probability of every case; of which mixture the loss is least then depends on how the classes
    count."""
    task = replace(normed(), sampling="balanced")
    coordinator, runners = begin(make_job(mixers=BESIDE, method=Auto(**SETTINGS), task=task), table_sites, tmp_path)
    play(coordinator, runners, 1)
    differed = False
    for runner in runners.values():
        site = runner.rounds.site(runner.method, 2)
        sick = site.data.splits["validation"].targets[:].double().mean()
        said = torch.tensor([0.1, 0.55, 0.8], dtype=torch.float64)
        for name, probability in zip(MEMBERS, said, strict=True):
            last = [module for module in site.models[name].modules() if isinstance(module, nn.Linear)][-1]
            last.weight.data.zero_()
            last.bias.data.fill_(float(probability.logit()))
        site.method.after_mixing(site)
        mixed = torch.tensor(MIXTURES, dtype=torch.float64) @ said

        def least(share: Tensor, mixed: Tensor = mixed) -> int:
            return int((-share * mixed.log() - (1 - share) * (1 - mixed).log()).round(decimals=6).argmin())

        best = least(torch.tensor(0.5))
        differed |= best != least(sick)
        assert torch.equal(site.models["mix"].get_buffer("weights"), torch.tensor(MIXTURES[best]))
    assert differed


def test_without_validation_cases_all_count_alike() -> None:
    mix = Mixture(Target.VALUE)
    found = mix(*(torch.full((4, 1), value) for value in (0.0, 3.0, 6.0)))
    torch.testing.assert_close(found, torch.full((4, 1), 3.0))


@pytest.mark.parametrize("kind", ["torchscript", "onnx"])
@pytest.mark.slow
def test_the_mixture_can_be_exported(make_job: Make, table_sites: dict[str, Path], tmp_path: Path, kind: str) -> None:
    run(make_job(mixers=BESIDE, method=Auto(**SETTINGS), task=normed()), table_sites, tmp_path)
    model = tmp_path / "home" / "anna" / "small" / "models" / "personal-last.safetensors"
    export(model, tmp_path / "given", kind)  # compares the outputs itself


@pytest.mark.slow
def test_the_shares_are_told(make_job: Make, table_sites: dict[str, Path], tmp_path: Path) -> None:
    result = run(make_job(mixers=BESIDE, method=Auto(**SETTINGS)), table_sites, tmp_path)
    told = [line for line in result["scores"] if line["model"] in MEMBERS and line["site"] == "anna"]
    for number in (1, 2, 3):
        shares = {line["model"]: line["metrics"][line["model"]] for line in told if line["round"] == number}
        assert tuple(shares[name] for name in MEMBERS) in [pytest.approx(mixture) for mixture in MIXTURES]


@pytest.mark.parametrize("broken", ["own", "tuned"])
def test_a_model_that_broke_gets_no_share_while_it_is_broken(
    make_job: Make, table_sites: dict[str, Path], tmp_path: Path, broken: str
) -> None:
    """Every mixture was NaN by it, for ever, and so was the hospital's model. The tuned one is made anew every round,
    its own is not."""
    coordinator, runners = begin(make_job(4, BESIDE, Auto(**SETTINGS)), table_sites, tmp_path)
    anna = runners["anna"]
    for number in (1, 2):
        play(coordinator, runners, number)
    for weight in anna.models[broken].parameters():
        torch.nn.init.constant_(weight, torch.nan)
    play(coordinator, runners, 3)  # begins with the choice of a mixture
    assert anna.models["mix"].get_buffer("weights")[MEMBERS.index(broken)] == 0
    with torch.no_grad():
        assert anna.method.predict("personal", anna.models.eval(), anna.data.splits["test"].inputs[:]).isfinite().all()
    play(coordinator, runners, 4)
    assert bool(anna.models["record"].get_buffer("losses").isfinite().all()) == (broken == "tuned")


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_the_mean_of_losses_begins_anew_after_one_that_is_not_finite(broken: float) -> None:
    """A squared error that overflowed in one round counted as the largest number there is in all rounds after it."""
    record, losses = Record(1), torch.ones(1, len(MIXTURES), dtype=torch.float64)
    record.with_round(losses)
    bad = losses.clone()
    bad[0, 2] = broken
    assert record.with_round(bad)[0, 2] == torch.inf
    assert record.with_round(losses).tolist() == [pytest.approx([1.0] * len(MIXTURES))]
