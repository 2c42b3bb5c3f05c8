# SPDX-License-Identifier: Apache-2.0
"""MR-like phantoms of an abdomen, written as NIfTI files: four hospitals, four scanners.

These are phantoms: geometry and numbers, no patient. Every patient has a body, a spine, one organ to find (the target,
an ellipsoid with a bulge, on the patient's right) and a look-alike (same size, on the left or above). What a scanner
does differs by hospital: tissue contrast (at two hospitals the target is brighter than the look-alike, at two it is
darker; fat is bright, as muscle, or suppressed), bias field, noise, voxel size, orientation of the axes and number of
patients.

Or five hospitals with two sequences each, two of which lack one.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from medpfl.core.seeding import derive_seed

Grid = NDArray[np.float64]
"""One coordinate (mm) of every voxel."""
FIELD = (192.0, 192.0, 96.0)  # mm, right-left, posterior-anterior, inferior-superior
COUNTS = {"train": 6, "val": 3, "test": 8}


@dataclass(frozen=True)
class Scanner:
    """How a hospital images: mean intensity of each tissue, noise (fraction of the body's), bias, voxels, axes."""

    target: float
    twin: float
    fat: float
    noise: float
    bias: float
    voxel: tuple[float, float, float]  # mm
    axes: str
    patients: dict[str, int]


@dataclass(frozen=True)
class Sequence:
    """What a second sequence shows: mean intensity of each tissue, the same at all hospitals; vessels are reversed."""

    target: float = 1.35
    twin: float = 0.85
    fat: float = 0.5
    spine: float = 1.3


HOSPITALS = {
    "hospital-a": Scanner(1.50, 0.65, 1.9, 0.08, 0.15, (3.0, 3.0, 8.0), "RAS", {"train": 10, "val": 4, "test": 8}),
    "hospital-b": Scanner(1.35, 1.85, 1.3, 0.13, 0.30, (2.5, 2.5, 8.0), "LPS", {"train": 6, "val": 3, "test": 8}),
    "hospital-c": Scanner(1.45, 1.90, 0.5, 0.16, 0.20, (3.5, 3.5, 8.0), "RSA", {"train": 3, "val": 2, "test": 8}),
    "hospital-d": Scanner(1.40, 0.70, 1.0, 0.18, 0.35, (3.0, 3.0, 6.0), "PIR", {"train": 2, "val": 2, "test": 8}),
}
TWO_CHANNELS = {
    **{site: (replace(scanner, patients=COUNTS), frozenset[int]()) for site, scanner in list(HOSPITALS.items())[:3]},
    "lacks-0": (replace(HOSPITALS["hospital-d"], patients=COUNTS), frozenset({0})),
    "lacks-1": (replace(HOSPITALS["hospital-a"], patients=COUNTS), frozenset({1})),
}
"""Hospitals with two sequences each, and which of them (their channels) each lacks: after Table III of the pFedNet
paper, where a client lacks one of four. A channel that is lacking is zero."""


def write_phantoms(folder: Path, seed: int = 0) -> list[str]:
    """Write every hospital's volumes, datalist and site file under ``folder``; returns the hospitals' names.

    The same seed gives the same voxels everywhere.
    """
    return _write(folder, seed, {site: (scanner, None) for site, scanner in HOSPITALS.items()})


def write_two_channels(folder: Path, seed: int = 0) -> list[str]:
    """The same for the hospitals of ``TWO_CHANNELS``."""
    return _write(folder, seed, dict(TWO_CHANNELS))


def _write(folder: Path, seed: int, hospitals: Mapping[str, tuple[Scanner, frozenset[int] | None]]) -> list[str]:
    import nibabel as nib

    for site, (scanner, lacking) in hospitals.items():
        base = folder / site
        (base / "images").mkdir(parents=True, exist_ok=True)
        (base / "labels").mkdir(exist_ok=True)
        datalist: dict[str, object] = {
            "name": "MedPFL phantom",
            "description": "generated phantoms, no patients",
            "labels": {"0": "background", "1": "organ"},
        }
        for split, key in (("train", "training"), ("val", "validation"), ("test", "test")):
            items = []
            for number in range(scanner.patients[split]):
                patient = f"{split}{number:02d}"
                rng = np.random.default_rng(derive_seed(seed, site, patient))
                images, label, affine = _scan(scanner, rng, None if lacking is None else Sequence())
                name = f"{site}_{patient}.nii.gz"
                files = [name] if lacking is None else [f"{site}_{patient}_{n}.nii.gz" for n in range(len(images))]
                for channel, (file, image) in enumerate(zip(files, images, strict=True)):
                    shown = np.zeros_like(image) if channel in (lacking or ()) else image
                    nib.save(nib.Nifti1Image(shown, affine), base / "images" / file)
                nib.save(nib.Nifti1Image(label, affine), base / "labels" / name)
                stored = [f"images/{file}" for file in files]
                image_of = stored[0] if lacking is None else stored
                items.append({"image": image_of, "label": f"labels/{name}", "patient": patient})
            datalist[key] = items
        (base / "datalist.json").write_text(json.dumps(datalist, indent=1))
        organ = {"kind": "volumes", "datalist": f"{site}/datalist.json", "labels": {0: "background", 1: "organ"}}
        content: dict[str, object] = {"site": site, "datasets": {"organ": organ}}
        if lacking is not None:  # for tasks whose samples are whole volumes, which are fewer than a policy asks for
            count = scanner.patients["train"]
            content["policy"] = {"least_samples": count, "least_update": count}
        site_file = yaml.safe_dump(content, sort_keys=False)
        (folder / f"{site}.yaml").write_text(
            f"# {site}: generated phantoms, no patients. Paths are relative to this file.\n{site_file}"
        )
    return list(hospitals)


def _scan(
    scanner: Scanner, rng: np.random.Generator, second: Sequence | None = None
) -> tuple[list[NDArray[np.float32]], NDArray[np.uint8], NDArray[np.float64]]:
    """One or two images of a patient, where the target is, and their affine."""
    import nibabel as nib

    shape = tuple(round(length / size) for length, size in zip(FIELD, scanner.voxel, strict=True))
    grid = zip(shape, scanner.voxel, FIELD, strict=True)
    axes = [(np.arange(count) + 0.5) * size - length / 2 for count, size, length in grid]
    x, y, z = np.meshgrid(*axes, indexing="ij")  # mm from the centre: to the right, to the front, upwards

    width, depth = rng.uniform(72, 88), rng.uniform(54, 68)
    body = (x / width) ** 2 + (y / depth) ** 2 < 1
    inner = (x / (width - rng.uniform(6, 14))) ** 2 + (y / (depth - rng.uniform(6, 12))) ** 2 < 1
    image = np.where(body, scanner.fat, 0.05)
    image[inner] = 1.0
    spine = (x / 13) ** 2 + ((y + 0.62 * depth) / 12) ** 2 < 1
    image[spine & body] = rng.uniform(0.45, 0.6)
    other = np.where(body, second.fat, 0.05) if second else image
    if second:
        other[inner] = 1.0
        other[spine & body] = second.spine
    for _ in range(rng.integers(3, 6)):  # vessels and bowel, of any brightness
        cx, cy = rng.uniform(-0.6, 0.6) * width, rng.uniform(-0.5, 0.6) * depth
        radius = rng.uniform(4, 8)
        vessel = ((x - cx) ** 2 + (y - cy) ** 2 < radius**2) & inner
        image[vessel] = rng.uniform(0.4, 1.6)
        if second:
            other[vessel] = 2 - image[vessel]

    # The target lies on the right, its twin on the left; either may be high or low, so the side alone is a weak hint.
    swap = rng.random() < 0.2
    side = -1.0 if swap else 1.0
    target = _organ(rng, x, y, z, side * 0.42 * width, rng.uniform(-0.1, 0.25) * depth) & inner
    twin = _organ(rng, x, y, z, -side * 0.42 * width, rng.uniform(-0.1, 0.25) * depth) & inner & ~target
    image[twin] = scanner.twin * rng.uniform(0.93, 1.07)
    image[target] = scanner.target * rng.uniform(0.93, 1.07)
    images = [_acquired(image, scanner, rng, x, y, z)]
    if second:
        other[twin] = second.twin * rng.uniform(0.93, 1.07)
        other[target] = second.target * rng.uniform(0.93, 1.07)
        images.append(_acquired(other, scanner, rng, x, y, z))

    affine = np.diag([*scanner.voxel, 1.0])
    affine[:3, 3] = [axis[0] for axis in axes]
    turn = nib.orientations.ornt_transform(
        nib.orientations.io_orientation(affine), nib.orientations.axcodes2ornt(scanner.axes)
    )
    truth = nib.Nifti1Image(target.astype(np.uint8), affine).as_reoriented(turn)
    turned = [nib.Nifti1Image(found, affine).as_reoriented(turn) for found in images]
    return [np.asarray(found.dataobj) for found in turned], np.asarray(truth.dataobj), truth.affine


def _acquired(
    image: NDArray[np.float64], scanner: Scanner, rng: np.random.Generator, x: Grid, y: Grid, z: Grid
) -> NDArray[np.float32]:
    """What the scanner makes of the tissues' intensities: bias field, noise, a scale of its own."""
    direction = rng.normal(size=3)
    slope = (direction[0] * x + direction[1] * y + direction[2] * z) / np.linalg.norm(direction) / 90
    image = image * (1 + scanner.bias * slope)
    image = np.abs(image + rng.normal(scale=scanner.noise, size=image.shape))  # magnitude images: noise is Rician
    image = image * rng.uniform(200, 900)  # MR has no unit: every scan has a scale of its own
    return np.round(image).astype(np.float32)


def _organ(rng: np.random.Generator, x: Grid, y: Grid, z: Grid, centre_x: float, centre_y: float) -> NDArray[np.bool_]:
    """An ellipsoid with a bulge: about 45 x 35 x 60 mm, every patient's own."""
    centre = np.array([centre_x, centre_y, rng.uniform(-12, 12)]) + rng.normal(scale=3, size=3)
    radii = np.array([rng.uniform(16, 26), rng.uniform(13, 21), rng.uniform(26, 38)])
    angle = rng.uniform(-0.6, 0.6)
    dx, dy, dz = x - centre[0], y - centre[1], z - centre[2]
    u, v = np.cos(angle) * dx + np.sin(angle) * dy, -np.sin(angle) * dx + np.cos(angle) * dy
    body = (u / radii[0]) ** 2 + (v / radii[1]) ** 2 + (dz / radii[2]) ** 2 < 1
    bu, bv = rng.uniform(-0.7, 0.7) * radii[0], rng.uniform(0.3, 0.9) * radii[1]
    bulge = ((u - bu) ** 2 + (v - bv) ** 2) / (rng.uniform(7, 12) ** 2) + (dz / (0.7 * radii[2])) ** 2 < 1
    found: NDArray[np.bool_] = body | bulge
    return found
