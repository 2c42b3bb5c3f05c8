# SPDX-License-Identifier: Apache-2.0
"""What is kept of one case once it was read: its shape, ranges, content's hash, label and a small picture."""

import hashlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from medpfl.check.pictures import Picture, picture_of
from medpfl.data.contract import Case, Dataset, Item


@dataclass(frozen=True)
class Summary:
    """One case.

    Attributes:
        shape: channels first.
        spacing: mm along the image's axes, where the file has a geometry.
        low, high, total: per channel, over the values that are known (NaN, NaN and 0 where none is).
        known, missing: number of values per channel.
        sample: some of the known values, per channel.
        digest: equal for equal images, whatever their files are called.
        label: class index, voxels of each class, the number to predict, or a tuple as ``Item.target``.
        placed: see ``Item``.
        deepest: the largest value of an image whose values are divided by the largest of 16 bits; 0 of others.
    """

    shape: tuple[int, ...]
    spacing: tuple[float, ...] | None
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    total: NDArray[np.float64]
    known: NDArray[np.int64]
    missing: NDArray[np.int64]
    sample: list[NDArray[np.float32]]
    digest: bytes
    label: int | float | tuple[float, ...] | NDArray[np.int64]
    picture: Picture | None
    placed: bool
    deepest: int


def summarise(dataset: Dataset, case: Case, classes: int, sampled: int) -> Summary:
    """Read one case; ``sampled`` values of each channel are kept for percentiles and histograms.

    Raises:
        DataError: it cannot be read.
    """
    item: Item = dataset.read(case)
    image = np.ascontiguousarray(item.image)
    flat = image.reshape(len(image), -1)
    holes = np.isnan(flat) if flat.dtype.kind == "f" else np.zeros((len(flat), 1), bool)
    channels = [channel[~hole] if hole.any() else channel for channel, hole in zip(flat, holes, strict=True)]
    chosen = np.random.default_rng(0).integers(flat.shape[1], size=min(sampled, flat.shape[1]))
    content = hashlib.blake2b(repr((image.shape, str(image.dtype))).encode(), digest_size=16)
    content.update(image.data)
    target = item.target
    if isinstance(target, np.ndarray):
        label: int | float | tuple[float, ...] | NDArray[np.int64] = np.bincount(target.ravel(), minlength=classes)
    else:
        label = target if isinstance(target, float | tuple) else int(target)
    return Summary(
        shape=image.shape,
        spacing=item.spacing,
        low=np.array([channel.min() if len(channel) else np.nan for channel in channels], np.float64),
        high=np.array([channel.max() if len(channel) else np.nan for channel in channels], np.float64),
        total=np.array([channel.sum(dtype=np.float64) for channel in channels]),
        known=np.array([len(channel) for channel in channels]),
        missing=holes.sum(axis=1),
        sample=[part[~np.isnan(part)] for part in flat[:, chosen].astype(np.float32)],
        digest=content.digest(),
        label=label,
        picture=picture_of(item),
        placed=item.placed,
        deepest=int(image.max()) if image.dtype == np.uint16 else 0,
    )
