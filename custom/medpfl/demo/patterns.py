# SPDX-License-Identifier: Apache-2.0
"""Six hospitals with generated images that differ in one chosen way: for controlled comparisons of methods.

No patients: small grey images (16 x 16) of four kinds of pattern under a smooth background and noise. What is alike
everywhere is the patterns; what differs is the kind of heterogeneity that is asked for, and nothing else.
"""

from pathlib import Path

import numpy as np
import yaml
from numpy.typing import NDArray

from medpfl.core.errors import ConfigError
from medpfl.core.seeding import derive_seed

HOSPITALS = tuple(f"hospital-{letter}" for letter in "abcdef")
CLASSES, SIDE = 4, 16
KINDS = {
    "none": "all hospitals alike",
    "feature_shift": "every hospital has another scanner: contrast, brightness, blur and noise",
    "label_skew": "every hospital mostly sees two of the four classes",
    "concept_shift": "three hospitals call every pattern by another name than the other three",
    "quantity_skew": "one hospital has 12 training images, the others 160",
}
"""What a kind of heterogeneity means, by its name."""
_COUNTS = {"train": 80, "val": 40, "test": 300}
_SCANNERS = (
    (1.0, 0.0, 0, 0.0),
    (0.3, 0.9, 0, 0.0),
    (1.8, -0.8, 0, 0.3),
    (0.6, -1.2, 1, 0.0),
    (0.5, 1.2, 1, 0.2),
    (1.4, 0.0, 2, 0.5),
)
"""Contrast, brightness, passes of a 3 x 3 blur, additional noise."""


def write_patterns(folder: Path, kind: str = "none", seed: int = 0) -> list[str]:
    """Write ``<hospital>.yaml`` and ``<hospital>.npz`` (MedMNIST's format) into ``folder``; returns the names.

    The same seed gives the same pixels. Training, validation and test images of a hospital are drawn alike.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"the kind of heterogeneity must be one of {', '.join(KINDS)}; got '{kind}'")
    folder.mkdir(parents=True, exist_ok=True)
    templates = _templates(np.random.default_rng(derive_seed(seed, "templates")))
    for index, site in enumerate(HOSPITALS):
        arrays: dict[str, NDArray[np.uint8]] = {}
        for split, count in _counts(kind, index).items():
            rng = np.random.default_rng(derive_seed(seed, site, split))
            patterns = rng.choice(CLASSES, count, p=_shares(kind, index))
            images = np.stack([_image(rng, templates[one]) for one in patterns])
            if kind == "feature_shift":
                images = _scanned(images, index, rng)
            arrays[f"{split}_images"] = np.clip(np.round(128 + 32 * images), 0, 255).astype(np.uint8)
            arrays[f"{split}_labels"] = _named(kind, index, patterns).astype(np.uint8)[:, None]
        np.savez(folder / f"{site}.npz", **arrays)  # type: ignore[arg-type]
        dataset = {
            "kind": "arrays",
            "file": f"{site}.npz",
            "classes": {f"pattern {number}": [number] for number in range(CLASSES)},
        }
        text = yaml.safe_dump({"site": site, "datasets": {"pattern": dataset}}, sort_keys=False)
        (folder / f"{site}.yaml").write_text(f"# generated patterns, no patients; {kind}: {KINDS[kind]}\n{text}")
    return list(HOSPITALS)


def _counts(kind: str, index: int) -> dict[str, int]:
    if kind != "quantity_skew":
        return _COUNTS
    return {**_COUNTS, "train": 12 if index == 0 else 160}


def _shares(kind: str, index: int) -> NDArray[np.float64]:
    """How often each class occurs."""
    if kind != "label_skew":
        return np.full(CLASSES, 1 / CLASSES)
    shares = np.full(CLASSES, 0.05)
    pairs = [(0, 1), (2, 3), (0, 2), (1, 3), (0, 3), (1, 2)]
    shares[list(pairs[index])] = 0.45
    return shares


def _named(kind: str, index: int, patterns: NDArray[np.int64]) -> NDArray[np.int64]:
    """The class that a hospital gives to a pattern."""
    return (patterns + 2) % CLASSES if kind == "concept_shift" and index % 2 else patterns


def _templates(rng: np.random.Generator) -> NDArray[np.float64]:
    return np.stack([_smooth(rng, 3) for _ in range(CLASSES)])


def _smooth(rng: np.random.Generator, waves: int) -> NDArray[np.float64]:
    """A periodic field of low frequencies, mean 0 and deviation 1."""
    y, x = np.mgrid[:SIDE, :SIDE] * (2 * np.pi / SIDE)
    field = np.zeros((SIDE, SIDE))
    for _ in range(waves):
        fx, fy = rng.integers(-3, 4, 2)
        field += np.cos(fx * x + fy * y + rng.uniform(0, 2 * np.pi)) * (1.0 if fx or fy else 0.0)
    spread = field.std()
    return field / spread if spread > 1e-6 else _smooth(rng, waves)


def _image(rng: np.random.Generator, template: NDArray[np.float64]) -> NDArray[np.float64]:
    shift = tuple(rng.integers(-2, 3, 2).tolist())
    image = rng.uniform(0.5, 1.0) * np.roll(template, shift, axis=(0, 1)) + 0.8 * _smooth(rng, 3)
    return np.asarray(image + rng.normal(0, 0.8, image.shape))


def _scanned(images: NDArray[np.float64], index: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """What a hospital's scanner makes of images, N x H x W."""
    contrast, brightness, blurs, noise = _SCANNERS[index]
    for _ in range(blurs):
        shifted = [np.roll(images, (dy, dx), axis=(1, 2)) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
        images = np.mean(shifted, axis=0)
    return contrast * images + brightness + noise * rng.normal(size=images.shape)
