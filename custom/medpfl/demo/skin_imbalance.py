# SPDX-License-Identifier: Apache-2.0
"""Five simulated hospitals of HAM10000 with unlike shares of malignant lesions, after Table II of the pFedNet paper.

delta is n_negative / n_positive. The paper does not say whether all its five clients lean the same way; here three
hospitals have delta benign images for every malignant one and two the reverse, so that delta 1 makes all alike and a
larger one two kinds of hospitals. One image a lesion; every hospital's images are its own. Images are cut to the
square in their middle and brought to 32 x 32.
"""

import io
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

from medpfl.core.errors import DataError
from medpfl.core.seeding import derive_seed
from medpfl.data.partition import cut_by_class
from medpfl.demo.skin import MALIGNANT, opened, rows_of, skin_data

HOSPITALS = {"mild-1": True, "mild-2": True, "mild-3": True, "severe-1": False, "severe-2": False}
"""Hospital to whether benign images are the more."""
DELTAS = (1, 2, 4, 7)
IMAGES = 300
"""Of a hospital."""
SIDE = 32
FRACTIONS = {"train": 0.64, "validation": 0.16, "test": 0.2}


def write_imbalance(folder: Path, data: Path | None = None, delta: float = 4) -> list[str]:
    """Write ``<hospital>.yaml`` and ``<hospital>.npz`` with the dataset ``skin_malignant``; returns the names.

    Args:
        data: the ZIP file or folder of HAM10000; None: $MEDPFL_HAM10000.
        delta: benign images a malignant one, >= 1.

    Raises:
        DataError: the data are not there or not whole, or there are not lesions enough.
    """
    if not 1 <= delta < IMAGES:
        raise DataError(f"delta must be from 1 to {IMAGES - 1}, got {delta}")
    with opened(skin_data(data)) as source:
        one = {row["lesion_id"]: row for row in reversed(rows_of(source))}.values()  # a lesion's first image
        rng = np.random.default_rng(derive_seed(0, "imbalance"))
        pools: dict[int, list[str]] = {0: [], 1: []}
        for row in sorted(one, key=lambda row: row["image_id"]):
            pools[int(row["dx"] in MALIGNANT)].append(row["image_id"])
        for pool in pools.values():
            rng.shuffle(pool)
        few = round(IMAGES / (1 + delta))
        folder.mkdir(parents=True, exist_ok=True)
        for site, benign_more in HOSPITALS.items():
            malignant = few if benign_more else IMAGES - few
            counts = {0: IMAGES - malignant, 1: malignant}
            if any(len(pools[label]) < count for label, count in counts.items()):
                raise DataError(f"{source.place}: too few lesions for {len(HOSPITALS)} hospitals of {IMAGES} images")
            names = [pools[label].pop() for label, count in counts.items() for _ in range(count)]
            labels = np.repeat([0, 1], [counts[0], counts[1]])
            source.check(f"{name}.jpg" for name in names)
            images = np.stack([_square(source.read(f"{name}.jpg"), name) for name in names])
            _write_site(folder, site, images, labels)
    return list(HOSPITALS)


def _square(content: bytes, name: str) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(content)) as image:
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            cut = image.convert("RGB").crop((left, top, left + side, top + side))
            return np.asarray(cut.resize((SIDE, SIDE), Image.Resampling.BILINEAR))
    except OSError as error:
        raise DataError(f"{name}.jpg cannot be read as an image: {error}") from error


def _write_site(folder: Path, site: str, images: np.ndarray, labels: np.ndarray) -> None:
    rows = cut_by_class(list(range(len(labels))), labels, FRACTIONS, derive_seed(0, site) % 2**32)
    short = {"train": "train", "validation": "val", "test": "test"}
    arrays = {f"{short[split]}_images": images[index] for split, index in rows.items()}
    arrays.update({f"{short[split]}_labels": labels[index, None].astype(np.uint8) for split, index in rows.items()})
    np.savez(folder / f"{site}.npz", **arrays)  # type: ignore[arg-type]
    dataset = {"kind": "arrays", "file": f"{site}.npz", "classes": {"benign": [0], "malignant": [1]}}
    text = yaml.safe_dump({"site": site, "datasets": {"skin_malignant": dataset}}, sort_keys=False)
    (folder / f"{site}.yaml").write_text("# HAM10000 (CC BY-NC 4.0): Tschandl, Rosendahl, Kittler.\n" + text)
