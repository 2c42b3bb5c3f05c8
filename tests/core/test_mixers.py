# SPDX-License-Identifier: Apache-2.0
"""Oracles of the server components (FedSM, Eq. (11), and the means)."""

import numpy as np
import pytest
import torch

from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Identity, Mean, Mixer, RoundInfo, SoftPull

K = 5


def info(count: int = K, present: list[bool] | None = None, sizes: list[float] | None = None) -> RoundInfo:
    roster = tuple(f"site-{k}" for k in range(count))
    return RoundInfo(
        roster, np.array(sizes or [10.0 * (k + 1) for k in range(count)]), tuple(present or [True] * count)
    )


def stack(count: int = K, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [{"w": torch.randn(11, generator=generator, dtype=torch.float64)} for _ in range(count)]


def values(states: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([state["w"] for state in states])


def run(mixer: Mixer, states: list[dict[str, torch.Tensor]], about: RoundInfo | None = None) -> torch.Tensor:
    copies = [{key: tensor.clone() for key, tensor in state.items()} for state in states]
    return values(mixer.mix(copies, about or info(len(states)))[0])


def test_lam_one_over_k_is_the_uniform_mean() -> None:
    torch.testing.assert_close(run(SoftPull(lam=1 / K), stack()), run(Mean(uniform=True), stack()), atol=1e-15, rtol=0)


@pytest.mark.parametrize("count", range(2, 12))
def test_lam_one_over_k_gives_all_the_absent_too_one_model(count: int) -> None:
    """With 3, 6 or 7 hospitals rounding made the rows differ, and one that was away kept its old model."""
    about = info(count, present=[False] + [True] * (count - 1))
    found = run(SoftPull(lam=1 / count), stack(count), about)
    assert torch.equal(found, run(Mean(uniform=True), stack(count), about))


def test_lam_one_is_local_training() -> None:
    assert torch.equal(run(SoftPull(lam=1.0), stack()), values(stack()))
    assert torch.equal(run(Identity(), stack()), values(stack()))


@pytest.mark.parametrize("lam", [1 / K, 0.3, 0.7, 0.95, 1.0])
def test_softpull_preserves_the_mean_and_contracts_disagreement(lam: float) -> None:
    before, after = values(stack()), run(SoftPull(lam=lam), stack())
    torch.testing.assert_close(after.mean(0), before.mean(0), atol=1e-14, rtol=0)
    factor = (K * lam - 1) / (K - 1)
    torch.testing.assert_close(after - after.mean(0), factor * (before - before.mean(0)), atol=1e-14, rtol=0)


@pytest.mark.parametrize("mixer", [SoftPull(lam=0.4), Mean(), Mean(uniform=True), Identity()])
def test_commutes_with_renaming_the_hospitals(mixer: Mixer) -> None:
    order = [3, 0, 4, 1, 2]
    sizes = [5.0, 1.0, 7.0, 2.0, 9.0]
    straight = run(mixer, stack(), info(sizes=sizes))[order]
    renamed = run(mixer, [stack()[k] for k in order], info(sizes=[sizes[k] for k in order]))
    torch.testing.assert_close(straight, renamed, atol=1e-14, rtol=0)


@pytest.mark.parametrize("mixer", [SoftPull(lam=0.4), Mean(), Mean(uniform=True), Identity()])
def test_equal_models_stay(mixer: Mixer) -> None:
    states = [stack()[0] for _ in range(K)]
    torch.testing.assert_close(run(mixer, states), values(states), atol=1e-14, rtol=0)


def test_matrix_of_eq_11() -> None:
    np.testing.assert_allclose(SoftPull(lam=0.7).matrix(info(4)), 0.7 * np.eye(4) + 0.1 * (1 - np.eye(4)))


def test_mean_weighs_by_samples() -> None:
    np.testing.assert_allclose(Mean().matrix(info(2, sizes=[30, 10])), [[0.75, 0.25], [0.75, 0.25]])


@pytest.mark.parametrize("mixer", [SoftPull(lam=0.7), Mean(), Identity()])
def test_a_lone_hospital_is_left_alone(mixer: Mixer) -> None:
    assert torch.equal(run(mixer, stack(1)), values(stack(1)))


def test_one_answer_of_many() -> None:
    present = [False, False, True, False, False]
    after, before = run(SoftPull(lam=0.6), stack(), info(present=present)), values(stack())
    assert torch.equal(after, before)  # nobody to be pulled towards, and the absent keep theirs
    torch.testing.assert_close(run(Mean(), stack(), info(present=present)), before[2].expand(K, -1))


@pytest.mark.parametrize("lam", [0.0, -0.1, 1.0001])
def test_lam_outside_every_range(lam: float) -> None:
    with pytest.raises(ConfigError, match=r"lam must be in \[1/K, 1\]"):
        SoftPull(lam=lam)


def test_lam_is_checked_against_the_roster() -> None:
    SoftPull(lam=0.25).check(["a", "b", "c", "d"])
    with pytest.raises(ConfigError, match=r"with 3 hospitals at least 0.3333, got 0.25"):
        SoftPull(lam=0.25).check(["a", "b", "c"])


def test_identity_does_not_travel() -> None:
    assert not Identity.travels
    assert Mean.travels and SoftPull.travels
