# SPDX-License-Identifier: Apache-2.0
"""Apply a K x K row-stochastic mixing matrix to K models, a cache-sized block at a time.

Every personalised aggregation of this package is  X <- A X  with X the K x d stack of models and A row-stochastic:
row k holds the weights that make hospital k's new model.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.mapped import Passing, is_mapped

State = Mapping[str, Tensor]
Matrix = NDArray[np.float64]

# Values (hospitals times columns) per block: large enough to hide the cost of a call, small enough for the caches.
# Measured with ``python -m benchmarks mixing``: 2^21 doubles the time of a general mix, 2^17 that of the mean.
_BLOCK_VALUES = 1 << 19


class WrongMix(ValueError):
    """What a component gives is no mixing matrix, or not what its ``mix`` shall give."""


def check_form(matrix: object, size: int) -> None:
    """Refuse what is no array of numbers for ``size`` hospitals.

    Raises:
        WrongMix: with what was expected and got.
    """
    if isinstance(matrix, np.ndarray) and matrix.shape == (size, size) and matrix.dtype.kind in "fiu":
        return
    got = f"one of shape {matrix.shape} and type {matrix.dtype}" if isinstance(matrix, np.ndarray) else a_kind(matrix)
    raise WrongMix(f"its mixing matrix must be a {size} x {size} NumPy array of numbers, got {got}")


def a_kind(value: object) -> str:
    """For the end of a sentence on what was got instead."""
    return "None" if value is None else f"a {type(value).__name__}"


def check_matrix(matrix: Matrix, tolerance: float = 1e-9) -> None:
    """Refuse a matrix that is not square, finite and row-stochastic.

    Raises:
        WrongMix: with the row and its sum.
    """
    if not isinstance(matrix, np.ndarray):
        raise WrongMix(f"a mixing matrix is a NumPy array, got {a_kind(matrix)}")
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise WrongMix(f"a mixing matrix is K x K; got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise WrongMix("the mixing matrix holds values that are not finite")
    sums = matrix.sum(axis=1)
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > tolerance:
        raise WrongMix(f"row {worst} of the mixing matrix sums to {sums[worst]:.12g}; every row must sum to 1")


def restrict(matrix: Matrix, present: Sequence[bool]) -> Matrix:
    """The matrix for a round in which only some hospitals answered.

    Columns of absent hospitals are dropped and rows renormalised. An absent hospital keeps its last model, unless all
    rows are equal (one model for everybody), in which case it gets that model when it returns. A row left without
    weight keeps its own model.

    Args:
        matrix: K x K, made for the whole roster.
        present: K flags.

    Raises:
        WrongMix: it is no K x K array.
    """
    check_form(matrix, len(present))
    here = np.asarray(present, dtype=bool)
    if here.all():
        return matrix
    consensus = bool((matrix == matrix[0]).all())
    result = np.eye(len(matrix))
    for row in range(len(matrix)):
        weights = np.where(here, matrix[row], 0.0)
        if (here[row] or consensus) and weights.sum() > 0:
            result[row] = weights / weights.sum()
    return result


def mix(
    matrix: Matrix,
    states: Sequence[State],
    in_place: bool = False,
    into: Sequence[State] | None = None,
    may_share: bool = False,
) -> list[dict[str, Tensor]]:
    """Mix K state dicts: entry by entry, new_k = sum_j A[k, j] old_j.

    Floating-point entries are mixed, in float32 or wider, and returned in their own type; integer and boolean entries
    (BatchNorm's step counter, say) stay as each hospital had them. With equal inputs the result is the same bit for
    bit; it may differ in the last bits between numbers of torch threads.

    Args:
        matrix: K x K, row-stochastic.
        states: K state dicts with the same keys, shapes and types, contiguous, on one device.
        in_place: write into the given tensors (extra memory: one block) instead of allocating K new models.
        into: K states like these to write into; they share no memory with ``states``.
        may_share: in place, where all rows of the matrix are equal, only the first model's tensors are written to, and
            all K results hold them.

    Returns:
        K state dicts; with ``in_place`` or ``into`` they hold the given tensors.

    Raises:
        ValueError: the matrix is not K x K row-stochastic, or the states do not agree.
    """
    check_matrix(matrix)
    if len(states) != len(matrix):
        raise ValueError(f"a {len(matrix)} x {len(matrix)} matrix cannot mix {len(states)} models")
    results: list[dict[str, Tensor]] = [{} for _ in states]
    passing, one = Passing(), in_place and may_share and _is_one(matrix, states[0])
    for key in states[0]:
        tensors = [state[key] for state in states]
        if any(t.shape != tensors[0].shape or t.dtype != tensors[0].dtype for t in tensors):
            raise ValueError(f"'{key}' does not have one shape and type in all models")
        if in_place:
            targets = tensors
        elif into is not None:
            targets = [state[key] for state in into]
        else:
            targets = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in tensors]
        if tensors[0].is_floating_point():
            targets = targets[:1] if one else targets
            _mix_tensor(matrix, tensors, targets, passing)
            targets = targets * len(states) if one else targets
        elif not in_place:
            for source, target in zip(tensors, targets, strict=True):
                target.copy_(source)
        for result, target in zip(results, targets, strict=True):
            result[key] = target
    passing.end()
    return results


def _is_one(matrix: Matrix, state: State) -> bool:
    """Whether all hospitals get one model. Not where it lies in a file and holds entries that stay as each hospital had
    them: a model lies in one file."""
    if not (matrix == matrix[0]).all():
        return False
    return all(tensor.is_floating_point() or not is_mapped(tensor) for tensor in state.values())


def _mix_tensor(matrix: Matrix, sources: Sequence[Tensor], targets: Sequence[Tensor], passing: Passing) -> None:
    flat_in = [t.reshape(-1) for t in sources]
    flat_out = [t.view(-1) for t in targets]
    into_others = targets is not sources
    dtype = torch.promote_types(sources[0].dtype, torch.float32)
    keep, shared = diagonal_and_shared(matrix)
    total = flat_in[0].numel()
    width = max(1, min(_BLOCK_VALUES // len(flat_in), total))
    rows = 1 if keep is not None else 2 * len(flat_in)
    scratch = torch.empty(rows, width, dtype=dtype, device=sources[0].device)
    weights = torch.tensor(matrix, dtype=dtype, device=sources[0].device)
    for start in range(0, total, width):
        stop = min(start + width, total)
        old = [t[start:stop] for t in flat_in]
        new = [t[start:stop] for t in flat_out]
        if keep is not None:
            common = scratch[0, : stop - start].zero_()
            for weight, own in zip(shared, old, strict=True):
                common.add_(own, alpha=weight)
            for share, own, target in zip(keep, old, new, strict=len(new) > 1):
                target.copy_(common) if share == 0 else torch.add(common, own, alpha=share, out=target)
        else:
            before, after = scratch[: len(old), : stop - start], scratch[len(old) :, : stop - start]
            torch._foreach_copy_(list(before.unbind()), old)
            torch.mm(weights, before, out=after)
            torch._foreach_copy_(new, list(after.unbind()))
        passing.over(*old, *(new if into_others else ()))


def diagonal_and_shared(matrix: Matrix) -> tuple[list[float] | None, list[float]]:
    """Write A as diag(keep) + 1 shared^T if its rows differ on the diagonal only (mean, SoftPull, K = 2); else None.

    Then the mix costs two passes over the models instead of a matrix product.
    """
    size = len(matrix)
    columns = np.arange(size)
    shared = matrix[(columns + 1) % size, columns]
    off_diagonal = matrix.copy()
    np.fill_diagonal(off_diagonal, shared)
    if not (off_diagonal == shared).all():
        return None, []
    return (matrix.diagonal() - shared).tolist(), shared.tolist()
