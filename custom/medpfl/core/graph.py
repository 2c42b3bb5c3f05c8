# SPDX-License-Identifier: Apache-2.0
"""The network of similar hospitals: undirected graphs without loops, each edge once.

A graph over K hospitals is an M x 2 array of their indices, lower index first, in ascending order.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.errors import ConfigError

Edges = NDArray[np.int64]

SKETCHES = ("moments", "labels", "covariance")
"""What a hospital may tell of its data: ``mean`` and ``variance`` of every feature (F each); ``histogram``, the shares
of its classes (C); ``mean`` (F) and ``covariance`` (F x F)."""


def unique(pairs: Sequence[tuple[int, int]]) -> Edges:
    """Edges from pairs in any order and direction, named any number of times."""
    found = sorted({(min(pair), max(pair)) for pair in pairs})
    return np.array(found, dtype=np.int64).reshape(-1, 2)


def complete(size: int) -> Edges:
    return unique([(i, j) for i in range(size) for j in range(i)])


def star(size: int, centre: int) -> Edges:
    return unique([(i, centre) for i in range(size) if i != centre])


def named(pairs: Sequence[Sequence[str]], roster: Sequence[str]) -> Edges:
    """Edges that are given as pairs of hospital names.

    Raises:
        ConfigError: a name that is not in the roster, a pair that is none, or an edge from a hospital to itself.
    """
    place = {name: index for index, name in enumerate(roster)}
    for pair in pairs:
        if len(pair) != 2 or pair[0] == pair[1]:
            raise ConfigError(f"an edge is a pair of two hospitals, got {list(pair)!r}")
        for name in pair:
            if name not in place:
                raise ConfigError(f"the edge {list(pair)!r} names '{name}', which is not in {', '.join(roster)}")
    return unique([(place[one], place[other]) for one, other in pairs])


def nearest(points: Sequence[NDArray[np.float64] | None], neighbours: int) -> Edges:
    """Undirected union of every hospital's ``neighbours`` nearest others (Euclidean); ties go to the lower index.

    Args:
        points: K vectors of one length; None for a hospital that gave none, which stays without edges.
        neighbours: >= 1; all others where there are fewer.
    """
    here = [index for index, point in enumerate(points) if point is not None]
    pairs = []
    for i in here:
        others = [j for j in here if j != i]
        distances = [float(np.linalg.norm(_vector(points, i) - _vector(points, j))) for j in others]
        pairs += [(i, others[rank]) for rank in np.argsort(distances, kind="stable")[:neighbours]]
    return unique(pairs)


def members(size: int, edges: Edges) -> NDArray[np.float64]:
    """K x C indicators of the graph's connected components."""
    reached = np.eye(size, dtype=bool)
    reached[edges[:, 0], edges[:, 1]] = reached[edges[:, 1], edges[:, 0]] = True
    for _ in range(size.bit_length()):
        reached = reached @ reached
    columns: NDArray[np.float64] = np.unique(reached, axis=1).astype(np.float64)
    return columns


def components(size: int, edges: Edges) -> list[tuple[list[int], Edges]]:
    """The connected components of two hospitals and more: their members, ascending, and the edges between these,
    as indices into the members."""
    found = []
    for column in members(size, edges).T:
        inside = np.flatnonzero(column)
        if len(inside) > 1:
            mine = edges[np.isin(edges[:, 0], inside)]
            found.append((inside.tolist(), np.searchsorted(inside, mine)))
    return found


def _vector(points: Sequence[NDArray[np.float64] | None], index: int) -> NDArray[np.float64]:
    point = points[index]
    assert point is not None
    return point


def check_sketch(sketch: str, told: Mapping[str, Tensor]) -> None:
    """What one hospital told of its data (``SKETCHES``): just these entries, of shapes that fit each other, and no
    negative variance or count.

    Raises:
        ConfigError: naming the entry.
    """
    if sorted(told) != sorted(_ENTRIES[sketch]):
        raise ConfigError(f"a sketch of '{sketch}' holds {', '.join(_ENTRIES[sketch])}, got {', '.join(sorted(told))}")
    first, *others = (tuple(told[name].shape) for name in _ENTRIES[sketch])
    if len(first) != 1 or any(shape != (first * 2 if sketch == "covariance" else first) for shape in others):
        raise ConfigError(f"the entries of a sketch of '{sketch}' have shapes that do not fit: {[first, *others]}")
    spreads = {"moments": "variance", "labels": "histogram", "covariance": "covariance"}
    spread = told[spreads[sketch]]
    if ((spread.diagonal() if sketch == "covariance" else spread) < 0).any():
        raise ConfigError(f"'{spreads[sketch]}' of a sketch holds negative values")


def points_of(
    sketch: str, statistics: Sequence[Mapping[str, Tensor] | None], sizes: NDArray[np.float64]
) -> list[NDArray[np.float64] | None]:
    """What hospitals told of their data (``SKETCHES``) as points whose distances compare hospitals.

    Means, variances and covariances are divided by the standard deviations of the features over all hospitals, so that
    units do not matter; a constant feature counts nothing. Histograms are shares, whatever was sent, so that a
    hospital's size does not matter.
    """
    given = [index for index, entry in enumerate(statistics) if entry is not None]
    found = {name: _stacked(statistics, given, name) for name in _ENTRIES[sketch]}
    if sketch == "labels":
        counts = found["histogram"]
        rows = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1e-300)
    else:
        spread = found["variance"] if sketch == "moments" else np.einsum("kff->kf", found["covariance"])
        share = sizes[given] / sizes[given].sum() if sizes[given].sum() > 0 else np.full(len(given), 1 / len(given))
        centred = found["mean"] - share @ found["mean"]
        scale = np.sqrt(np.maximum(share @ (spread + centred**2), 0))
        scale = np.where(scale > 0, scale, np.inf)
        second = spread / scale**2 if sketch == "moments" else found["covariance"] / np.outer(scale, scale)
        rows = np.concatenate([centred / scale, second.reshape(len(given), -1)], axis=1)
    points: list[NDArray[np.float64] | None] = [None] * len(statistics)
    for index, row in zip(given, rows, strict=True):
        points[index] = row
    return points


_ENTRIES = {"moments": ("mean", "variance"), "labels": ("histogram",), "covariance": ("mean", "covariance")}


def _stacked(statistics: Sequence[Mapping[str, Tensor] | None], given: list[int], name: str) -> NDArray[np.float64]:
    rows = []
    for index in given:
        entry = statistics[index]
        assert entry is not None
        rows.append(entry[name].double().numpy())
    return np.stack(rows)
