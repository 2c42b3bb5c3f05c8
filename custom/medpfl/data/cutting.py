# SPDX-License-Identifier: Apache-2.0
"""One list of items cut in two at random, as scikit-learn cuts it, without the seconds that importing it takes.

A hospital's process needs nothing else of scikit-learn, and importing it is as long as a small job's training.
"""

import numpy as np
from numpy.typing import NDArray

Places = NDArray[np.int64]


def cut_in_two(count: int, kept: int, seed: int, classes: NDArray[np.int64] | None = None) -> tuple[Places, Places]:
    """What ``sklearn.model_selection.train_test_split`` gives, place by place (its ``ShuffleSplit``, and its
    ``StratifiedShuffleSplit`` where there are classes).

    Args:
        count: number of items.
        kept: so many go into the first part, the others into the second; 0 < ``kept`` < ``count``.
        seed: of numpy's RandomState, 0 ... 2**32 - 1.
        classes: one class per item, whose shares both parts are to have; each has 2 items at least, and neither part
            is smaller than the number of classes.

    Returns:
        Places of the first part and of the second, in the order in which they were drawn.
    """
    random = np.random.RandomState(seed)
    if classes is None:
        drawn = random.permutation(count)
        return drawn[count - kept :], drawn[: count - kept]
    _, which, sizes = np.unique(classes, return_inverse=True, return_counts=True)
    members = np.split(np.argsort(which, kind="stable"), np.cumsum(sizes)[:-1])
    firsts = _shares(sizes, kept, random)
    seconds = _shares(sizes - firsts, count - kept, random)
    first: list[Places] = []
    second: list[Places] = []
    for places, one, two in zip(members, firsts, seconds, strict=True):
        drawn = places[random.permutation(len(places))]
        first.append(drawn[:one])
        second.append(drawn[one : one + two])
    return random.permutation(np.concatenate(first)), random.permutation(np.concatenate(second))


def _shares(sizes: Places, wanted: int, random: np.random.RandomState) -> Places:
    """How many of each class make ``wanted`` items: by their shares, the rest to those with the largest remainders."""
    exact = sizes / sizes.sum() * wanted
    found = np.floor(exact)
    lacking = int(wanted - found.sum())
    remainder = exact - found
    for value in np.unique(remainder)[::-1]:
        if lacking <= 0:
            break
        equal = np.flatnonzero(remainder == value)
        chosen = random.choice(equal, size=min(len(equal), lacking), replace=False)
        found[chosen] += 1
        lacking -= len(chosen)
    shares: Places = found.astype(np.int64)
    return shares
