# SPDX-License-Identifier: Apache-2.0
"""Real images for ``benchmarks attacks``: two of HAM10000's sources as two hospitals with as many cases as the
generated ones, 16 x 16 grey pixels, four diagnoses equally often, one image a lesion."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from medpfl.core.errors import DataError
from medpfl.core.seeding import derive_seed
from medpfl.demo.patterns import SIDE
from medpfl.demo.skin import opened, rows_of, skin_data

SOURCES = ("rosendahl", "vidir_modern")
DIAGNOSES = ("bcc", "bkl", "mel", "nv")
SPLITS = {"train": 20, "val": 10, "test": 75}
"""Lesions of each diagnosis."""


def skin_pools(data: Path) -> list[dict[str, NDArray[Any]]]:
    """As ``attacked.pools``: uint8 images N x 16 x 16 and labels N x 1 of train (80), val (40) and test (300).

    Args:
        data: HAM10000 as a ZIP file or a folder.

    Raises:
        DataError: it is not there, or has too few lesions.
    """
    needed = sum(SPLITS.values())
    with opened(skin_data(data)) as source:
        rows, found = rows_of(source), []
        for site in SOURCES:
            parts: dict[str, list[tuple[NDArray[np.uint8], int]]] = {split: [] for split in SPLITS}
            for label, diagnosis in enumerate(DIAGNOSES):
                mine = {r["lesion_id"]: r["image_id"] for r in rows if (r["dataset"], r["dx"]) == (site, diagnosis)}
                if len(mine) < needed:
                    raise DataError(f"{data}: {site} has {len(mine)} lesions of {diagnosis}; {needed} are needed")
                order = np.random.default_rng(derive_seed(0, site, diagnosis)).permutation(sorted(mine.values()))
                names = iter(order.tolist())
                for split, count in SPLITS.items():
                    parts[split] += [(_pixels(source.read(f"{next(names)}.jpg")), label) for _ in range(count)]
            found.append(_arrays(parts))
    return found


def _pixels(jpeg: bytes) -> NDArray[np.uint8]:
    with Image.open(io.BytesIO(jpeg)) as image:
        return np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


def _arrays(parts: dict[str, list[tuple[NDArray[np.uint8], int]]]) -> dict[str, NDArray[Any]]:
    """In an order that does not go by the diagnosis: attacks use the first images."""
    arrays: dict[str, NDArray[Any]] = {}
    for split, pairs in parts.items():
        order = np.random.default_rng(derive_seed(0, split)).permutation(len(pairs))
        arrays[f"{split}_images"] = np.stack([pairs[index][0] for index in order])
        arrays[f"{split}_labels"] = np.array([[pairs[index][1]] for index in order])
    return arrays
