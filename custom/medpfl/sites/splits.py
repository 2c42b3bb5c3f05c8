# SPDX-License-Identifier: Apache-2.0
"""Cut a dataset into train, validation and test, with groups (patients) kept together."""

from collections.abc import Sequence

import numpy as np
from sklearn.model_selection import train_test_split

from medpfl.core.errors import DataError
from medpfl.sites.site_file import SPLITS, SplitRule


def split_indices(
    rule: SplitRule, count: int, *, groups: Sequence[str] | None = None, classes: Sequence[int] | None = None
) -> dict[str, list[int]]:
    """Indices of each split, sorted; together they are 0 ... count-1, each once.

    The test part is cut off first and does not depend on whether the rest is cut again into train and validation.
    With fractions 0.66 / 0.34, ``stratify`` and seed 43 the test part is FLamby's split of its heart data.

    With so few items that a later part would be left empty, the test part gives one up.

    Args:
        rule: fractions, seed, stratification.
        count: number of items.
        groups: one name per item; items of one group stay in one split.
        classes: one class per item, for ``stratify``; ignored if a class has fewer than 3 items (as FLamby does).

    Raises:
        DataError: a split would be empty.
    """
    units: list[list[int]]
    if groups is None:
        units = [[index] for index in range(count)]
    else:
        members: dict[str, list[int]] = {}
        for index, group in enumerate(groups):
            members.setdefault(group, []).append(index)
        units = [members[group] for group in sorted(members)]
    strata: np.ndarray | None = None
    if rule.stratify and classes is not None:
        counts = np.unique(np.asarray(classes), return_counts=True)[1]
        if len(counts) > 1 and counts.min() > 2:
            strata = np.asarray(classes)
    wanted = [name for name in SPLITS if name in rule.fractions]
    if len(units) < len(wanted):
        what = "rows" if groups is None else "groups"
        raise DataError(f"{len(units)} {what} cannot be cut into {len(wanted)} splits ({', '.join(wanted)})")
    chosen: dict[str, list[int]] = {name: [] for name in SPLITS}
    rest = np.arange(len(units))
    share = 1.0
    for name in ("test", "validation"):
        if name not in rule.fractions:
            continue
        fraction = rule.fractions[name] / share
        keep = int(round(len(rest) * (1 - fraction), 9))
        keep = min(max(keep, wanted.index(name)), len(rest) - 1)  # at least one for each part still to fill
        rest, taken = train_test_split(
            rest,
            train_size=keep,
            test_size=len(rest) - keep,
            random_state=rule.seed,
            shuffle=True,
            stratify=None if strata is None else _if_possible(strata[rest], keep, len(rest) - keep),
        )
        chosen[name] = sorted(index for unit in taken for index in units[unit])
        share -= rule.fractions[name]
    chosen["train"] = sorted(index for unit in rest for index in units[unit])
    return chosen


def _if_possible(classes: np.ndarray, kept: int, taken: int) -> np.ndarray | None:
    """The classes, or None where a part is too small to hold one item of each."""
    counts = np.unique(classes, return_counts=True)[1]
    return classes if counts.min() >= 2 and min(kept, taken) >= len(counts) else None
