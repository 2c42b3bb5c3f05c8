# SPDX-License-Identifier: Apache-2.0
"""Site files for the 30 subjects of UCI HAR (Anguita et al., ESANN 2013), each a hospital, or for a few hospitals that
share them. The user downloads the data.

The raw signals are used (nine channels, windows of 128 steps), not the 561 features made of them. Windows overlap by
half. So each subject's windows are cut by time: of every activity the first train, the next validate, the last test,
and the one window at each border, which shares samples with both sides, is left out. Of each split all windows of a
subject are one patient's, of whom a hospital that is one subject has a single one, whose scores it lets leave.
"""

import os
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.deployed.evaluate import write_text

ENVIRONMENT_VARIABLE = "MEDPFL_HAR_DATA"
SIGNALS = tuple(f"{kind}_{axis}" for kind in ("body_acc", "body_gyro", "total_acc") for axis in "xyz")
ACTIVITIES = ("walking", "walking_upstairs", "walking_downstairs", "sitting", "standing", "laying")
STEPS = 128
FRACTIONS = {"train": 0.5, "validation": 0.2, "test": 0.3}


def write_har(folder: Path, data: Path | None = None, hospitals: int | None = None) -> list[str]:
    """Write ``subject-NN.yaml`` and ``subject-NN.npz`` for every subject; returns the names.

    Args:
        hospitals: write so many hospitals instead, ``hospital-1`` ..., to which the subjects are dealt out in turn.
        data: the unpacked folder "UCI HAR Dataset"; None: $MEDPFL_HAR_DATA.

    Raises:
        DataError: the data are not there or not whole; says what to download.
    """
    data = data or Path(os.environ.get(ENVIRONMENT_VARIABLE, "data/UCI HAR Dataset"))
    parts = [_read(data, part) for part in ("train", "test")]
    signals, activity, subject = (np.concatenate([part[place] for part in parts]) for place in range(3))
    folder.mkdir(parents=True, exist_ok=True)
    names = []
    people = np.unique(subject)
    groups = {f"subject-{number:02}": [number] for number in people}
    if hospitals is not None:
        groups = {f"hospital-{number + 1}": people[number::hospitals].tolist() for number in range(hospitals)}
    for name, members in groups.items():
        names.append(name)
        cuts = []
        for number in members:
            mine = np.flatnonzero(subject == number)
            kept, split = cut_by_time(activity[mine], f"subject-{number:02}")
            cuts.append((mine[kept], split))
        rows, split = (np.concatenate(each) for each in zip(*cuts, strict=True))
        who = [f"{number} {part}" for number, part in zip(subject[rows], split, strict=True)]  # none is in two splits
        np.savez_compressed(folder / f"{name}.npz", x=signals[rows], activity=activity[rows], split=split, subject=who)
        har = {
            "kind": "series",
            "files": [f"{name}.npz"],
            "inputs": "x",
            "label": {"column": "activity", "classes": {text: [code] for code, text in enumerate(ACTIVITIES, start=1)}},
            "split": {"column": "split", "group": "subject"},
        }
        policy = {"policy": {"least_scored": 1}} if len(members) == 1 else {}
        text = yaml.safe_dump({"site": name, **policy, "datasets": {"har": har}}, sort_keys=False)
        write_text(folder / f"{name}.yaml", text)
    return names


def cut_by_time(activity: NDArray[np.int64], name: str) -> tuple[NDArray[np.int64], NDArray[np.str_]]:
    """Indices of the windows that are kept, and the split of each; ``activity``: one a window, in order of time.

    Raises:
        DataError: too few windows of an activity for three splits.
    """
    kept: list[int] = []
    split: list[str] = []
    for code in np.unique(activity):
        windows = np.flatnonzero(activity == code)
        first = round(FRACTIONS["train"] * len(windows))
        second = first + round(FRACTIONS["validation"] * len(windows))
        ranges = {"train": (0, first), "validation": (first + 1, second), "test": (second + 1, len(windows))}
        for part, (start, stop) in ranges.items():
            if start >= stop:
                raise DataError(f"{name}: {len(windows)} windows of activity {code} are too few for three splits")
            kept.extend(windows[start:stop].tolist())
            split.extend([part] * (stop - start))
    order = np.argsort(kept)
    return np.array(kept, dtype=np.int64)[order], np.array(split)[order]


def _read(data: Path, part: str) -> tuple[NDArray[np.float32], NDArray[np.int64], NDArray[np.int64]]:
    """Signals n x 9 x 128, activities and subjects of one half of the data set."""
    subject = _table(data / part / f"subject_{part}.txt", 1)[:, 0].astype(np.int64)
    activity = _table(data / part / f"y_{part}.txt", 1)[:, 0].astype(np.int64)
    files = {name: data / part / "Inertial Signals" / f"{name}_{part}.txt" for name in SIGNALS}
    channels = [_table(file, STEPS).astype(np.float32) for file in files.values()]
    counts = {"y": len(activity), **{name: len(rows) for name, rows in zip(files, channels, strict=True)}}
    for name, count in counts.items():
        if count != len(subject):
            raise DataError(f"{data}: {part}: {len(subject)} subjects, but {count} rows of {name}")
    if not np.isin(activity, range(1, len(ACTIVITIES) + 1)).all():
        raise DataError(f"{data / part}: activities must be 1 to {len(ACTIVITIES)}, got {np.unique(activity).tolist()}")
    return np.stack(channels, axis=1), activity, subject


def _table(file: Path, columns: int) -> NDArray[np.float64]:
    import pandas as pd

    try:
        found = pd.read_csv(file, sep=r"\s+", header=None, dtype=np.float64).to_numpy()
    except OSError as error:
        raise DataError(
            f"{file}: no such file. Download the dataset 'Human Activity Recognition Using Smartphones' (id 240) from "
            f"the UCI Machine Learning Repository, unpack it, and set {ENVIRONMENT_VARIABLE} to its folder "
            "'UCI HAR Dataset'"
        ) from error
    except ValueError as error:
        raise DataError(f"{file}: not a table of numbers: {error}") from error
    if found.shape[1] != columns:
        raise DataError(f"{file}: expected {columns} numbers a line, got {found.shape[1]}")
    if not np.isfinite(found).all():
        raise DataError(f"{file}: holds values that are not finite")
    return found
