# SPDX-License-Identifier: Apache-2.0
"""Recordings: a folder of tables with the same columns, each a recording with a row per time step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from medpfl.core.errors import DataError
from medpfl.data.init import tables
from medpfl.data.init.answers import Answers, Entry, Value, as_value
from medpfl.data.init.like import own_columns
from medpfl.data.init.splitting import FRACTIONS, patient_columns, split_column, split_entry
from medpfl.data.numbers import has_comma, has_point, with_point
from medpfl.data.paths import seen_in
from medpfl.data.patients import PATIENT, are_patients

if TYPE_CHECKING:
    import pandas as pd

TIME = re.compile(
    r"(date|time|timestamp|datum|zeit|t|s|ms|seconds?|samples?|steps?|index|frame)([ _.(\[-].*)?", re.IGNORECASE
)
FOLDER = "folder"
"""What a file's folder is called where recordings lie in several."""
_SINGLE = "a single recording is cut in time; it counts as one patient, so that jobs want 'least_scored: 1' in 'policy'"
WINDOW = 1000
"""Time steps of a case, at the most, where nobody says another number."""


@dataclass
class _Seen:
    """What the recordings hold in one column: its texts, up to more than there can be classes, and what they are."""

    texts: set[str] = field(default_factory=set)
    missing: set[str] = field(default_factory=set)
    points: bool = False
    commas: bool = False
    numbers: bool = True
    longest: int = WINDOW
    """Time steps with one text, one after another, that each recording has at some place."""

    def add(self, column: pd.Series) -> None:
        found = set(column.unique().tolist())
        if len(found) <= tables.CLASSES:
            self.longest = min(self.longest, int((column != column.shift()).cumsum().value_counts().max()))
        self.missing |= found & set(tables.MISSING)
        found -= self.missing
        self.points |= any(map(has_point, found))
        self.commas |= any(map(has_comma, found))
        self.numbers = self.numbers and all(tables.is_number(with_point(cell)) for cell in found)
        if len(self.texts) <= tables.CLASSES:
            self.texts |= found


def find_recordings(folder: Path) -> list[Path]:
    """The tables in a folder, or, where there are none, in the folders in it."""
    here = _tables(folder)
    return here or [file for inner in seen_in(folder) if inner.is_dir() for file in _tables(inner)]


def _tables(folder: Path) -> list[Path]:
    return [path for path in seen_in(folder) if path.suffix.lower() in tables.SUFFIXES and path.is_file()]


def describe(folder: Path, base: str, files: Sequence[Path], answers: Answers) -> list[Entry]:
    """The dataset's entries.

    Rule: columns of numbers are channels, but for the one to predict, times and what names the patient. A recording is
    a group where no column names the patient. A case has as many time steps as the shortest recording, and as every one
    has with one class, at most 1000. A single recording of several classes is cut in time.

    Args:
        base: the folder relative to the site file.

    Raises:
        DataError: the files are no tables, or their columns differ.
        SiteFileError: what is needed was not answered.
    """
    seen, shortest, header, separator = _look(files)
    columns = list(seen)
    inner = {path.parent.name for path in files} if files[0].parent != folder else set()
    if inner:
        seen[FOLDER] = _Seen(texts=inner, numbers=False)
    numbers = [one for one in seen.values() if one.numbers]
    decimal = tables.decimal_comma(sum(one.commas for one in numbers), sum(one.points for one in numbers), separator)
    agreed = answers.schema.declared if answers.schema else {}
    split = split_column({name: one.texts for name, one in seen.items()})
    named = FOLDER if inner and split != FOLDER and not are_patients(inner) else _texts(seen, {split, FOLDER})
    axes = {"x", "y"} <= {name.lower() for name in columns}  # of an accelerometer: y is no answer then
    answers_to = [name for name in columns if tables.LABEL.fullmatch(name) and not (axes and name.lower() == "y")]
    guess = answers_to[0] if answers_to else named
    label = answers.get("label", "Which column is to be predicted?", guess, [*seen])
    split = "" if split == label else split
    group = _group(seen, {label, split}, answers)
    channels, rename = _channels(columns, seen, {label, group}, decimal, agreed.get("channels"), answers)
    if not channels:
        raise DataError(f"{folder}: no column of numbers is left beside '{label}' to predict it from")
    alone = len(files) == 1 and not split and not _is_number(seen[label], answers)
    fits = min(_fits(files[0], label) if alone else seen[label].longest, shortest, WINDOW)
    runs = f", and each has {fits} of one class" if not alone and fits < min(shortest, WINDOW) else ""
    length = agreed.get("window.length")
    steps = str(length) if length else answers.get("window", "Time steps of a case", str(fits))
    if not steps.isdecimal() or int(steps) < 1:
        raise DataError(f"--window: expected a number of time steps, got '{steps}'")
    entries = [Entry("kind", "series"), Entry("files", _pattern(base, files, bool(inner)), "a recording each")]
    if separator:
        entries.append(Entry("separator", separator))
    if decimal:
        entries.append(Entry("decimal", ","))
    if not header:
        entries.append(Entry("columns", columns, "the files have no header line; give the columns their names"))
    if rename:
        entries.append(Entry("rename", rename, "these files' column: the name that the hospitals agreed on"))
    missing = {text for name in columns for text in seen[name].missing}
    if missing:
        entries.append(Entry("missing", sorted({"", "?", "NA", *missing}), "cells that mean 'not known'"))
    left = [name for name in columns if name not in (label, group, split) and rename.get(name, name) not in channels]
    entries.append(Entry("channels", channels, f"left out: {', '.join(left)}" if left else ""))
    if any(seen[name].missing for name in columns if rename.get(name, name) in channels):
        entries.append(Entry("missing_samples", "interpolate", "channels lack samples; interpolate or refuse"))
    entries += [
        _answer(label, seen[label], decimal, answers),
        Entry("window", {"length": int(steps)}, f"time steps of a case; the shortest recording has {shortest}{runs}"),
    ]
    if "rate" in agreed:
        entries.append(Entry("rate", agreed["rate"], "time steps a second: make sure that it is so here"))
    if alone and not group:
        return [*entries, Entry("split", {"time": True, "fractions": FRACTIONS}, _SINGLE)]
    each = "every recording counts as another patient; name the patient in braces if that is not so"
    said = f"cases of one {group} stay together" if group else each
    return [*entries, split_entry(split, group, "" if split else said)]


def _fits(file: Path, label: str) -> int:
    """So many time steps of a case leave some of each class to every split of a single recording, cut in time."""
    column = tables.read(file)[0][label]
    runs = column.groupby((column != column.shift()).cumsum()).agg(["first", "size"])
    return max(1, int(runs.groupby("first")["size"].max().min() * min(FRACTIONS.values())))


def _look(files: Sequence[Path]) -> tuple[dict[str, _Seen], int, bool, str | None]:
    """Column to what was seen in it; rows of the shortest file; whether there is a header line; the separator."""
    seen: dict[str, _Seen] = {}
    shortest, header, separator = 0, True, None
    for number, file in enumerate(files):
        frame, header, separator = tables.read(file)
        names = [str(name) for name in frame.columns]
        if number == 0:
            seen = {name: _Seen() for name in names}
        elif names != list(seen):
            raise DataError(
                f"{file}: its columns are {', '.join(names)}, those of {files[0].name} {', '.join(seen)}; files with "
                "the same columns are recordings, a row per time step; or name one table"
            )
        for name in names:
            seen[name].add(frame[name])
        shortest = min(shortest, len(frame)) if number else len(frame)
    return seen, shortest, header, separator


def _texts(seen: dict[str, _Seen], used: set[str]) -> str | None:
    """The only column of few texts that are no numbers, if there is one, beside those that are used otherwise."""
    others = {name: one for name, one in seen.items() if name not in used and not PATIENT.fullmatch(name)}
    found = [name for name, one in others.items() if not one.numbers and 2 <= len(one.texts) <= tables.CLASSES]
    return found[0] if len(found) == 1 else None


def _group(seen: dict[str, _Seen], used: set[str], answers: Answers) -> str:
    """The column that names the patient; "" for none."""
    named = patient_columns([name for name in seen if name not in used], "")
    guess = named[0] if named else FOLDER if FOLDER in seen and FOLDER not in used else "none"
    if "group" not in answers.given and guess == "none":
        return ""
    question = "Which column names the patient ('none' if every recording is another patient)?"
    chosen = answers.get("group", question, guess, [*seen, "none"])
    return "" if chosen == "none" else chosen


def _channels(
    columns: Sequence[str], seen: dict[str, _Seen], used: set[str], decimal: bool, agreed: object, answers: Answers
) -> tuple[list[str], dict[str, str]]:
    """The channels, and this hospital's columns that are called otherwise."""
    numbers = [name for name in columns if name not in used and seen[name].numbers]
    if isinstance(agreed, list):
        own = own_columns([str(name) for name in agreed], numbers, answers)
        return list(own), {column: name for name, column in own.items() if column != name}
    if decimal:  # a number with a point is none then
        numbers = [name for name in numbers if not seen[name].points]
    return [name for name in numbers if not TIME.fullmatch(name) and not PATIENT.fullmatch(name)], {}


def _is_number(seen: _Seen, answers: Answers) -> bool:
    return len(seen.texts) > tables.CLASSES and seen.numbers and not answers.classes


def _answer(label: str, seen: _Seen, decimal: bool, answers: Answers) -> Entry:
    if _is_number(seen, answers):
        return Entry("value", label, "the number to predict")
    found: list[Value] = sorted({as_value(with_point(text) if decimal else text) for text in seen.texts}, key=str)
    if not 2 <= len(found) <= tables.CLASSES:
        some = f"{len(found)}" if len(found) < 2 else f"more than {tables.CLASSES}"
        raise DataError(f"column '{label}' has {some} different values; a class to predict needs 2 to {tables.CLASSES}")
    classes = answers.class_values(found, [str(value) for value in found], f"column '{label}'")
    return Entry("label", {"column": label, "classes": classes}, "class: the values that mean it")


def _pattern(base: str, files: Sequence[Path], inner: bool) -> str | list[str]:
    start = [*([base] if base != "." else []), *([f"{{{FOLDER}}}"] if inner else [])]
    endings = {path.suffix for path in files}
    names = [f"*{ending}" for ending in sorted(endings)] if len(files) > 1 else [files[0].name]
    patterns = ["/".join([*start, name]) for name in names]
    return patterns[0] if len(patterns) == 1 else patterns
