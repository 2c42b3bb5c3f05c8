# SPDX-License-Identifier: Apache-2.0
"""Rows of .npz files as network inputs: which axis is what, size, range of values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.arrays.npz import Npz
from medpfl.data.numbers import LARGEST
from medpfl.data.pixels import CENTRE, SPREAD, resize
from medpfl.data.preparation import NewCase, Preparation, Spec

if TYPE_CHECKING:
    from torch import Tensor

Layout = Literal["NHW", "NHWC", "NCHW", "NDHW", "NDHWC", "NCDHW"]
MEDMNIST = {"train": "train", "validation": "val", "test": "test"}
"""Split to what MedMNIST's keys begin with."""
_FIXED = ("bool", "uint8", "uint16")  # scaled by the type's maximum; other types have no natural range


def layout_of(file: Npz, key: str, declared: str | None) -> str:
    """What the axes of an array are, by declaration or where its shape leaves no doubt.

    Raises:
        DataError: no numbers, not as many axes as declared, or in doubt.
    """
    shape, dtype = file.header(key)
    place = f"{file.path}: array '{key}'"
    if dtype.kind not in "biuf" or dtype.itemsize > 8:
        raise DataError(f"{place} is of type {dtype}; expected whole or floating-point numbers of at most 64 bits")
    if 0 in shape[1:]:
        raise DataError(f"{place} has the shape {shape}: its rows are empty")
    if declared:
        if len(declared) != len(shape):
            raise DataError(f"{place}: layout {declared} has {len(declared)} axes, its shape {shape} has {len(shape)}")
        return declared
    if len(shape) == 3:
        return "NHW"
    if len(shape) == 4:
        first, last = shape[1] in (1, 3), shape[3] in (1, 3)
        if first != last:
            return "NCHW" if first else "NHWC"
        if not first and min(shape[1:]) > 4:
            return "NDHW"
    raise DataError(f"{place}: its shape {shape} does not say which axis is what; declare 'layout', such as NCHW")


def channels_first(block: NDArray[Any], layout: str) -> NDArray[Any]:
    """N x C x H x W or N x C x D x H x W."""
    if "C" not in layout:
        return block[:, None]
    return np.moveaxis(block, layout.index("C"), 1)


def fixed_range(dtype: np.dtype[Any], channels: int) -> dict[str, list[float]] | None:
    """Centre and scale of a type with a natural range, None for others."""
    if dtype.name not in _FIXED:
        return None
    most = 1 if dtype.kind == "b" else int(np.iinfo(dtype).max)
    return {"mean": [most * CENTRE] * channels, "scale": [most * SPREAD] * channels}


def fitted_range(blocks: Iterator[NDArray[Any]]) -> dict[str, list[float]]:
    """Mean and standard deviation of each channel over blocks N x C x ..."""
    count, total, squares = 0, np.zeros(1), np.zeros(1)
    for block in blocks:
        values = np.moveaxis(block, 1, 0).reshape(block.shape[1], -1).astype(np.float64)
        count += values.shape[1]
        total, squares = total + values.sum(axis=1), squares + (values**2).sum(axis=1)
    mean = total / max(count, 1)
    deviation = np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0))
    # A constant channel carries nothing; dividing by its zero (or rounding error) would blow others up.
    constant = deviation <= 1e-6 * np.abs(mean)
    return {"mean": mean.tolist(), "scale": np.where(constant, 1.0, deviation).tolist()}


def prepare(images: NDArray[Any], size: tuple[int, ...], ranges: Mapping[str, Sequence[float]]) -> Tensor:
    """Network inputs, N x C x ... float32; images (two axes) are brought to ``size``, bilinear and antialiased.

    Raises:
        DataError: volumes of another size.
    """
    import torch

    spatial = images.shape[2:]
    if len(spatial) != len(size) or (len(size) == 3 and spatial != size):
        sentence = f"the task's size {list(size)} does not fit arrays of {' x '.join(map(str, spatial))}"
        raise DataError(sentence, public=sentence)
    axes = (-1, *[1] * len(size))
    mean, scale = (torch.tensor(ranges[key], dtype=torch.float32).reshape(axes) for key in ("mean", "scale"))
    return (resize(torch.from_numpy(images.astype(np.float32)), size) - mean) / scale


def check_finite(place: str, images: NDArray[Any], rows: Sequence[int]) -> None:
    """Raises DataError if a row of ``images`` has a NaN, an infinity, or a number that becomes one in single precision;
    ``rows``: their numbers."""
    if images.dtype.kind != "f":
        return
    with np.errstate(over="ignore"):
        held = np.isfinite(images.astype(np.float32, copy=False))
    if held.all():
        return
    bad = next(number for number, known in enumerate(held) if not known.all())
    what = f"beyond {LARGEST:.2g}" if np.isfinite(images[bad]).all() else "that are not finite"
    raise DataError(f"{place}[{rows[bad]}]: holds values {what}")


def picked(file: Npz, key: str, layout: str, rows: Sequence[int]) -> Iterator[tuple[NDArray[Any], list[int]]]:
    """The given (ascending) rows of an array, some at a time: N x C x ... and their numbers.

    Raises:
        DataError: the file is broken, or a row has values that are not finite.
    """
    numbers, start = np.asarray(rows, dtype=np.int64), 0
    if not len(numbers):
        return
    for block in file.blocks(key):
        mine = numbers[np.searchsorted(numbers, start) : np.searchsorted(numbers, start + len(block))]
        if len(mine):
            images = channels_first(block[mine - start], layout)
            check_finite(f"{file.path}: {key}", images, mine.tolist())
            yield images, mine.tolist()
        start += len(block)


class ArraysPreparation(Preparation):
    """``inputs`` and ``layout`` as declared, the numbers' type, and what they are scaled by, channel by channel."""

    form: ClassVar[str] = "images"
    kind: Literal["arrays"] = "arrays"
    inputs: str | None
    layout: Layout | None
    dtype: str
    mean: list[float]
    scale: list[float]

    def new_cases(self, path: Path, spec: Spec) -> Iterator[NewCase]:
        """The rows of an .npz file; no label is needed."""
        for name, inputs in new_rows(path, self, spec.size):
            yield NewCase(name, inputs)

    def standardised(self) -> tuple[list[float], list[float]]:
        return self.mean, self.scale


def new_rows(path: Path, preparation: ArraysPreparation, size: tuple[int, ...]) -> Iterator[tuple[str, Tensor]]:
    """Rows of a file that no site file declares, prepared as the training rows were: names, and 1 x C x ... inputs.

    Raises:
        DataError: the file is broken, has other arrays, or numbers of another type.
    """
    file = Npz(path)
    usual = [f"{prefix}_images" for prefix in MEDMNIST.values()]
    keys = [preparation.inputs] if preparation.inputs else [key for key in usual if key in file.keys]
    if not keys:
        raise DataError(f"{path}: expected one of {', '.join(usual)}; the file has: {', '.join(file.keys)}")
    for key in keys:
        shape, dtype = file.header(key)
        if dtype.name != preparation.dtype and {dtype.name, preparation.dtype} & set(_FIXED):
            raise DataError(f"{path}: array '{key}' is of type {dtype}; the model was trained on {preparation.dtype}")
        layout = layout_of(file, key, preparation.layout)
        for images, rows in picked(file, key, layout, range(shape[0])):
            if images.shape[1] != len(preparation.mean):
                raise DataError(
                    f"{path}: array '{key}' has {images.shape[1]} channels; the model was trained on "
                    f"{len(preparation.mean)}"
                )
            inputs = prepare(images, size, {"mean": preparation.mean, "scale": preparation.scale})
            for row, image in zip(rows, inputs, strict=True):
                yield f"{path.name}: {key}[{row}]", image[None]
