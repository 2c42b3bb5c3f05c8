# SPDX-License-Identifier: Apache-2.0
"""Hospitals with tiny volumes of differing shape, and a 3-D task for them."""

import json
from pathlib import Path

import nibabel as nib
import numpy as np
import yaml

from medpfl.models.unet import UNet
from medpfl.tasks.segmentation import Segmentation
from small_jobs import FEW

VOLUMES = Segmentation("organ", size=(8, 8, 4), spacing=(2.0, 2.0, 2.0), architecture=UNet((4, 8)))
COUNTS = {"training": 6, "validation": 2, "test": 2}


def write_volume_sites(
    folder: Path, sites: tuple[str, ...] = ("anna", "berta"), sides: tuple[int, int] = (7, 14)
) -> dict[str, Path]:
    """Volumes of 2 mm, a side from the first of ``sides`` to below the second in voxels, each hospital's organ brighter
    or darker than what lies around it."""
    files = {}
    for number, site in enumerate(sites):
        rng = np.random.default_rng(number)
        (folder / site).mkdir(parents=True)
        datalist: dict[str, list[dict[str, str]]] = {}
        for split, count in COUNTS.items():
            datalist[split] = []
            for case in range(count):
                shape = tuple(rng.integers(*sides, 3).tolist())
                label = np.zeros(shape, np.uint8)
                label[2:6, 2:5, 1:5] = 1
                image = rng.normal(10, 1, shape) + label * (4.0 if number % 2 else -4.0)
                names = [f"{split}{case}_{kind}.nii.gz" for kind in ("image", "label")]
                for name, values in zip(names, (image.astype(np.float32), label), strict=True):
                    nib.save(nib.Nifti1Image(values, np.diag([2.0, 2.0, 2.0, 1.0])), folder / site / name)
                datalist[split].append({"image": names[0], "label": names[1]})
        (folder / site / "list.json").write_text(json.dumps(datalist))
        organ: dict[str, object] = {"kind": "volumes", "labels": {0: "background", 1: "organ"}}
        organ["datalist"] = str((folder / site / "list.json").resolve())  # a test may copy the site file elsewhere
        files[site] = folder / f"{site}.yaml"
        files[site].write_text(yaml.safe_dump({"site": site, "datasets": {"organ": organ}, "policy": FEW}))
    return files
