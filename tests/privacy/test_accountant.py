# SPDX-License-Identifier: Apache-2.0
"""The account of noise is that of Opacus' accountant."""

import pytest

from medpfl.core.errors import ConfigError
from medpfl.privacy import DPSGD, ClippedNoise
from medpfl.privacy.accountant import epsilon, noise_for
from medpfl.privacy.contract import MOST_EPSILON, Mechanism, Spent

DELTA = 1e-5


def by_opacus(history: list[Mechanism], delta: float = DELTA) -> float:
    """The accountant itself, told of every step."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for noise, rate, steps in history:
        for _ in range(steps):
            accountant.step(noise_multiplier=noise, sample_rate=rate)
    return float(accountant.get_epsilon(delta=delta))


@pytest.mark.slow
@pytest.mark.parametrize(
    "history",
    [
        [Mechanism(1.1, 0.05, 200)],
        [Mechanism(0.8, 0.25, 40), Mechanism(1.3, 0.1, 100), Mechanism(0.8, 0.25, 2)],
        [ClippedNoise(clip=0.5, noise_multiplier=5.0).mechanism()] * 30,
    ],
)
def test_epsilon_is_opacus_own(history: list[Mechanism]) -> None:
    assert epsilon(history, DELTA) == pytest.approx(by_opacus(history), rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("history", "ours", "prv"),
    [
        ([Mechanism(1.1, 0.05, 200)], 4.44, 3.97),
        ([Mechanism(0.8, 0.25, 40), Mechanism(1.3, 0.1, 100), Mechanism(0.8, 0.25, 2)], 19.82, 17.91),
        ([Mechanism(2.5, 1.0, 30)], 11.99, 11.20),
    ],
)
def test_the_other_accountant_says_a_tenth_less(history: list[Mechanism], ours: float, prv: float) -> None:
    """The numbers of docs/privacy.md: ours is on the safe side of Opacus' PRV accountant."""
    from opacus.accountants import PRVAccountant

    other = PRVAccountant()
    other.history = [(one.noise_multiplier, one.sample_rate, one.steps) for one in history]
    assert epsilon(history, DELTA) == pytest.approx(ours, abs=0.01)
    assert other.get_epsilon(delta=DELTA) == pytest.approx(prv, abs=0.02)


@pytest.mark.slow
def test_epsilon_is_never_below_zero() -> None:
    """Opacus' bound is, where delta is large and hardly anything was sent; a job could not say it then."""
    nearly_nothing = [Mechanism(100.0, 0.01, 1)]
    assert by_opacus(nearly_nothing, delta=0.1) < 0 == epsilon(nearly_nothing, 0.1)
    assert Spent(level="record", epsilon=epsilon(nearly_nothing, 0.1), delta=0.1, releases=1)


def test_an_update_costs_what_noise_on_twice_the_clip_costs() -> None:
    assert ClippedNoise(clip=7.0, noise_multiplier=3.0).mechanism() == Mechanism(1.5, 1.0, 1)


def test_nothing_costs_nothing_and_noise_that_hides_nothing_the_most() -> None:
    assert epsilon([], DELTA) == 0
    assert epsilon([Mechanism(1e-160, 1.0, 1)], DELTA) == MOST_EPSILON


@pytest.mark.parametrize("rate", [0.1, 1.0])
def test_noise_whose_square_is_no_number_keeps_nobody_busy(rate: float) -> None:
    """Opacus divided by zero, ended with an overflow, or never came to an end, with the hospital's accounts locked."""
    for least in (5e-324, 1e-160):
        assert epsilon([Mechanism(least, rate, 1)], DELTA) == MOST_EPSILON
    assert epsilon([Mechanism(1.7e308, rate, 1)], DELTA) == epsilon([Mechanism(1e100, rate, 1)], DELTA) < 0.2


def test_noise_for_a_target_reaches_it() -> None:
    noise = noise_for(3.0, DELTA, 1.0, 10)
    assert 2.9 < by_opacus([Mechanism(noise, 1.0, 10)]) <= 3.0


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ({}, "either a noise_multiplier or a target_epsilon"),
        ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "and not both"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be above 0"),
        ({"target_epsilon": 1e15}, "target_epsilon must be at most 1e\\+06"),  # it was looked for without end
        ({"noise_multiplier": 1.0, "max_grad_norm": -1.0}, "max_grad_norm must be above 0"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta must be below 1"),
        ({"noise_multiplier": 1.0, "max_norm": 1.0}, "did you mean 'max_grad_norm'"),
    ],
)
def test_wrong_arguments_are_one_sentence(args: dict[str, float], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        DPSGD(**args)
