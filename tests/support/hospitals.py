# SPDX-License-Identifier: Apache-2.0
"""Small hospitals with real files for the tests: NIfTI volumes and a table."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import yaml
from numpy.typing import NDArray

SHAPE = (8, 10, 6)
AFFINE = np.diag([2.0, 2.0, 4.0, 1.0])


def save(path: Path, values: NDArray[Any], affine: NDArray[np.float64] = AFFINE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(nib.Nifti1Image(values, affine), path)
    return path


def scan(seed: int) -> tuple[NDArray[np.float32], NDArray[np.uint8]]:
    """An image and its label map: noise, and a brighter block that is the organ."""
    rng = np.random.default_rng(seed)
    label = np.zeros(SHAPE, np.uint8)
    label[2:6, 3:7, 2 : 3 + seed % 3] = 1
    return (rng.normal(100, 20, SHAPE) + 80 * label).astype(np.float32), label


def write_volumes(folder: Path, counts: tuple[int, int, int] = (6, 5, 5)) -> Path:
    """Volumes with label maps, a datalist (training, validation, test) and a site file, which is returned."""
    lists: dict[str, list[dict[str, str]]] = {}
    number = 0
    for key, count in zip(("training", "validation", "test"), counts, strict=True):
        lists[key] = []
        for _ in range(count):
            image, label = scan(number)
            save(folder / "images" / f"p{number:02d}.nii.gz", image)
            save(folder / "labels" / f"p{number:02d}.nii.gz", label)
            name = f"p{number:02d}"
            lists[key].append({"image": f"images/{name}.nii.gz", "label": f"labels/{name}.nii.gz", "patient": name})
            number += 1
    (folder / "list.json").write_text(json.dumps(lists))
    organ = {"kind": "volumes", "datalist": "list.json", "labels": {0: "background", 1: "organ"}}
    return write_site(folder, {"organ": organ})


def write_table(folder: Path, rows: int = 40) -> Path:
    """A table of patients with two visits each, and a site file, which is returned."""
    rng = np.random.default_rng(0)
    lines = ["patient_id,age,sex,crp,sick"]
    for row in range(rows):
        sick = int(rng.random() < 0.5)
        lines.append(f"p{row // 2:02d},{40 + row},{'mf'[row % 2]},{rng.normal(5 + 4 * sick):.3f},{sick}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "blood.csv").write_text("\n".join(lines) + "\n")
    blood = {
        "kind": "table",
        "files": ["blood.csv"],
        "features": {"age": "number", "sex": ["m", "f"], "crp": "number"},
        "label": {"column": "sick", "classes": {"well": [0], "ill": [1]}},
        "split": {"group": "patient_id"},
    }
    return write_site(folder, {"blood": blood})


def write_site(folder: Path, datasets: dict[str, Any]) -> Path:
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump({"site": "here", "datasets": datasets}, sort_keys=False))
    return path


def change_yaml(path: Path, change: Callable[[Any], object]) -> None:
    content = yaml.safe_load(path.read_text())
    change(content)
    path.write_text(yaml.safe_dump(content, sort_keys=False))


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
