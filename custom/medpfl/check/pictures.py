# SPDX-License-Identifier: Apache-2.0
"""Small pictures of cases: an image with its label's outline, or a recording as lines."""

import base64
import io
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from medpfl.data.contract import Item

SIDE = 208  # pixels of the longer side
POINTS = 240  # of a line
LINES = 4  # channels of a recording that are drawn
COLOURS = ["#ff5d4d", "#36c98f", "#4aa8ff", "#f5c542", "#c77dff", "#ff9f43", "#2ee6e6", "#ff7ac6"]
"""Outline of label value 1, 2, ...; they repeat."""


@dataclass(frozen=True)
class Outline:
    """A label map's outline. ``label``: HW, uint8; ``colours``: of value 1, 2, ...; ``width`` in pixels, inwards."""

    label: NDArray[np.uint8]
    colours: Sequence[str] = tuple(COLOURS)
    width: int = 2


@dataclass(frozen=True)
class Picture:
    """``pixels``: H x W x 3, uint8; or ``lines``: SVG points in a box of 100 x 40, one text a channel."""

    pixels: NDArray[np.uint8] | None = None
    lines: tuple[str, ...] = ()

    def png(self) -> str:
        """The pixels as a PNG in base64; encoded late, as most cases are never shown."""
        assert self.pixels is not None
        buffer = io.BytesIO()
        Image.fromarray(self.pixels).save(buffer, format="PNG")
        return base64.b64encode(buffer.getvalue()).decode()


def picture_of(item: Item) -> Picture | None:
    """A picture of a case; None for a row of a table.

    A volume is shown by its first channel in the axial slice that holds most of the labelled voxels (the middle one if
    there is none), the patient's right on the left, in true proportions; a recording by its first channels.
    """
    if item.image.ndim == 1:
        return None
    if item.image.ndim == 2:
        return Picture(lines=tuple(_line(channel) for channel in item.image[:LINES]))
    label = item.target if isinstance(item.target, np.ndarray) else None
    image, size = item.image, (1.0, 1.0)
    if image.ndim == 4:
        image, label, size = _slice(image[:1], label, item.affine)  # three channels of a volume are no colours
    return Picture(draw(image, [] if label is None else [Outline(label)], size))


def _slice(
    image: NDArray[Any], label: NDArray[np.uint8] | None, affine: NDArray[np.float64] | None
) -> tuple[NDArray[Any], NDArray[np.uint8] | None, tuple[float, float]]:
    """CHW slice, its HW label and the size of a pixel (height, width)."""
    from nibabel.orientations import apply_orientation, io_orientation

    size = (1.0, 1.0)
    if affine is not None:
        turn = io_orientation(affine)
        image = np.moveaxis(apply_orientation(np.moveaxis(image, 0, -1), turn), -1, 0)
        label = None if label is None else apply_orientation(label, turn)
        lengths = np.linalg.norm(affine[:3, :3], axis=0)[np.argsort(turn[:, 0])]
        size = (float(lengths[1]), float(lengths[0]))
    area = None if label is None else (label > 0).sum(axis=(0, 1))
    place = int(area.argmax()) if area is not None and area.any() else image.shape[-1] // 2
    chosen, outlined = image[..., place], None if label is None else label[..., place]
    if affine is None:
        return chosen, outlined, size
    return radiological(chosen), None if outlined is None else radiological(outlined), size


def radiological(values: NDArray[Any]) -> NDArray[Any]:
    """An axial slice in RAS (its last axes run to the patient's right and to the front), as radiologists look at it:
    from the feet, the front above."""
    return np.flip(values.swapaxes(-1, -2), axis=(-1, -2))


def draw(image: NDArray[Any], outlines: Sequence[Outline], size: tuple[float, float]) -> NDArray[np.uint8]:
    """A picture of an image with outlines on it, ``SIDE`` pixels on its longer side.

    Args:
        image: CHW; three channels are colours in 0 ... 255 or 0 ... 1.
        outlines: the later ones cover the earlier ones.
        size: of a pixel (height, width), in any unit.
    """
    colour = len(image) == 3
    values = np.nan_to_num(image.astype(np.float32)) if colour else np.nan_to_num(image[0].astype(np.float32))
    low, high = (0.0, 255.0 if values.max() > 1 else 1.0) if colour else np.percentile(values, (1, 99))
    grey = np.clip((values - low) / max(high - low, 1e-9) * 255, 0, 255).astype(np.uint8)
    height, width = image.shape[1] * size[0], image.shape[2] * size[1]
    fitted = tuple(max(1, round(length * SIDE / max(height, width))) for length in (width, height))
    picture = Image.fromarray(np.moveaxis(grey, 0, -1) if colour else grey).convert("RGB")
    pixels = np.array(picture.resize(fitted, Image.Resampling.BILINEAR))
    for outline in outlines:
        label = Image.fromarray(np.ascontiguousarray(outline.label))
        shown = np.array(label.resize(fitted, Image.Resampling.NEAREST))
        edge = np.zeros(shown.shape, bool)
        for axis, step in itertools.product((0, 1), range(1, outline.width + 1)):
            edge |= (shown != np.roll(shown, step, axis)) | (shown != np.roll(shown, -step, axis))
        for value in np.unique(shown[shown > 0]).tolist():
            code = outline.colours[(value - 1) % len(outline.colours)]
            pixels[edge & (shown == value)] = [int(code[i : i + 2], 16) for i in (1, 3, 5)]
    return pixels


def _line(values: NDArray[Any]) -> str:
    """Lowest and highest value of each stretch, so that a spike in a long recording is seen."""
    values = values.astype(np.float64)
    finite = values[np.isfinite(values)]
    if not len(finite):
        return ""
    low, span = finite.min(), max(float(np.ptp(finite)), 1e-12)
    points = []
    for part in np.array_split(np.arange(len(values)), min(len(values), POINTS // 2)):
        known = part[np.isfinite(values[part])]
        extremes = {int(known[values[known].argmin()]), int(known[values[known].argmax()])} if len(known) else set()
        for index in sorted(extremes):
            points.append(f"{100 * index / max(1, len(values) - 1):.1f},{38 - 36 * (values[index] - low) / span:.1f}")
    return " ".join(points)
