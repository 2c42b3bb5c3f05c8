# SPDX-License-Identifier: Apache-2.0
"""Cut one labelled data set into simulated hospitals with unlike label distributions."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.core.seeding import derive_seed
from medpfl.data.partition import cut_by_class
from medpfl.demo.index_lists import labels_of, names, write_splits

Rows = NDArray[np.int64]
_TRIES = 1000


def dirichlet(labels: NDArray[np.int64], clients: int, alpha: float, seed: int, least: int = 10) -> list[Rows]:
    """Every class is shared among all clients by proportions drawn from Dirichlet(alpha, ..., alpha).

    Drawn again until every client has at least ``least`` rows. Sizes and labels both differ between clients.

    Args:
        labels: N class indices.
        alpha: > 0; the smaller the more unlike.

    Returns:
        Each client's rows, sorted; together 0 ... N-1, each once.

    Raises:
        DataError: no such cut was found.
    """
    _check(labels, clients, alpha, least)
    rng = np.random.default_rng(seed)
    for _ in range(_TRIES):
        parts: list[list[int]] = [[] for _ in range(clients)]
        for value in np.unique(labels):
            rows = rng.permutation(np.flatnonzero(labels == value))
            shares = rng.dirichlet(np.full(clients, alpha))
            for part, mine in zip(parts, np.split(rows, _borders(shares, len(rows))), strict=True):
                part.extend(mine.tolist())
        if min(len(part) for part in parts) >= least:
            return [np.sort(np.array(part, dtype=np.int64)) for part in parts]
    raise DataError(
        f"no cut of {len(labels)} rows into {clients} clients of at least {least} with alpha {alpha} "
        f"({_TRIES} draws); take a larger alpha or fewer clients"
    )


def pairwise(labels: NDArray[np.int64], clients: int, alpha: float, seed: int) -> list[Rows]:
    """The cut of FedAP's experiments, as its official code makes it (and its paper does not say).

    The shuffled rows are cut into slices for two clients each. Within a slice the two share each class by
    Dirichlet(alpha, alpha), one that has its half already takes no more, and this is drawn again until both have at
    least half of their half. Then everything is laid end to end and cut anew into ``clients`` equal pieces. So all
    clients are of one size, the partners of a slice have nearly disjoint classes, and clients of different slices may
    be alike.

    Args, Returns, Raises: as ``dirichlet``.
    """
    _check(labels, clients, alpha, 2)
    rng = np.random.default_rng(seed)
    slices = np.array_split(rng.permutation(len(labels)), -(-clients // 2))
    laid: list[Rows] = []
    for number, rows in enumerate(slices):
        two = 2 if 2 * number + 1 < clients else 1
        laid.extend(_shared(rows, labels, two, alpha, rng))
    return [np.sort(part) for part in np.array_split(np.concatenate(laid), clients)]


def _shared(rows: Rows, labels: NDArray[np.int64], count: int, alpha: float, rng: np.random.Generator) -> list[Rows]:
    """A slice's rows, shared among its ``count`` clients."""
    full = len(rows) / count
    for _ in range(_TRIES):
        parts: list[list[int]] = [[] for _ in range(count)]
        for value in np.unique(labels):
            mine = rows[labels[rows] == value]
            open_ = np.array([len(part) < full for part in parts])
            shares = rng.dirichlet(np.full(count, alpha)) * open_
            # A draw can be 0 for the only client that is still open: then it takes the class.
            shares = shares / shares.sum() if shares.sum() > 0 else open_ / open_.sum()
            for part, given in zip(parts, np.split(mine, _borders(shares, len(mine))), strict=True):
                part.extend(given.tolist())
        if min(len(part) for part in parts) >= int(full / 2):
            return [np.array(part, dtype=np.int64) for part in parts]
    raise DataError(f"no fair share of {len(rows)} rows with alpha {alpha} in {_TRIES} draws; take a larger alpha")


def _borders(shares: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    return (np.cumsum(shares)[:-1] * count).astype(np.int64)


def _check(labels: NDArray[np.int64], clients: int, alpha: float, least: int) -> None:
    if clients < 1 or clients * least > len(labels):
        raise DataError(f"{len(labels)} rows cannot be cut into {clients} clients of at least {least} rows")
    if not alpha > 0:
        raise DataError(f"alpha must be above 0, got {alpha}")


CUTS = {"dirichlet": dirichlet, "pairwise": pairwise}


def write_cut(
    file: Path, folder: Path, dataset: str, how: str, clients: int, alpha: float, fractions: Mapping[str, float],
    seed: int, classes: Sequence[str] | None = None,
) -> list[str]:  # fmt: skip
    """Cut a file into simulated hospitals and write their site files; returns their names.

    Args:
        dataset: its name in the site files.
        how: "dirichlet" or "pairwise".
        fractions: "train", "test" and perhaps "validation" to their shares of every hospital's rows.

    Raises:
        DataError: the file cannot be cut so.
    """
    labels = labels_of(file)
    parts = CUTS[how](labels, clients, alpha, seed)
    splits = {
        name: cut_by_class(part.tolist(), labels, fractions, derive_seed(seed, name) % 2**32)
        for name, part in zip(names(clients), parts, strict=True)
    }
    write_splits(folder, file, dataset, splits, labels, classes)
    return list(splits)
