# SPDX-License-Identifier: Apache-2.0
"""Arrays in an .npz file: MedMNIST's keys, or one array of images and one of labels."""

from pathlib import Path
from typing import Any

import numpy as np

from medpfl.core.errors import DataError, unreadable
from medpfl.data.init.answers import Answers, Entry, Value
from medpfl.data.init.splitting import given_group, patient_column, patient_columns, split_column, split_entry
from medpfl.data.init.tables import CLASSES, LABEL
from medpfl.data.untrusted import BROKEN_NPZ

MEDMNIST = {f"{split}_{what}" for split in ("train", "val", "test") for what in ("images", "labels")}


def describe(path: Path, shown: str, answers: Answers) -> list[Entry]:
    """Entries for an .npz file.

    Raises:
        DataError: it cannot be read, or does not hold images and labels.
        SiteFileError: what is needed was not answered.
    """
    try:
        with np.load(path, allow_pickle=False) as archive:
            medmnist = set(archive.files) >= MEDMNIST
            arrays = {name: archive[name] for name in archive.files if medmnist is False or name == "train_labels"}
    except BROKEN_NPZ as error:
        raise DataError(unreadable(path, "an .npz file", error)) from error
    start = [Entry("kind", "arrays"), Entry("file", shown)]
    if medmnist:
        given_group(answers, "")
        return [*start, _classes(arrays["train_labels"], path, answers)]
    inputs = [name for name, array in arrays.items() if array.ndim >= 3]
    name = answers.get("inputs", "Which array holds the images?", inputs[0] if len(inputs) == 1 else None, list(arrays))
    rows = len(arrays[name])
    fitting = {
        key: [str(value) for value in array.ravel().tolist()]
        for key, array in arrays.items()
        if array.shape in ((rows,), (rows, 1)) and key != name
    }
    split, patients = split_column(fitting), patient_columns(fitting, "")
    left = [key for key in fitting if key != split and key not in patients] or [*fitting]
    left = left if len(left) == 1 else [key for key in left if LABEL.fullmatch(key)]
    label = answers.get("label", "Which array holds the labels?", left[0] if len(left) == 1 else None, [*fitting])
    group = patient_column(fitting, label, answers)
    grouped = bool(group) and len(set(fitting[group])) < rows  # or nothing is kept together
    number = not answers.classes and not answers.schema and _has_fractions(arrays[label])
    evenly = {} if grouped or number else {"stratify": True}
    note = "images of a group stay together" if grouped and not split else ""
    return [
        *start,
        Entry("inputs", name),
        *([Entry("value", label, "the number to predict")] if number else []),
        *([] if number else [Entry("labels", label), _classes(arrays[label], path, answers)]),
        split_entry(split if split != label else "", group if grouped else "", note, **evenly),
    ]


def _has_fractions(labels: np.ndarray[Any, Any]) -> bool:
    """Whether they are numbers that no classes are: many, and not whole."""
    return labels.dtype.kind == "f" and len(np.unique(labels)) > CLASSES and bool((labels % 1 != 0).any())


def _classes(labels: np.ndarray[Any, Any], path: Path, answers: Answers) -> Entry:
    found: list[Value] = np.unique(labels).tolist()
    if labels.size != len(labels) or not 2 <= len(found) <= 20 * CLASSES:
        raise DataError(
            f"{path}: expected one class a row and at least 2 classes, got labels of shape {labels.shape} with "
            f"{len(found)} values"
        )
    classes = answers.class_values(found, [str(value) for value in found], "the labels")
    return Entry("classes", classes, "class: the label values that mean it")
