# SPDX-License-Identifier: Apache-2.0
"""New images to segment, and their masks as PNG files of the images' own size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from PIL import Image
from pydantic import JsonValue

from medpfl.core.errors import DataError
from medpfl.data.pixels import image_files, prepare, read_image, resize
from medpfl.data.preparation import NewCase, Preparation, Row, Spec
from medpfl.data.readout import Readout
from medpfl.data.target import Target

if TYPE_CHECKING:
    from torch import Tensor


class ImagesPreparation(Preparation):
    """Images are prepared alike everywhere. ``channels``: 1 for grey, 3 for colour."""

    form: ClassVar[str] = "images"
    kind: Literal["images"] = "images"
    channels: Literal[1, 3]

    def new_cases(self, path: Path, spec: Spec) -> Iterator[NewCase]:
        """An image file or a folder of images; masks are written in the images' own size."""
        if spec.target is Target.MASK:
            yield from new_images(path, self.channels, None if spec.whole else spec.plane(), spec.readout)
            return
        for file in image_files(path):
            image = prepare(read_image(file, self.channels), spec.plane())
            yield NewCase(str(file.relative_to(path)) if path.is_dir() else file.name, image[None])

    def shared(self) -> dict[str, JsonValue]:
        return {"kind": self.kind, "channels": self.channels}


def new_images(path: Path, channels: int, size: tuple[int, int] | None, readout: Readout) -> Iterator[NewCase]:
    """An image file, or all images of a folder and its subfolders, prepared as in training; ``size`` None: whole.

    Raises:
        DataError: an image is missing or broken, or two have one name.
    """
    files = {file: file.relative_to(path) if path.is_dir() else Path(file.name) for file in image_files(path)}
    names = [name.with_suffix("") for name in files.values()]
    count = Counter(names)
    for file, name in zip(files, names, strict=True):
        if count[name] > 1:
            raise DataError(f"{file}: another image would be written to '{name}' too; predict them one by one")
    for file, name in zip(files, names, strict=True):
        image = read_image(file, channels)
        shape = (image.shape[1], image.shape[2])
        yield NewCase(str(name), prepare(image, size or shape)[None], partial(_save, name, shape, readout))


def _save(
    name: Path,
    shape: tuple[int, int],
    readout: Readout,
    outputs: Tensor,
    folder: Path,
    class_names: list[str],
    probabilities: bool,
) -> Row:
    """Write ``<name>.png``: the class (0, 1, 2, ...) of every pixel of the image as it is meant to be seen.

    Args:
        shape: the image's height and width.
        outputs: 1 x K x H x W, the network's.
        probabilities: also write ``<name>_probabilities.npy``, K x height x width (float32).

    Returns:
        The file and each class's share of the pixels, but the first's.
    """
    shares = resize(readout.shares(outputs), shape)[0].numpy()
    classes = readout.classes(shares)
    target = folder / name.with_name(f"{name.name}.png")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.part")
    Image.fromarray(classes).save(temporary, format="PNG")
    temporary.replace(target)
    if probabilities:
        with temporary.open("wb") as file:
            np.save(file, shares)
        temporary.replace(target.with_name(f"{name.name}_probabilities.npy"))
    found = np.bincount(classes.ravel(), minlength=len(class_names)) / classes.size
    named = {f"{class_name}_share": round(float(found[k]), 6) for k, class_name in enumerate(class_names) if k}
    return {"file": str(target.relative_to(folder)), **named}
