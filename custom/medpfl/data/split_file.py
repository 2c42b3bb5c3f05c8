# SPDX-License-Identifier: Apache-2.0
"""A CSV file that says of every group of cases (every patient) in which split it is.

A split that is drawn is drawn of all cases: one more case, and others move from training to test. With such a file
those that are in it stay where they are, however many come later; new ones are drawn and written into it.
"""

import csv
import io
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np

from medpfl.core.errors import DataError, shown
from medpfl.data.contract import Dataset
from medpfl.data.declared import SPLITS, Problems, SplitRule, composed

SPELLINGS = {
    "train": "train", "training": "train",
    "val": "validation", "valid": "validation", "validation": "validation",
    "test": "test", "testing": "test",
}  # fmt: skip
_COLUMNS = ["group", "split"]
_WHOLE = re.compile(r"0*(\d+)(\.0*)?")


def same(text: str) -> str:
    """One text for all ways to write a group: of a whole number 12, also 012 and 12.0; without spaces around it, which
    arrays of texts of one length have; and both forms of an accented letter."""
    text = composed(text.strip())
    number = _WHOLE.fullmatch(text)
    return number[1] if number else text


def read_split_file(path: Path) -> dict[str, str]:
    """Group, as ``same`` has it, to its split.

    Raises:
        DataError: it cannot be read, or a line is not a group and its split.
    """
    found: dict[str, str] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            separator = _separator(file.readline())
            file.seek(0)
            rows = csv.reader(file, strict=True, delimiter=separator)
            header = [text.strip() for text in next(rows, [])]
            if header != _COLUMNS:
                raise DataError(f"{path}: expected the header '{','.join(_COLUMNS)}', got {shown(','.join(header))}")
            for row in rows:
                if row:
                    _take(row, f"{path}:{rows.line_num}", found)
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file, which 'split.file' names; 'medpfl site split' writes it") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path}: expected a CSV file as text in UTF-8 ({error})") from error
    return found


def _separator(header: str) -> str:
    """Spreadsheets in much of Europe write semicolons."""
    return ";" if ";" in header else ","


def _take(row: list[str], where: str, found: dict[str, str]) -> None:
    split = SPELLINGS.get(row[1].strip().lower()) if len(row) == len(_COLUMNS) else None
    if split is None or not row[0].strip():
        raise DataError(f"{where}: expected a group and train, validation or test, got {shown(','.join(row))}")
    if found.setdefault(same(row[0]), split) != split:
        raise DataError(f"{where}: '{row[0]}' is in the {found[same(row[0])]} split and in the {split} split")


def by_file(path: Path, groups: Iterable[str], problems: Problems) -> dict[str, list[int]]:
    """Indices of each split; groups that the file lacks are one problem."""
    known = read_split_file(path)
    chosen: dict[str, list[int]] = {split: [] for split in SPLITS}
    lacking: dict[str, None] = {}
    for index, group in enumerate(groups):
        if (split := known.get(same(group))) is None:
            lacking[group] = None
        else:
            chosen[split].append(index)
    if lacking:
        problems.add(
            f"{path}: it does not say in which split '{next(iter(lacking))}' is"
            f"{f', nor {len(lacking) - 1} more' if len(lacking) > 1 else ''}; 'medpfl site split' draws what is new"
        )
    return chosen


@dataclass(frozen=True)
class Drawn:
    """What is in a dataset's split file now: ``groups`` and ``new`` ones of each split, of those that have cases.

    Attributes:
        gone: how many groups of the file have no case any more; they stay in it.
    """

    path: Path
    groups: Mapping[str, int]
    new: Mapping[str, int]
    gone: int


def extend(dataset: Dataset) -> Drawn:
    """Write a dataset's split file, or add to it the groups that it lacks.

    A file that is not there yet becomes what would be drawn without it. Later ones go where a split is furthest below
    its fraction, in an order that the rule's seed draws.

    Raises:
        DataError: the dataset's split names no file, the data cannot be listed or be cut by one, or it cannot be
            written; or another process is at it.
    """
    rule = dataset.split
    if rule.file is None:
        raise DataError("its 'split' has no 'file'; name one there, such as 'file: split.csv'")
    path = rule.path.resolve()  # a link stays one
    temporary = path.with_name(f".{path.name}.new")
    try:
        # Whoever begins while another one writes would not see what that one draws.
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            try:
                return _extend(dataset, path, temporary, file)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
    except FileExistsError as error:
        raise DataError(
            f"{temporary} is there: another 'medpfl site split' writes {path.name}, or one was killed; wait for its "
            "end, and remove the file if none runs"
        ) from error
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error


def _extend(dataset: Dataset, path: Path, temporary: Path, file: IO[str]) -> Drawn:
    """``file`` is that of ``temporary``."""
    rule = dataset.split
    old = read_split_file(path) if path.exists() else {}
    drawn = _with(dataset, rule.model_copy(update={"file": None})).cases(Problems())
    owners = {same(case.group): (case.group, split) for split, cases in drawn.items() for case in cases}
    new = sorted(key for key in owners if key not in old)
    chosen = (
        {key: owners[key][1] for key in new}
        if not old
        else _drawn(rule, new, [old[key] for key in owners if key in old])
    )
    lines = path.read_text(encoding="utf-8-sig") if old else f"{','.join(_COLUMNS)}\n"
    text, separator = io.StringIO(), _separator(lines.partition("\n")[0])
    csv.writer(text, lineterminator="\n", delimiter=separator).writerows((owners[key][0], chosen[key]) for key in new)
    file.write(lines + ("" if lines.endswith("\n") else "\n") + text.getvalue())
    file.close()  # a full disk is told of here
    _with(dataset, rule.model_copy(update={"file": str(temporary)})).cases(Problems())  # it can be cut so
    if old:
        shutil.copymode(path, temporary)  # the account that trains may be another one
    os.replace(temporary, path)
    now, added = Counter(old.get(key) or chosen[key] for key in owners), Counter(chosen.values())
    there = [split for split in SPLITS if now[split]]
    gone = len(old.keys() - owners.keys())
    return Drawn(path, {split: now[split] for split in there}, {split: added[split] for split in there}, gone)


def _with(dataset: Dataset, rule: SplitRule) -> Dataset:
    return dataset.model_copy(update={"split": rule})


def _drawn(rule: SplitRule, new: list[str], there: list[str]) -> dict[str, str]:
    """New group to its split. ``there``: splits of those that have one."""
    counts, chosen = Counter(there), dict[str, str]()
    for index in np.random.default_rng([rule.seed, len(there)]).permutation(len(new)).tolist():
        total = counts.total() + 1
        lacks = {split: rule.fractions[split] * total - counts[split] for split in SPLITS if split in rule.fractions}
        chosen[new[index]] = split = max(lacks, key=lambda one: lacks[one])
        counts[split] += 1
    return chosen
