# SPDX-License-Identifier: Apache-2.0
"""pFedNet's personal update, exactly:  Z+ = argmin_Z 1/2 |Z - V|_F^2 + tau sum over edges {i, j} of |z_i - z_j|_p.

For p = 2 every iterate of ADMM from zero is V times a K x K matrix and needs no more of the models than their K x K
Gram matrix, so the models are read once for that matrix and once to be mixed. At the solution the matrix is
(I + L)^-1, with L the Laplacian of the graph weighted by tau / |z_i - z_j|: symmetric and doubly stochastic. For
p = 1 and inf no such matrix exists and ADMM runs on the models themselves.

The dual variable of ADMM is feasible after every iteration, so the duality gap is at hand, and because the objective is
strongly convex the gap bounds the distance to the solution:  |Z - Z+|_F^2 <= 2 gap.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.graph import Edges, members
from medpfl.core.mapped import Passing
from medpfl.core.mixing import Matrix, State

RHO = 0.5
ITERATIONS = 500
TOLERANCE = 1e-6
_CHECK_EVERY = 10
_BLOCK_VALUES = 1 << 18  # float64 values of a block of all models: stays in the caches while it is centred and used
_COLUMN_VALUES = 1 << 20  # values of all edges in one block of columns, for p = 1


@dataclass(frozen=True)
class Solution:
    """``matrix``: K x K, row k makes hospital k's new model. ``error``: at most this far from the exact solution,
    relative to the distance of the models from their mean (Frobenius norms)."""

    matrix: Matrix
    iterations: int
    error: float


def gram(states: Sequence[State]) -> Matrix:
    """K x K Gram matrix, in float64, of the models' differences from their mean, over all floating-point entries.

    Differences are taken before the products, which keeps the digits when the models are close together.
    """
    size, passing = len(states), Passing()
    total = np.zeros((size, size))
    for key, first in states[0].items():
        if not first.is_floating_point():
            continue
        rows = [state[key].reshape(-1) for state in states]
        width = max(1, min(_BLOCK_VALUES // size, first.numel()))
        scratch = torch.empty(size, width, dtype=torch.float64)
        for start in range(0, first.numel(), width):
            block = scratch[:, : min(width, first.numel() - start)]
            parts = [row[start : start + width] for row in rows]
            torch._foreach_copy_(list(block.unbind()), parts)
            passing.over(*parts)
            block[1:] -= block[0]
            apart = block[1:].numpy()
            total[1:, 1:] += apart @ apart.T  # numpy sees the symmetry and does half the work, torch does not
    passing.end()
    result: Matrix = total - total.mean(axis=0) - total.mean(axis=1, keepdims=True) + total.mean()
    return result


def solve_gram(
    gram: Matrix, edges: Edges, tau: float, rho: float = RHO, tolerance: float = TOLERANCE, iterations: int = ITERATIONS
) -> Solution:
    """The mixing matrix of the solution for p = 2, by ADMM in Gram space.

    Every tenth iteration the matrix (I + L)^-1 of the present distances is formed, which never leaves the set of
    symmetric doubly stochastic matrices; the iteration stops when its duality gap proves ``tolerance``.

    Args:
        gram: K x K, of ``gram``.
        edges: M x 2.
        tau: strength, >= 0.
        rho: penalty parameter of ADMM, > 0; changes the way, not the result.
        tolerance: bound on ``Solution.error`` at which to stop.
        iterations: at most so many.
    """
    size = len(gram)
    energy = float(np.trace(gram))
    if tau == 0 or not len(edges) or energy == 0:
        return Solution(np.eye(size), 0, 0.0)
    best = Solution(np.eye(size), 0, np.inf)
    lowest = np.inf
    for step, (_, split, dual) in enumerate(iterates(gram, edges, tau, rho, iterations), start=1):
        if step % _CHECK_EVERY and step != iterations:
            continue
        matrix = _diffusion(gram, edges, tau, split)
        objective = _objective(gram, edges, tau, matrix)
        if objective < lowest:
            lowest = objective
            best = Solution(matrix, step, np.inf)
        gap = max(0.0, lowest - _dual_objective(gram, edges, dual))
        best = Solution(best.matrix, step, min(best.error, float(np.sqrt(2 * gap / energy))))
        if best.error <= tolerance:
            break
    return best


def iterates(
    gram: Matrix, edges: Edges, tau: float, rho: float, iterations: int
) -> Iterator[tuple[Matrix, Matrix, Matrix]]:
    """ADMM's iterates for p = 2: matrices A (K x K), B and C (K x M) with Z = V A, W = V B and Omega = V C."""
    size = len(gram)
    incidence = _incidence(size, edges)
    inverse = np.linalg.inv(np.eye(size) + rho * incidence @ incidence.T)
    split = np.zeros((size, len(edges)))
    dual = np.zeros((size, len(edges)))
    for _ in range(iterations):
        matrix = (np.eye(size) + (rho * split - dual) @ incidence.T) @ inverse
        target = matrix[:, edges[:, 0]] - matrix[:, edges[:, 1]] + dual / rho
        factor = _kept(_norms(gram, target), tau / rho)
        split = target * factor
        dual = rho * (target - split)
        yield matrix, split, dual


def _incidence(size: int, edges: Edges) -> Matrix:
    matrix = np.zeros((size, len(edges)))
    matrix[edges[:, 0], np.arange(len(edges))] = 1
    matrix[edges[:, 1], np.arange(len(edges))] = -1
    return matrix


def _norms(gram: Matrix, columns: Matrix) -> NDArray[np.float64]:
    """Euclidean norms of the vectors V c, for every column c."""
    squares = np.einsum("km,km->m", columns, gram @ columns)
    norms: NDArray[np.float64] = np.sqrt(np.maximum(squares, 0.0))
    return norms


def _kept(norms: NDArray[np.float64], threshold: float) -> NDArray[np.float64]:
    kept: NDArray[np.float64] = np.maximum(0.0, 1 - threshold / np.maximum(norms, 1e-300))
    return kept


def _objective(gram: Matrix, edges: Edges, tau: float, matrix: Matrix) -> float:
    moved = matrix - np.eye(len(gram))
    distances = _norms(gram, matrix[:, edges[:, 0]] - matrix[:, edges[:, 1]])
    return float(0.5 * np.sum(moved * (gram @ moved)) + tau * distances.sum())


def _dual_objective(gram: Matrix, edges: Edges, dual: Matrix) -> float:
    incidence = _incidence(len(gram), edges)
    pulled = dual @ incidence.T
    return float(np.sum(dual * (gram @ incidence)) - 0.5 * np.sum(pulled * (gram @ pulled)))


def _diffusion(gram: Matrix, edges: Edges, tau: float, split: Matrix) -> Matrix:
    """(I + L)^-1 with weights tau / distance, pairs at distance zero made one: the minimiser of a quadratic that lies
    above the objective and touches it where models are at these distances."""
    size = len(gram)
    distances = _norms(gram, split)
    apart = distances > 1e-9 * np.sqrt(np.trace(gram))
    member = members(size, edges[~apart])
    incidence = member.T @ _incidence(size, edges[apart])
    weighted = incidence * (tau / distances[apart])
    system = np.diag(member.sum(axis=0)) + weighted @ incidence.T
    matrix: Matrix = member @ np.linalg.inv(system) @ member.T
    return (matrix + matrix.T) / 2


def solve_stack(
    start: Tensor, edges: Edges, tau: float, p: float, rho: float = RHO, tolerance: float = TOLERANCE,
    iterations: int = ITERATIONS,
) -> Tensor:  # fmt: skip
    """The new models for p = 1, 2 or inf, by ADMM on the models themselves; the memory is that of three copies of
    all edges' differences (p = 1: of blocks of them, since it falls apart into its coordinates).

    Args:
        start: K x d, float64 for exact results; not changed.
        p: 1, 2 or ``math.inf``.
        tolerance: as in ``solve_gram``; 0 makes exactly ``iterations`` iterations, as the paper's Algorithm 4 does.

    Returns:
        K x d.
    """
    if tau == 0 or not len(edges):
        return start.clone()
    if p != 1:
        return _solve_block(start, edges, tau, p, rho, tolerance, iterations)
    width = max(1, _COLUMN_VALUES // len(edges))
    blocks = [
        _solve_block(start[:, left : left + width], edges, tau, p, rho, tolerance, iterations)
        for left in range(0, start.shape[1], width)
    ]
    return torch.cat(blocks, dim=1)


def _solve_block(
    start: Tensor, edges: Edges, tau: float, p: float, rho: float, tolerance: float, iterations: int
) -> Tensor:
    incidence = torch.tensor(_incidence(len(start), edges), dtype=start.dtype, device=start.device)
    shrink = _PROXES[p]
    system = torch.eye(len(start), dtype=start.dtype, device=start.device) + rho * incidence @ incidence.T
    inverse = torch.linalg.inv(system)
    centre = start.mean(dim=0)  # only differences matter; without the mean they keep their digits
    start = start - centre
    base, spread = inverse @ start, inverse @ incidence
    target, split, dual = (start.new_zeros(len(edges), start.shape[1]) for _ in range(3))
    result: Tensor = base.clone()  # Eq. (8) with W = Omega = 0
    energy = float(start.square().sum())
    for step in range(1, iterations + 1):
        if step > 1:
            torch.addmm(base, spread, target, out=result)  # Eq. (8); target holds rho W - Omega
        torch.addmm(dual, incidence.T, result, beta=1 / rho, out=target)
        shrink(target, tau / rho, split)  # Eq. (9), with the right proximal operators
        torch.sub(target, split, out=dual).mul_(rho)  # Eq. (10)
        if tolerance > 0 and (step % _CHECK_EVERY == 0 or step == iterations):
            gap = _stack_gap(start, result, incidence, dual, tau, p)
            if 2 * gap <= tolerance**2 * energy:
                break
        torch.sub(split, target, alpha=0.5, out=target).mul_(2 * rho)  # rho W - Omega = rho (2 W - target)
    result += centre
    return result


def _stack_gap(start: Tensor, result: Tensor, incidence: Tensor, dual: Tensor, tau: float, p: float) -> float:
    distances = torch.linalg.vector_norm(incidence.T @ result, ord=p, dim=1)
    primal = 0.5 * (result - start).square().sum() + tau * distances.sum()
    pulled = incidence @ dual
    return float(primal - (pulled * start).sum() + 0.5 * pulled.square().sum())


def _shrink_norm(target: Tensor, threshold: float, out: Tensor) -> None:
    """p = 2, row by row: shorter by the threshold."""
    norms = torch.linalg.vector_norm(target, dim=1, keepdim=True)
    torch.mul(target, (1 - threshold / norms.clamp_min(1e-300)).clamp_min(0), out=out)


def _shrink_entries(target: Tensor, threshold: float, out: Tensor) -> None:
    """p = 1: the soft threshold."""
    torch.clamp(target, -threshold, threshold, out=out)
    torch.sub(target, out, out=out)


def _shrink_largest(target: Tensor, threshold: float, out: Tensor) -> None:
    """p = inf: what is left of a row after its projection onto the l1 ball, which is the row clipped to a level.

    The level solves sum max(|v| - level, 0) = threshold; Michelot's iteration finds it exactly in finitely many steps.
    It rises from step to step, so fewer and fewer entries are above it; it stays where rounding says otherwise (a
    threshold below the rounding of the largest entry), and so the iteration ends whatever comes.
    """
    sizes = target.abs()
    total = sizes.sum(dim=1)
    level = ((total - threshold) / target.shape[1]).clamp_min(0)
    count = torch.full_like(level, -1.0)
    while True:
        above = sizes > level[:, None]
        now = above.sum(dim=1).to(level.dtype)
        if bool((now == count).all()):
            break
        count = now
        next_level = ((sizes * above).sum(dim=1) - threshold).div(count.clamp_min(1))
        level = torch.maximum(level, next_level)
    level = torch.where(total > threshold, level, torch.zeros_like(level))
    torch.minimum(torch.maximum(target, -level[:, None]), level[:, None], out=out)


_PROXES: dict[float, Callable[[Tensor, float, Tensor], None]] = {
    1: _shrink_entries,
    2: _shrink_norm,
    float("inf"): _shrink_largest,
}
