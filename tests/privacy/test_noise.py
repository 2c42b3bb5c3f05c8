# SPDX-License-Identifier: Apache-2.0
"""Clipping, noise, lots and gradients case by case, against computations apart from the package."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from medpfl.privacy.accountant import epsilon
from medpfl.privacy.contract import Mechanism
from medpfl.privacy.lots import Lot, RecordNoise
from medpfl.privacy.noise import FIXED, Gaussian, Stream, fixed_secret, new_secret

SECRET = "ab" * 32


def test_an_addend_is_never_longer_than_the_clip_over_all_tensors_together() -> None:
    long, short = [torch.full((3, 4), 30.0), torch.full((5,), -40.0)], [torch.full((3, 4), 0.01), torch.zeros(5)]
    total = Gaussian(long, 2.0, 1.0)
    total.add(long)
    assert torch.cat([part.flatten() for part in total.clipped]).norm() == pytest.approx(2.0, abs=1e-4)
    total.add(short)  # is taken as it is
    expected = [2.0 / math.sqrt(12 * 900 + 5 * 1600) * part + more for part, more in zip(long, short, strict=True)]
    for found, wanted in zip(total.clipped, expected, strict=True):
        assert torch.allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
def test_weights_of_half_precision_are_shortened_and_summed_in_float32(kind: torch.dtype) -> None:
    """From 128 on a sum in bfloat16 goes in steps of 1: a case that is 0.6 in each of four values and 1.2 long would
    move it by 2, further than any noise was made for, and one that is 0.4 would not be in it at all."""
    case = [torch.full((4,), 0.5, dtype=kind), torch.tensor(0.25, dtype=kind)]
    total = Gaussian(case, 1.0, 0.5)
    sums = []
    for _ in range(300):
        total.add(case)
        sums.append(torch.cat([part.double().flatten() for part in total.clipped]))
    moved = torch.stack([after - before for before, after in itertools.pairwise(sums)]).norm(dim=1)
    assert float(moved.max()) <= 1.0001 and float(moved.min()) == pytest.approx(1.0, abs=1e-3)
    assert [part.dtype for part in total.with_noise(Stream(SECRET))] == [kind, kind]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_an_addend_that_is_not_finite_is_no_sign_that_noise_cannot_hide(value: float) -> None:
    whole, odd = [torch.full((3,), 0.1), torch.full((2,), 0.2)], [torch.tensor([0.1, value, 0.1]), torch.zeros(2)]
    total = Gaussian(whole, 1.0, 1.0)
    for one in (whole, odd):
        total.add(one)
    assert all(torch.allclose(found, one) for found, one in zip(total.clipped, whole, strict=True))
    assert all(found.isfinite().all() for found in total.with_noise(Stream(SECRET)))


def test_noise_has_the_stated_deviation_and_is_another_one_for_every_message() -> None:
    def drawn(*parts: object) -> Tensor:
        total = Gaussian([torch.zeros(100_000)], 0.5, 3.0)
        total.add(None)
        return total.with_noise(Stream(SECRET, parts))[0]

    noise = drawn("update", 1)
    assert float(noise.std()) == pytest.approx(1.5, rel=0.01)
    assert abs(float(noise.mean())) < 4 * 1.5 / math.sqrt(100_000)
    assert abs(float((noise * drawn("update", 2)).mean())) < 4 * 1.5**2 / math.sqrt(100_000)
    assert torch.equal(noise, drawn("update", 1)) and not torch.equal(noise, drawn("update", 2))


def test_only_the_secret_says_what_the_noise_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FIXED, raising=False)
    assert fixed_secret("anna") is None and new_secret() != new_secret()
    assert Stream(SECRET, (1,)).seed() != Stream("cd" * 32, (1,)).seed()
    monkeypatch.setenv(FIXED, "3")
    assert fixed_secret("anna") == fixed_secret("anna") != fixed_secret("berta")


def test_noise_and_lots_are_not_found_by_trying_every_seed_of_a_generator() -> None:
    """PyTorch's generator on a processor takes 32 bits of a seed. Whoever tries them all, which takes a day, would find
    the noise of a message: the seed with which what lies under it is no longer than the clip."""
    assert torch.equal(torch.rand(9, generator=by_torch(5)), torch.rand(9, generator=by_torch(5 + 2**32)))
    stream, total = Stream(SECRET, ("update", 1)), Gaussian([torch.zeros(1000)], 1.0, 1.0)
    total.add(None)
    generator = by_torch(stream.seed())
    torch.normal(0.0, 1.0, (1, 1), generator=generator)
    guessed = torch.stack([torch.normal(0.0, 1.0, (1000,), generator=generator) for _ in range(4)]).sum(dim=0) / 2
    assert not torch.allclose(total.with_noise(stream)[0], guessed)

    lots: list[list[int]] = [[] for _ in range(3)]
    for lot, case in RecordNoise(1.0, 1.0, (), stream).lots(100, 50, 3):
        lots[lot.index].append(case)
    generator = by_torch(stream.of("lots", 0).seed())
    drawn = [torch.rand(100, generator=generator, dtype=torch.float64) < 0.5 for _ in range(3)]
    assert lots != [each.nonzero()[:, 0].tolist() for each in drawn]


def by_torch(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_numbers_from_the_key_stream_are_uniform_and_normal() -> None:
    """Against scipy's distributions, tails included; the draws of one stream are independent of each other."""
    from scipy.stats import kstest, norm

    numbers = Stream(SECRET, ("numbers",)).numbers()
    uniform, normal = numbers.uniform(200_000), numbers.normal(1_000_001)
    assert float(uniform.min()) >= 0 and float(uniform.max()) < 1
    assert kstest(uniform.numpy(), "uniform").pvalue > 1e-3 and kstest(normal.numpy(), "norm").pvalue > 1e-3
    for reach in (3.0, 4.0):
        expected = 1_000_001 * 2 * norm.sf(reach)
        assert abs(int((normal.abs() > reach).sum()) - expected) < 5 * math.sqrt(expected)
    once, again = Stream(SECRET, ("a",)).numbers(), Stream(SECRET, ("a",)).numbers()
    assert torch.equal(once.normal(70_001), again.normal(70_001)) and once.normal(0).numel() == 0
    first, second = once.normal(100_000), once.normal(100_000)
    other = Stream("cd" * 32, ("a",)).numbers().normal(100_000)
    for one, two in ((first, second), (first, other), (first[:50_000], first[50_000:])):
        assert abs(float((one * two).mean())) < 5 / math.sqrt(len(one))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 3))


def test_a_lot_s_gradient_is_the_sum_of_single_clipped_ones() -> None:
    """Against Opacus' per-sample gradients, and against autograd case by case."""
    model, loss = network(), nn.functional.cross_entropy
    inputs, targets = torch.randn(40, 1, 8, 8), torch.arange(40) % 3
    clip, noise = 0.7, RecordNoise(1e-7, 0.7, (), Stream(SECRET))
    weights, lot, drawn = list(model.parameters()), None, []
    for lot, case in noise.lots(40, 20, 1):
        drawn.append(case)
        moved = noise.add(lot, ("model",), weights, loss(model(inputs[[case]]), targets[[case]]))
        assert moved == lot.last
    assert lot is not None and lot.expected == 20 and 8 < len(drawn) < 32
    found = [weight.grad.clone() for weight in weights if weight.grad is not None]

    from opacus import GradSampleModule

    hooked = GradSampleModule(network(), loss_reduction="mean")
    loss(hooked(inputs[drawn]), targets[drawn]).backward()
    per_case = [weight.grad_sample for weight in hooked.parameters()]  # type: ignore[attr-defined]
    for number, case in enumerate(drawn):
        alone = torch.autograd.grad(loss(model(inputs[[case]]), targets[[case]]), weights)
        for one, other in zip(alone, per_case, strict=True):
            assert torch.allclose(one, other[number], atol=1e-5)
    lengths = torch.stack([part.flatten(1).norm(dim=1) for part in per_case]).norm(dim=0)
    assert (lengths > clip).any()
    factors = (clip / lengths).clamp(max=1.0)
    for part, mine in zip(per_case, found, strict=True):
        assert torch.allclose(torch.einsum("i,i...", factors, part) / 20, mine, atol=1e-5)


def test_lots_are_drawn_case_by_case_and_an_empty_one_makes_its_step_too() -> None:
    noise = RecordNoise(1.0, 1.0, (), Stream(SECRET))
    sizes: dict[int, int] = {}
    for lot, _ in noise.lots(50, 5, 200):
        sizes[lot.index] = 0 if lot.blank else lot.of
    assert len(sizes) == 200 and len(set(sizes.values())) > 5
    assert sum(sizes.values()) / 200 == pytest.approx(5, abs=4 * math.sqrt(4.5 / 200))

    weight = nn.Parameter(torch.zeros(3))
    blank = Lot(0, 1, passed=0, index=0, expected=1.0, rate=0.02, blank=True)
    assert noise.add(blank, ("model",), [weight], (weight + 100).sum())
    assert weight.grad is not None and 0 < weight.grad.abs().max() < 10  # noise alone
    assert noise.mechanisms() == [Mechanism(1.0, 0.02, 1)]


def test_two_networks_that_see_one_lot_are_accounted_for_together() -> None:
    noise = RecordNoise(2.0, 1.0, (), Stream(SECRET))
    weight = nn.Parameter(torch.zeros(1))
    for lot, _ in noise.lots(10, 10, 3):
        for name in ("one", "other"):
            noise.add(lot, (name,), [weight], weight.sum())
    assert noise.mechanisms() == [Mechanism(2.0 / math.sqrt(2), 1.0, 3)]


def advantage(sigma: float, trials: int = 200) -> tuple[float, float]:
    """How often whoever sees the step says "the patient is there", where it is and where it is not."""
    weight, said = nn.Parameter(torch.zeros(1)), {True: 0, False: 0}
    for trial in range(trials):
        for there in said:
            noise = RecordNoise(sigma, 1.0, (), Stream(SECRET, (trial, there)))
            for lot, case in noise.lots(4, 4, 1):
                noise.add(lot, ("model",), [weight], weight.sum() * (50.0 if there and case == 3 else 0.0))
            assert weight.grad is not None
            said[there] += bool(weight.grad * 4 > 0.5)
    return said[True] / trials, said[False] / trials


@pytest.mark.slow
def test_a_canary_is_found_no_more_often_than_epsilon_allows() -> None:
    """One patient with an enormous gradient, in or out: P(found | in) <= e^eps P(found | out) + delta."""
    claimed = epsilon([Mechanism(1.5, 1.0, 1)], 0.05)
    there, not_there = advantage(1.5)
    assert there <= math.exp(claimed) * not_there + 0.05 + 3 * 0.5 / math.sqrt(200)
    there, not_there = advantage(0.05)  # with too little noise, the same attack breaks the same bound
    assert there > math.exp(claimed) * not_there + 0.05 + 3 * 0.5 / math.sqrt(200)
