# SPDX-License-Identifier: Apache-2.0
"""Train, validation and test: by a column, or cut, with groups (patients) kept together."""

from collections.abc import Mapping, Sequence

import numpy as np

from medpfl.core.errors import DataError
from medpfl.data.contract import Case
from medpfl.data.cutting import cut_in_two
from medpfl.data.declared import SPLITS, Problems, SplitRule
from medpfl.data.split_file import SPELLINGS, by_file, same


class Groups:
    """The names of groups: what ``same`` takes for one is one name, the first that it has, however it is written later.
    One program writes a patient's number as 12, another as 012, and pandas as 12.0 where a column lacks a value; a Mac
    writes an accented letter in a folder's name as two signs, a table as one."""

    def __init__(self) -> None:
        self._first: dict[str, str] = {}

    def named(self, text: str) -> str:
        """The group that a text means."""
        return self._first.setdefault(same(text), text.strip())


def choose(
    rule: SplitRule,
    where: Sequence[str],
    problems: Problems,
    *,
    source: str,
    groups: Sequence[str] | None = None,
    classes: Sequence[int] | None = None,
    named: Sequence[str] | None = None,
) -> dict[str, list[int]]:
    """Indices of each split, by the rule's ``file`` or the text of its ``column`` (``named``) if it has one, else cut.

    Args:
        where: file and row of each item, for messages.
        source: the file or list, for messages.
    """
    if not where and problems.found:
        return {split: [] for split in SPLITS}  # nothing is left to cut, which was told
    if rule.file is not None:
        assert groups is not None, "rows without names cannot be in a file"
        return by_file(rule.path, groups, problems)
    if rule.column is None:
        try:
            return split_indices(rule, len(where), groups=groups, classes=classes)
        except DataError as error:
            problems.add(f"{source}: {error}")
            return {split: [] for split in SPLITS}
    chosen: dict[str, list[int]] = {split: [] for split in SPLITS}
    for index, text in enumerate(named or []):
        split = SPELLINGS.get(text.strip().lower())
        if split is None:
            problems.add(f"{where[index]}: '{rule.column}' must be train, validation or test, got '{text}'")
            continue
        chosen[split].append(index)
    return chosen


def check_listing(
    listing: Mapping[str, Sequence[Case]], source: str, problems: Problems, *, apart: bool = True
) -> None:
    """Report an empty train or test split, groups (patients) that are in two splits (if they are to be ``apart``), and
    names of files that no file could hold."""
    for split in ("train", "test"):
        if not listing[split] and not problems.found:  # or it is empty because of them
            problems.add(f"{source}: the {split} split is empty")
    owner: dict[str, str] = {}
    told: set[str] = set()
    for split, cases in listing.items():
        for case in cases:
            if (readable := case.name.encode("utf-8", "backslashreplace").decode()) != case.name:
                problems.add(f"{readable}: the file's name is not in UTF-8; rename it (convmv -f latin1 -t utf8)")
            if apart and owner.setdefault(case.group, split) != split and case.group not in told:
                told.add(case.group)
                problems.add(
                    f"{case.where}: '{case.group}' is in the {owner[case.group]} split and in the {split} split"
                )


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
        by_unit = np.array([classes[unit[0]] for unit in units])  # which are in another order than the items
        counts = np.unique(by_unit, return_counts=True)[1]
        if len(counts) > 1 and counts.min() > 2:
            strata = by_unit
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
        even = None if strata is None else _if_possible(strata[rest], keep, len(rest) - keep)
        first, second = cut_in_two(len(rest), keep, rule.seed, even)
        rest, taken = rest[first], rest[second]
        chosen[name] = sorted(index for unit in taken for index in units[unit])
        share -= rule.fractions[name]
    chosen["train"] = sorted(index for unit in rest for index in units[unit])
    return chosen


def _if_possible(classes: np.ndarray, kept: int, taken: int) -> np.ndarray | None:
    """The classes, or None where a part is too small to hold one item of each."""
    counts = np.unique(classes, return_counts=True)[1]
    return classes if counts.min() >= 2 and min(kept, taken) >= len(counts) else None
