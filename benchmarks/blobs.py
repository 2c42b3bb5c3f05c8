# SPDX-License-Identifier: Apache-2.0
"""Small generated images of several classes in MedMNIST's file format, for studies and tests of splits."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from medpfl.core.seeding import derive_seed

SIZE = 28
_BLOBS = 5


def write_blobs(
    file: Path, rows: dict[str, int], classes: int = 10, seed: int = 0, noise: float = 0.25
) -> NDArray[np.int64]:
    """Write an .npz file with train_images, train_labels, val_..., test_...: uint8, N x 28 x 28 and N x 1.

    A class is a pattern of bright and dark blobs. Every image shows its class's pattern moved, turned, stretched and
    of its own contrast, in noise, so that a linear model does not suffice. The seed decides patterns and images.

    Args:
        rows: "train", "val" and "test" to their numbers of images.
        noise: standard deviation of the pixels' noise; the patterns' amplitude is about 1.

    Returns:
        The labels of all rows in the order train, val, test.
    """
    rng = np.random.default_rng(derive_seed(seed, "patterns", classes))
    blobs = rng.uniform(-0.62, 0.62, size=(classes, _BLOBS, 2))
    signs = rng.choice([-1.0, 1.0], size=(classes, _BLOBS))
    widths = rng.uniform(0.14, 0.3, size=(classes, _BLOBS))
    arrays: dict[str, NDArray[np.uint8]] = {}
    everything = []
    for part, count in rows.items():
        labels = rng.permutation(np.arange(count) % classes)
        images = np.stack([_image(rng, blobs[k], signs[k], widths[k], noise) for k in labels])
        arrays[f"{part}_images"] = images
        arrays[f"{part}_labels"] = labels[:, None].astype(np.uint8)
        everything.append(labels)
    file.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
    return np.concatenate(everything)


def _image(
    rng: np.random.Generator, blobs: NDArray[np.float64], signs: NDArray[np.float64], widths: NDArray[np.float64],
    noise: float,
) -> NDArray[np.uint8]:  # fmt: skip
    angle, scale = rng.uniform(-0.5, 0.5), rng.uniform(0.8, 1.2, size=2)
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    centres = (blobs * scale) @ turn.T + rng.uniform(-0.25, 0.25, size=2)
    axis = np.linspace(-1, 1, SIZE)
    distance = (axis[:, None, None] - centres[:, 0]) ** 2 + (axis[None, :, None] - centres[:, 1]) ** 2
    pattern = (signs * np.exp(-distance / (2 * widths**2))).sum(axis=2)
    image = rng.uniform(0.6, 1.2) * pattern + rng.uniform(-0.3, 0.3) + noise * rng.normal(size=(SIZE, SIZE))
    pixels: NDArray[np.uint8] = np.clip(128 + 70 * image, 0, 255).astype(np.uint8)
    return pixels
