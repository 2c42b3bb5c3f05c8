# SPDX-License-Identifier: Apache-2.0
"""New images to segment, and their masks as PNG files of the images' own size."""

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from medpfl.core.errors import DataError
from medpfl.sites.pixels import image_files, prepare, read_image, resize
from medpfl.tasks.base import NewCase


def new_images(path: Path, channels: int, size: tuple[int, int]) -> Iterator[NewCase]:
    """An image file, or all images of a folder, prepared as ``Images.load`` does."""
    for file in image_files(path):
        name = file.relative_to(path) if path.is_dir() else Path(file.name)
        image = read_image(file, channels)
        yield NewCase(str(name), prepare(image, size)[None], partial(_save, name, image.shape[1:]))


def _save(name: Path, shape: tuple[int, int], outputs: Tensor, folder: Path) -> Path:
    """The class of each pixel of the image's own size, from outputs 1 x C x H x W: a PNG of the declared values."""
    mask = resize(outputs.float(), shape).argmax(dim=1)[0].to(torch.uint8).cpu().numpy()
    target = folder / name.with_name(f"{name.name}_segmentation.png")
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(mask).save(temporary, format="PNG")
        os.replace(temporary, target)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror}") from error
    return target
