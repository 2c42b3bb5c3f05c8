# SPDX-License-Identifier: Apache-2.0
"""Image files to arrays and arrays to network inputs: decoding (Pillow), size, range of values."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from medpfl.core.errors import DataError, unreadable
from medpfl.data.paths import seen_below

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".ppm", ".pgm", ".gif", ".webp")
_FORMATS = ("PNG", "JPEG", "BMP", "TIFF", "PPM", "GIF", "WEBP")
_WHITE_OR_BLACK = 262
"""TIFF's tag that says which of them 0 is. Pillow follows it in files of up to 8 bits alone."""
CENTRE, SPREAD = 0.5, 0.25
"""Whole numbers become (x / the type's maximum - CENTRE) / SPREAD."""


def read_image(path: Path, channels: int) -> NDArray[Any]:
    """An image as it is meant to be seen (turned as its EXIF says), C x H x W, uint8 or (16-bit grey) uint16.

    Palettes are resolved, colour becomes grey (or grey three equal channels) as ``channels`` says, and what is
    transparent becomes black. Pillow reads 16-bit colour with 8 bits.

    Raises:
        DataError: no such file, or not a complete image of one of these formats, several pictures, or fractions.
    """
    image = _decoded(path)
    if image.mode.startswith("I"):
        deep = np.asarray(image)
        if deep.min() < 0 or deep.max() > 65535:
            raise DataError(f"{path}: expected values of 8 or 16 bits, got {deep.min()} to {deep.max()}")
        return np.repeat(deep.astype(np.uint16)[None], channels, axis=0)
    if image.has_transparency_data:
        seen = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", seen.size, (0, 0, 0, 255)), seen)
    if image.mode == "LAB":
        image = image.convert("RGB")  # the only mode that Pillow makes of it
    array = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def read_mask(path: Path) -> NDArray[Any]:
    """The stored values of a mask, H x W; of an image with a palette, its indices.

    Raises:
        DataError: no such file, not a complete image, in colour, or other values are seen or read than are stored.
    """
    image = _decoded(path, exact=True)
    if image.mode == "P":
        _check_palette(path, image)
    array = np.asarray(image)
    if array.dtype == bool:
        return array.astype(np.uint8)
    if array.ndim == 3:
        colours = array[..., :3] if array.shape[2] >= 3 else array[..., :1]
        if image.mode not in ("RGB", "RGBA", "LA") or (colours != colours[..., :1]).any():
            raise DataError(f"{path}: expected a mask with one value a pixel (grey or a palette), got a colour image")
        if array.shape[2] in (2, 4):
            _check_transparency(path, array[..., 0], array[..., -1])
        return array[..., 0]
    return array


def _check_palette(path: Path, image: Image.Image) -> None:
    """Refuse a palette of greys that is no scale from dark to bright. A program that saves a white lesion on black so
    often puts white first, at the index 0: the lesion would be the background, and the background the lesion."""
    used = np.unique(np.asarray(image))
    colours = np.array(image.getpalette() or [], dtype=np.int64).reshape(-1, 3)
    colours = colours[used[used < len(colours)]]
    falls = np.flatnonzero(np.diff(colours[:, 0]) < 0)
    if (colours == colours[:, :1]).all() and len(falls):
        dark, bright = used[falls[0] + 1], used[falls[0]]
        raise DataError(
            f"{path}: its palette shows the value {bright} brighter than {dark}, so that it does not say which of the "
            "two is meant; save the mask in grey"
        )


def _check_transparency(path: Path, values: NDArray[Any], opacity: NDArray[Any]) -> None:
    """Refuse a mask that is drawn by transparency: a white lesion on transparent white has one value, everywhere."""
    for value in np.unique(values).tolist():
        if len(np.unique(opacity[values == value])) > 1:
            raise DataError(
                f"{path}: its pixels of the value {value} differ in transparency, which is not read; save the mask in "
                "grey, without transparency"
            )


def prepare(image: NDArray[Any], size: tuple[int, int]) -> Tensor:
    """A decoded image as network input: C x H x W float32 of ``size``, bilinear and antialiased, about -2 to 2."""
    import torch

    # Channel by channel: a photograph of 24 million pixels takes 0.3 GB as float32.
    channels = [resize(torch.from_numpy(channel.astype(np.float32))[None, None], size)[0] for channel in image]
    values = torch.cat(channels)
    return (values / np.iinfo(image.dtype).max - CENTRE) / SPREAD


def prepare_mask(mask: NDArray[np.uint8], size: tuple[int, int]) -> Tensor:
    """A mask of ``size``, H x W uint8, each pixel the value of the nearest one."""
    import torch

    values = torch.from_numpy(mask)[None, None]
    return torch.nn.functional.interpolate(values, size=size, mode="nearest-exact")[0, 0]


def resize(images: Tensor, size: tuple[int, ...]) -> Tensor:
    """Images N x C x H x W float32 of another size; those that have it (any number of axes) stay as they are."""
    import torch

    if tuple(images.shape[2:]) == size:
        return images
    return torch.nn.functional.interpolate(images, size=size, mode="bilinear", antialias=True)


def image_files(path: Path) -> list[Path]:
    """An image file, or all of a folder (with its subfolders) by name but hidden ones, which Macs put beside others.

    Raises:
        DataError: there are none.
    """
    if not path.is_dir():
        return [path]
    files = sorted(file for file in seen_below(path) if file.suffix.lower() in SUFFIXES and file.is_file())
    if not files:
        raise DataError(f"{path}: the folder holds no {', '.join(SUFFIXES)} files")
    return files


def _decoded(path: Path, exact: bool = False) -> Image.Image:
    """The image, turned as its EXIF says.

    Args:
        exact: refuse 16 bits of which Pillow reads the upper 8, as it does of all but grey, and a TIFF of 8 bits whose
            values it turns over.

    Raises:
        DataError: see ``read_image``.
    """
    if not path.is_file():
        raise DataError(f"{path}: no such file")
    try:
        # By its path Pillow maps a plain grey TIFF into memory, and mixes its pixels up where it lies on its side.
        with path.open("rb") as file, Image.open(file, formats=_FORMATS) as image:
            pictures = getattr(image, "n_frames", 1)
            if pictures > 1:
                raise DataError(f"{path}: expected one picture, got {pictures} in one file")
            if image.mode == "F":
                raise DataError(f"{path}: expected whole numbers of 8 or 16 bits, got fractions")
            white = getattr(image, "tag_v2", {}).get(_WHITE_OR_BLACK) == 0
            if white and image.mode.startswith("I"):
                raise DataError(f"{path}: expected 0 to be black, and in this TIFF of 16 bits it is white")
            if white and exact and image.mode == "L":  # as ImageJ writes what it shows black on white
                raise DataError(
                    f"{path}: 0 is white in this TIFF, so that other values are seen than are stored, and it does not "
                    "say which of them are meant; save the mask with 0 as black"
                )
            if exact and not image.mode.startswith("I") and any("16" in str(tile[3]) for tile in image.tile):
                raise DataError(f"{path}: only 8 of its 16 bits are read; save the mask in grey, without transparency")
            image.load()
            return ImageOps.exif_transpose(image)
    except DataError:
        raise
    except Image.DecompressionBombError as error:
        most = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        raise DataError(f"{path}: its header promises more pixels than are read, at most {most}") from error
    except UnidentifiedImageError as error:
        raise DataError(
            f"{path}: expected an image ({', '.join(_FORMATS)}), got something else or a broken header"
        ) from error
    except Exception as error:  # decoders raise anything on a broken file; the sentence keeps the cause
        raise DataError(unreadable(path, "an image", error)) from error
