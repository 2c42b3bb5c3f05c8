# SPDX-License-Identifier: Apache-2.0
"""Oracles of pFedNet's personal update: the two solvers, against each other and against what must be true of either."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from medpfl.core import graph as graphs
from medpfl.core.graph import Edges
from medpfl.core.network_lasso import _shrink_largest, gram, iterates, solve_gram, solve_stack

K, D = 6, 37
RING = graphs.unique([(0, 1), (2, 1), (2, 3), (4, 3), (4, 5), (0, 5), (0, 3)])
NORMS = [1, 2, math.inf]


def models(count: int = K, width: int = D, seed: int = 0, offset: float = 0.0) -> Tensor:
    return offset + torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_gram(start: Tensor, edges: Edges, tau: float, **options: float) -> Tensor:
    solution = solve_gram(gram([{"w": row} for row in start]), edges, tau, **options)  # type: ignore[arg-type]
    return torch.from_numpy(solution.matrix) @ start


def solve(start: Tensor, edges: Edges, tau: float, p: float, **options: float) -> Tensor:
    options = {"tolerance": 1e-7, "iterations": 5000, **options}
    if p == 2:
        return by_gram(start, edges, tau, **options)
    return solve_stack(start, edges, tau, p, **options)  # type: ignore[arg-type]


def objective(start: Tensor, found: Tensor, edges: Edges, tau: float, p: float) -> float:
    apart = found[edges[:, 0]] - found[edges[:, 1]]
    return float(0.5 * (found - start).square().sum() + tau * torch.linalg.vector_norm(apart, ord=p, dim=1).sum())


def algorithm_4(
    z: Tensor, gradients: Tensor, edges: Edges, eta: float, lam: float, rho: float, steps: int
) -> list[Tensor]:
    """The paper's Eqs. (8) to (10) for p = 2, letter by letter: models are columns, and W = Omega = 0 at first."""
    count = len(z)
    q = torch.zeros(count, len(edges), dtype=torch.float64)
    for m, (i, j) in enumerate(edges):
        q[i, m], q[j, m] = 1, -1
    w = omega = torch.zeros(z.shape[1], len(edges), dtype=torch.float64)
    inverse = torch.linalg.inv(torch.eye(count, dtype=torch.float64) + eta * rho * q @ q.T)
    found = []
    for _ in range(steps):
        new = (eta * (rho * w @ q.T - omega @ q.T - gradients.T / count) + z.T) @ inverse
        columns = []
        for m in range(len(edges)):
            pushed = rho * new @ q[:, m] + omega[:, m]
            columns.append(max(0.0, 1 - lam / float(pushed.norm())) * pushed / rho)
        w = torch.stack(columns, dim=1)
        omega = omega + rho * (new @ q - w)
        found.append(new.T)
    return found


@pytest.mark.parametrize("p", NORMS)
def test_tau_zero_changes_nothing(p: float) -> None:
    assert torch.equal(solve(models(), RING, 0.0, p), models())


@pytest.mark.parametrize("p", NORMS)
def test_no_edges_change_nothing(p: float) -> None:
    assert torch.equal(solve(models(), graphs.unique([]), 3.0, p), models())


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.slow
def test_a_large_tau_gives_every_component_its_mean(p: float) -> None:
    start, edges = models(), graphs.unique([(0, 1), (1, 2), (3, 4)])  # and 5 alone
    found = solve(start, edges, 1e4, p)
    for part in ([0, 1, 2], [3, 4], [5]):
        torch.testing.assert_close(found[part], start[part].mean(dim=0).expand(len(part), -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("tau", [0.01, 0.3, 2.0, 50.0])
def test_the_mean_is_preserved(p: float, tau: float) -> None:
    torch.testing.assert_close(solve(models(), RING, tau, p).mean(dim=0), models().mean(dim=0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("tau", [0.05, 0.5, 3.0])
def test_no_perturbation_is_better(p: float, tau: float) -> None:
    start = models()
    found = solve(start, RING, tau, p)
    least = objective(start, found, RING, tau, p)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-3, 1e-2, 0.1, 1.0):
        for _ in range(20):
            moved = found + size * torch.randn(found.shape, generator=generator, dtype=torch.float64)
            assert objective(start, moved, RING, tau, p) >= least - 1e-9
    assert least < objective(start, start, RING, tau, p)


@pytest.mark.parametrize("p", NORMS)
def test_rho_and_the_edges_directions_do_not_matter(p: float) -> None:
    start = models()
    expected = solve(start, RING, 0.8, p)
    for rho in (0.2, 1.0):
        torch.testing.assert_close(solve(start, RING, 0.8, p, rho=rho), expected, atol=5e-6, rtol=0)
    torch.testing.assert_close(solve(start, RING[::-1, ::-1].copy(), 0.8, p), expected, atol=5e-6, rtol=0)


@pytest.mark.parametrize("p", NORMS)
def test_commutes_with_renaming_the_hospitals(p: float) -> None:
    order = np.array([3, 0, 5, 1, 4, 2])
    place = np.argsort(order)
    renamed = solve(models()[order], graphs.unique([tuple(pair) for pair in place[RING].tolist()]), 0.8, p)
    torch.testing.assert_close(renamed, solve(models(), RING, 0.8, p)[order], atol=5e-6, rtol=0)


@pytest.mark.parametrize("tau", [0.1, 1.0, 100.0])
def test_two_hospitals_move_towards_each_other_by_tau_or_meet(tau: float) -> None:
    start = models(2)
    apart = start[1] - start[0]
    step = min(tau, float(apart.norm()) / 2) * apart / apart.norm()
    expected = torch.stack([start[0] + step, start[1] - step])
    torch.testing.assert_close(solve(start, graphs.complete(2), tau, 2), expected, atol=1e-7, rtol=0)


@pytest.mark.parametrize("tau", [0.05, 0.5, 5.0])
def test_p_1_is_a_fused_lasso_in_every_coordinate(tau: float) -> None:
    start = models(width=5)
    together = solve(start, RING, tau, 1)
    for column in range(5):  # with one coordinate all norms are the same, and the Gram solver is another algorithm
        alone = by_gram(start[:, column : column + 1], RING, tau, tolerance=1e-8, iterations=5000)
        torch.testing.assert_close(together[:, column : column + 1], alone, atol=1e-6, rtol=0)


def test_blocks_of_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = solve(models(), RING, 0.5, 1)
    monkeypatch.setattr("medpfl.core.network_lasso._COLUMN_VALUES", 10 * len(RING))
    torch.testing.assert_close(solve(models(), RING, 0.5, 1), whole, atol=1e-6, rtol=0)


def test_gram_space_equals_the_papers_admm_at_every_iteration() -> None:
    start, eta, lam, rho = models(), 0.3, 2.0, 1.7
    gradients = models(seed=9)
    v0 = start - eta / K * gradients
    paper = algorithm_4(start, gradients, RING, eta, lam, rho, 60)
    ours = iterates(gram([{"w": row} for row in v0]), RING, eta * lam, eta * rho, 60)
    for step, (expected, (matrix, _, _)) in enumerate(zip(paper, ours, strict=True), start=1):
        np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-13)
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-13)
        torch.testing.assert_close(torch.from_numpy(matrix.T) @ v0, expected, atol=1e-12, rtol=0)
        full = solve_stack(v0, RING, eta * lam, 2, eta * rho, tolerance=0.0, iterations=step)
        torch.testing.assert_close(full, expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("tau", [0.05, 0.5, 1.5, 3.0])
@pytest.mark.slow
def test_gram_space_equals_the_papers_admm_at_convergence(tau: float) -> None:
    start = models()
    paper = algorithm_4(start, torch.zeros_like(start), RING, 1.0, tau, 0.5, 3000)[-1]
    torch.testing.assert_close(by_gram(start, RING, tau), paper, atol=1e-5, rtol=0)


@given(
    count=st.integers(2, 9),
    seed=st.integers(0, 10_000),
    tau=st.floats(1e-3, 1e3),
    edge_seed=st.integers(0, 10_000),
    offset=st.sampled_from([0.0, 100.0]),
)
@pytest.mark.slow
def test_the_matrix_is_a_diffusion(count: int, seed: int, tau: float, edge_seed: int, offset: float) -> None:
    generator = np.random.default_rng(edge_seed)
    edges = graphs.unique([tuple(generator.choice(count, 2, replace=False)) for _ in range(2 * count)])
    start = models(count, 11, seed, offset)
    solution = solve_gram(gram([{"w": row} for row in start]), edges, tau)
    np.testing.assert_allclose(solution.matrix, solution.matrix.T, atol=1e-14)
    np.testing.assert_allclose(solution.matrix.sum(axis=1), 1, atol=1e-11)
    assert solution.matrix.min() >= -1e-12
    assert solution.error <= 1e-6, solution
    full = solve_stack(start, edges, tau, 2, tolerance=1e-6, iterations=5000)
    distance = float((torch.from_numpy(solution.matrix) @ start - full).norm())
    assert distance <= 2.5e-6 * float((start - start.mean(dim=0)).norm())


def test_the_matrix_is_that_of_the_weighted_laplacian() -> None:
    start, tau = models(), 0.7
    solution = solve_gram(gram([{"w": row} for row in start]), RING, tau, tolerance=1e-8, iterations=5000)
    found = torch.from_numpy(solution.matrix) @ start
    laplacian = np.zeros((K, K))
    for i, j in RING:
        weight = tau / float((found[i] - found[j]).norm())
        laplacian[[i, j], [i, j]] += weight
        laplacian[i, j] -= weight
        laplacian[j, i] -= weight
    np.testing.assert_allclose(solution.matrix, np.linalg.inv(np.eye(K) + laplacian), atol=1e-6)


def test_the_gram_matrix_keeps_its_digits_when_models_are_close() -> None:
    near = [{"w": (1000 + 1e-3 * row).float(), "n": torch.tensor(3)} for row in models(4, 1003)]
    stack = torch.stack([state["w"].double() for state in near]).numpy()
    centred = stack - stack.mean(axis=0)
    np.testing.assert_allclose(gram(near), centred @ centred.T, rtol=1e-9, atol=1e-12)


def test_the_gram_matrix_goes_over_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [{"a": row[:20].view(4, 5), "b": row[20:].float()} for row in models()]
    whole = gram(states)
    monkeypatch.setattr("medpfl.core.network_lasso._BLOCK_VALUES", 7 * K)
    np.testing.assert_allclose(gram(states), whole, atol=1e-12)


@pytest.mark.parametrize("threshold", [1e-20, 1e-17, 1e-3, 0.7, 1.4, 1.5, 3.0])
def test_the_prox_of_the_largest_entry_ends_below_its_rounding(threshold: float) -> None:
    """It went round for ever where the threshold is lost in the largest entry's rounding."""
    rows = torch.tensor([[1.0, 0.5], [1e16, -1.0], [-3e38, 3e38], [1e-30, 0.0], [0.0, 0.0]], dtype=torch.float64)
    out = torch.empty_like(rows)
    _shrink_largest(rows, threshold, out)
    for row, found in zip(rows, out, strict=True):
        falling = row.abs().sort(descending=True).values
        levels = (falling.cumsum(0) - threshold) / torch.arange(1, 3)
        level = max(0.0, float(levels.max()))
        assert torch.allclose(found, row.clamp(-level, level), rtol=1e-15, atol=0.0)


def test_one_huge_model_of_a_hospital_does_not_stop_the_solver() -> None:
    start = models()
    start[2] *= 1e16
    found = solve_stack(start, RING, 0.1, math.inf, iterations=50)
    assert torch.isfinite(found).all()
    assert torch.equal(solve_stack(models(), RING, 1e-20, math.inf, iterations=50).isfinite(), torch.ones(K, D).bool())
