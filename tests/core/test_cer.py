# SPDX-License-Identifier: Apache-2.0
"""Oracles of CER: the exact total-variation denoiser with an end term, against its optimality conditions and ADMM."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from medpfl.core.codecs import CER
from medpfl.core.codecs.cer import denoise, denoise_admm, objective

Signal = NDArray[np.float64]
SIGNALS = arrays(np.float64, st.integers(1, 80), elements=st.floats(-1e6, 1e6, allow_subnormal=False))
# Runs of equal and of rising values are where a solver's ties are decided.
STEPS = st.lists(st.tuples(st.integers(-3, 3), st.integers(1, 9), st.integers(-1, 1)), min_size=1, max_size=12).map(
    lambda parts: np.concatenate([start + slope * np.arange(length) for start, length, slope in parts]).astype(float)
)


def noise(length: int, seed: int = 0) -> Signal:
    return np.random.default_rng(seed).normal(size=length)


def assert_optimal(found: Signal, signal: Signal, gamma: float) -> None:
    """The certificate: the partial sums S_i of g - u stay within gamma, and are gamma sign(u_i - u_{i+1}) where the two
    differ, with zero after the end. It holds for the solution and for nothing else."""
    scale = 1e-12 * (np.abs(signal).sum() + gamma)
    sums = np.cumsum(signal - found)
    assert np.abs(sums).max() <= gamma + scale
    steps = found - np.append(found[1:], 0.0)
    apart = np.abs(steps) > 0
    np.testing.assert_allclose(sums[apart], gamma * np.sign(steps[apart]), atol=scale, rtol=0)


@pytest.mark.slow
@given(signal=st.one_of(SIGNALS, STEPS), share=st.floats(1e-4, 3))
def test_the_solution_carries_its_certificate(signal: Signal, share: float) -> None:
    gamma = share * float(np.abs(signal).mean()) + 1e-9
    assert_optimal(denoise(signal, gamma), signal, gamma)


@pytest.mark.parametrize("gamma", [0.01, 1.0, 30.0, 1000.0])
@pytest.mark.parametrize("shape", ["noise", "walk", "ramp", "saw", "plateau"])
def test_long_signals_carry_it_too(shape: str, gamma: float) -> None:
    length = 20_000  # long enough for the knots' buffer to grow many times
    signal = {
        "noise": noise(length),
        "walk": np.cumsum(noise(length)),
        "ramp": np.arange(length) / 10.0,
        "saw": np.arange(length) % 2 * 2.0 - 1,
        "plateau": np.repeat(noise(20), length // 20),
    }[shape]
    assert_optimal(denoise(signal, gamma), signal, gamma)


@pytest.mark.slow
@given(signal=SIGNALS)
def test_gamma_zero_is_the_identity(signal: Signal) -> None:
    assert np.array_equal(denoise(signal, 0.0), signal)


@given(signal=SIGNALS)
def test_a_large_gamma_leaves_nothing(signal: Signal) -> None:
    most = float(np.abs(np.cumsum(signal)).max())
    np.testing.assert_allclose(denoise(signal, most * 1.000001 + 1e-9), 0, atol=1e-9 * (1 + most))


def test_just_below_it_something_is_left() -> None:
    signal = noise(50)
    most = float(np.abs(np.cumsum(signal)).max())
    assert np.abs(denoise(signal, 0.999 * most)).max() > 1e-6


@given(signal=SIGNALS, gamma=st.floats(0.01, 1e6))
def test_total_variation_never_grows_and_the_sum_moves_by_gamma_at_most(signal: Signal, gamma: float) -> None:
    found = denoise(signal, gamma)
    scale = 1e-12 * np.abs(signal).sum()
    variation = np.abs(np.diff(found)).sum() + abs(found[-1])
    assert variation <= np.abs(np.diff(signal)).sum() + abs(signal[-1]) + scale
    assert abs((signal - found).sum()) <= gamma + scale
    assert objective(found, signal, gamma) <= objective(signal, signal, gamma) * (1 + 1e-12) + scale


@given(signal=SIGNALS, gamma=st.floats(0.01, 1e3))
def test_the_sign_does_not_matter(signal: Signal, gamma: float) -> None:
    np.testing.assert_allclose(denoise(-signal, gamma), -denoise(signal, gamma), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("rho", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("gamma", [0.05, 0.5, 2.0])
@pytest.mark.slow
def test_the_papers_admm_converges_to_it(gamma: float, rho: float) -> None:
    signal = noise(60)
    np.testing.assert_allclose(denoise_admm(signal, gamma, 4000, rho), denoise(signal, gamma), atol=1e-7)


def algorithm_3(gradient: Signal, eta: float, gamma: float, rho: float, steps: int) -> Signal:
    """The paper's Eqs. (5) to (7) in its own variables, by dense matrices, with the threshold 1 / rho in Eq. (5)."""
    size = len(gradient)
    change = np.eye(size) - np.eye(size, k=1)
    start = noise(size, 7)  # y_t: drops out
    y, omega = start - eta * gradient, np.zeros(size)
    system = rho * eta * gamma * change.T @ change + np.eye(size)
    for _ in range(steps):
        pushed = change @ (y - start) - omega / rho
        r = pushed - np.clip(pushed, -1 / rho, 1 / rho)
        y = np.linalg.solve(
            system, rho * eta * gamma * change.T @ (r + change @ start + omega / rho) + start - eta * gradient
        )
        omega = omega + rho * (r - change @ y + change @ start)
    return (start - y) / eta


@pytest.mark.parametrize(("eta", "rho"), [(1.0, 1.0), (0.1, 2.0), (0.01, 30.0)])
def test_the_banded_admm_is_the_papers_whatever_eta(eta: float, rho: float) -> None:
    signal, gamma = noise(40), 0.4
    for steps in (1, 2, 7, 50):
        expected = algorithm_3(signal, eta, gamma, rho, steps)
        found = denoise_admm(signal, gamma, steps, rho * eta * gamma)
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_gamma_is_relative_to_the_update() -> None:
    vector = noise(500).astype(np.float32)
    one = CER(0.3).reduce(vector, 0)
    np.testing.assert_allclose(CER(0.3).reduce(vector * np.float32(1024), 0), one * 1024, rtol=1e-6)
    exact = denoise(vector.astype(float), 0.3 * float(np.abs(vector.astype(float)).mean()))
    assert np.array_equal(one, exact.astype(np.float32))


@pytest.mark.parametrize(("gamma", "error"), [(0.03, 0.04), (0.3, 0.33)])
def test_what_gamma_does_to_noise(gamma: float, error: float) -> None:
    vector = noise(20_000).astype(np.float32)
    lost = CER(gamma).reduce(vector, 0) - vector
    assert np.linalg.norm(lost) / np.linalg.norm(vector) == pytest.approx(error, abs=0.02)
