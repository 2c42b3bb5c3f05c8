# SPDX-License-Identifier: Apache-2.0
"""Label maps beside the cases to predict, and the Dice of what was written."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.pixels import read_mask
from medpfl.data.volumes.new import find_volumes, name_of_item
from medpfl.data.volumes.prepare import read_image, same_place
from medpfl.data.volumes.structures import structures_of

_ENDINGS = (".nii.gz", ".nii", ".png")


def find_labels(source: Path, labels: Path | None) -> Callable[[str], Path | None]:
    """How to find a case's label map, by the case's name.

    Args:
        source: what is predicted; of a datalist (JSON), the labels that it names count where ``labels`` is None.
        labels: a folder, which must hold a label of every case: <case>.nii.gz, .nii or .png.

    Raises:
        DataError: the folder is none; the function: it holds no label of a case.
    """
    if labels is None:
        listed = _listed(source) if source.suffix == ".json" else {}
        return listed.get
    if not labels.is_dir():
        raise DataError(f"{labels}: the labels must be a folder")

    def find(case: str) -> Path:
        for ending in _ENDINGS:
            if (path := labels / f"{case}{ending}").is_file():
                return path
        raise DataError(f"{labels}: holds no label of '{case}': expected {case}.nii.gz, {case}.nii or {case}.png")

    return find


def _listed(path: Path) -> dict[str, Path]:
    find_volumes(path)  # it says what is wrong with the datalist
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    items = [item for items in content.values() if isinstance(items, list) for item in items]
    return {
        name: path.parent / item["label"]
        for item in items
        if isinstance(item, dict) and isinstance(item.get("label"), str) and (name := name_of_item(item))
    }


def dice_of(written: Path, label: Path, classes: int, structures: Sequence[Sequence[int]]) -> float:
    """Mean Dice over the structures, on the input's own voxels or pixels; one that is in neither counts 1.

    Args:
        written: a segmentation as ``medpfl predict`` writes it: 0, 1, 2, ... in the order of the classes.
        label: a label map with the same values.
        structures: the numbers of each (``Task.structures``): one class, or the classes of a region.

    Raises:
        DataError: the label cannot be read, has another shape, geometry or other values.
    """
    found, truth = _read(written, label, binary=classes == 2)
    if found.shape != truth.shape:
        raise DataError(f"{label}: the label map has shape {truth.shape}, its image {found.shape}")
    values = np.unique(truth)
    if not np.isin(values, np.arange(classes)).all():
        strange = next(value for value in values.tolist() if value not in range(classes))
        raise DataError(f"{label}: expected the classes' numbers 0 to {classes - 1}, got {strange:g}")
    scores = []
    for numbers in structures:
        mine, theirs = np.isin(found, numbers), np.isin(truth, numbers)
        total = int(mine.sum()) + int(theirs.sum())
        scores.append(2 * int((mine & theirs).sum()) / total if total else 1.0)
    return float(np.mean(scores))


def _read(written: Path, label: Path, binary: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Both label maps; ``binary``: there is one structure, which most programs store as 255, or 65535 of 16 bits. Of
    several, nothing says which one it would be."""
    if written.suffix == ".png":
        truth = read_mask(label)
        white = binary and any(set(np.unique(truth).tolist()) <= {0, most} for most in (255, 65535))
        return read_mask(written), np.minimum(truth, 1) if white else truth
    if structures_of(label):
        raise DataError(
            f"{label}: Dice is told of label maps in voxels, and this is a DICOM segmentation or structure set: "
            "predict the images alone, and test the model with 'medpfl evaluate', which knows what its structures mean"
        )
    found, place = read_image(written)
    truth, other = read_image(label)
    if truth.shape == found.shape:
        same_place(label, written, found.shape[1:], place, other)
    return found[0], truth[0] if len(truth) == 1 else truth
