# SPDX-License-Identifier: Apache-2.0
"""Small hospitals with real image files, for the tests."""

from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from medpfl.data.images.declare import Images
from medpfl.data.site_file import load_site_file

CLASSES = {"benign": ["nv", "bkl"], "malignant": ["mel"]}
KINDS = ("nv", "bkl", "mel")
MASKS = {
    "files": "masks/*.png",
    "suffix": "_mask",
    "labels": {0: "background", 1: "lesion"},
    "label_map": {255: 1},
}
TABLE: dict[str, Any] = {
    "kind": "images",
    "files": "images/*.png",
    "table": {"file": "list.csv", "image": "id"},
    "label": {"column": "dx", "classes": CLASSES},
    "masks": MASKS,
    "split": {"group": "lesion", "fractions": {"train": 0.5, "validation": 0.25, "test": 0.25}},
}
FOLDERS: dict[str, Any] = {
    "kind": "images",
    "files": "by/{split}/{dx}/*.png",
    "label": {"column": "dx", "classes": CLASSES},
    "split": {"column": "split"},
}


def write_images(folder: Path, count: int = 12, size: tuple[int, int] = (12, 10)) -> None:
    """``count`` images (height x width), two a lesion, whose malignant ones are bright; masks, and a table."""
    rng = np.random.default_rng(0)
    for name in ("images", "masks"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    lines = ["id,lesion,dx,site"]
    for number in range(count):
        kind = KINDS[number % 3]
        mask = np.zeros(size, np.uint8)
        mask[2 : 2 + number % 5 + 2, 3:7] = 255
        image = rng.integers(0, 100, (*size, 3)) + (100 if kind == "mel" else 0) + mask[..., None] // 6
        Image.fromarray(image.astype(np.uint8)).save(folder / "images" / f"i{number:02}.png")
        Image.fromarray(mask).save(folder / "masks" / f"i{number:02}_mask.png")
        lines.append(f"i{number:02},l{number // 2},{kind},{'ab'[number % 4 == 3]}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")


def write_folders(folder: Path) -> None:
    """The layout that many public sets have: by/<split>/<class>/*.png."""
    for number in range(12):
        place = folder / "by" / ("train", "val", "test")[number % 3] / ("nv", "mel")[number // 3 % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((6, 8), 20 * number, np.uint8)).save(place / f"{number}.png")


def declare(folder: Path, dataset: dict[str, Any], **storage: Any) -> Path:
    """A site file with one dataset, ``skin``."""
    content: dict[str, Any] = {"policy": {"least_hospitals": 1}, "datasets": {"skin": dataset}}
    if storage:
        content["storage"] = storage
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    return path


def images(folder: Path, dataset: dict[str, Any] | None = None, **changes: Any) -> Images:
    """The declared dataset (``TABLE`` by default) with some keys replaced; None takes a key out."""
    content = {key: value for key, value in {**(dataset or TABLE), **changes}.items() if value is not None}
    return load_site_file(declare(folder, content)).dataset("skin", Images)
