# SPDX-License-Identifier: Apache-2.0
"""Hospitals that share one .npz file, each with rows of its own: their site files, the lists of their rows, and a
picture of who has which labels."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.arrays.npz import Npz
from medpfl.data.arrays.prepare import MEDMNIST
from medpfl.data.partition import check_disjoint, label_counts
from medpfl.deployed.evaluate import write_text
from medpfl.results.skew import draw_label_counts
from medpfl.results.svg import svg_text

Splits = dict[str, dict[str, list[int]]]
LISTS, PICTURE = "lists.json", "labels.svg"


def labels_of(file: Path) -> NDArray[np.int64]:
    """The classes of all rows of a file in MedMNIST's format, through its train, val and test parts.

    Raises:
        DataError: no such file, or a class is not a whole number from 0 on.
    """
    archive = Npz(file)
    keys = [f"{prefix}_labels" for prefix in MEDMNIST.values() if f"{prefix}_labels" in archive.keys]
    if not keys:
        raise DataError(f"{file}: expected MedMNIST's arrays train_labels, val_labels, test_labels")
    labels = np.concatenate([archive.array(key).reshape(-1) for key in keys])
    if labels.dtype.kind not in "iu" or labels.min(initial=0) < 0:
        raise DataError(f"{file}: expected labels 0, 1, 2, ..., got values of type {labels.dtype}")
    return labels.astype(np.int64)


def read_lists(file: Path, order: Sequence[str]) -> Splits:
    """The splits of a JSON file of index lists, hospital after hospital, each with its splits in the given ``order``.

    Raises:
        DataError: it is not such a file, or its lists do not divide into hospitals.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{file}: not valid JSON: {error}") from error
    fits = isinstance(content, list) and content and len(content) % len(order) == 0
    if not fits or not all(isinstance(part, list) and all(type(row) is int for row in part) for part in content):
        raise DataError(f"{file}: expected lists of row numbers, {len(order)} a hospital ({', '.join(order)})")
    width = len(order)
    return {
        name: dict(zip(order, content[width * place : width * (place + 1)], strict=True))
        for place, name in enumerate(names(len(content) // width))
    }


def names(count: int) -> list[str]:
    """Names of simulated hospitals, in the order of their numbers."""
    return [f"client-{number:0{len(str(count))}}" for number in range(1, count + 1)]


def write_splits(
    folder: Path, file: Path, dataset: str, splits: Splits, labels: NDArray[np.int64],
    classes: Sequence[str] | None = None,
) -> None:  # fmt: skip
    """Write ``<hospital>.yaml`` for every hospital, ``lists.json`` with their rows, and ``labels.svg``.

    Raises:
        DataError: a row is in two splits, or does not exist.
    """
    check_disjoint(splits)
    for client, parts in splits.items():
        for split, rows in parts.items():
            if wrong := [row for row in rows if not 0 <= row < len(labels)]:
                raise DataError(f"{client}'s {split} split has row {wrong[0]}; {file} has {len(labels)} rows")
    found = list(classes) if classes else [f"class-{number}" for number in range(int(labels.max()) + 1)]
    folder.mkdir(parents=True, exist_ok=True)
    lists: list[list[int]] = []
    declared: dict[str, dict[str, object]] = {}
    for client, parts in splits.items():
        places = {split: len(lists) + number for number, split in enumerate(parts)}
        lists.extend(parts.values())
        declared[client] = {
            "kind": "arrays",
            "file": str(file.resolve()),
            "classes": {name: [number] for number, name in enumerate(found)},
            "split": {"lists": {"file": LISTS, **places}},
        }
    write_text(folder / LISTS, json.dumps(lists))
    counts = {
        client: label_counts([row for rows in parts.values() for row in rows], labels, len(found))
        for client, parts in splits.items()
    }
    write_text(folder / PICTURE, svg_text(draw_label_counts(counts, found)))
    for client, content in declared.items():
        text = yaml.safe_dump({"site": client, "datasets": {dataset: content}}, sort_keys=False)
        write_text(folder / f"{client}.yaml", text)


def declare_checkpoint(site_files: list[Path], name: str, file: Path) -> None:
    """Add a checkpoint's declaration to site files that were written here."""
    for path in site_files:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        content.setdefault("checkpoints", {})[name] = str(file.resolve())
        write_text(path, yaml.safe_dump(content, sort_keys=False))
