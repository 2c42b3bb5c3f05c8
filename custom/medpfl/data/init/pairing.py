# SPDX-License-Identifier: Apache-2.0
"""Images and their masks by the way in which their names are made, and patients of whom there are both eyes."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from medpfl.core.errors import DataError
from medpfl.data.init.answers import Answers

_NUMBER = re.compile(r"\d+[A-Za-z]*(?![A-Za-z0-9])")
_EYE = re.compile(r"(?P<before>.*?)(?P<patient>\d+)(?P<gap>[_-]?)(?P<eye>L|R|OD|OS)")
_VALUES = 32
"""Different values that a mask may hold."""


@dataclass(frozen=True)
class Layout:
    """Files of one folder whose names differ in a number: Image_01L.jpg, Image_01R.jpg, Image_02L.jpg.

    Attributes:
        pattern: relative to the folder that was looked at, with {case} for what differs.
        files: that number to its file.
    """

    pattern: str
    files: Mapping[str, Path]

    @property
    def ending(self) -> str:
        """What stands behind the number, without the suffix."""
        return Path(self.pattern).stem.partition("{case}")[2]


def layouts(folder: Path, files: Sequence[Path]) -> list[Layout]:
    """The layouts of all files, sorted by pattern; none if a file's name has no number or two have one."""
    found: dict[str, dict[str, Path]] = {}
    for path in files:
        number = _NUMBER.search(path.stem)
        if number is None:
            return []
        name = f"{path.stem[: number.start()]}{{case}}{path.stem[number.end() :]}{path.suffix}"
        inner = path.parent.relative_to(folder)
        cases = found.setdefault((inner / name).as_posix(), {})
        if number.group() in cases:
            return []
        cases[number.group()] = path
    return [Layout(pattern, found[pattern]) for pattern in sorted(found)]


def images_and_masks(found: Sequence[Layout], looked: int, answers: Answers) -> tuple[Layout, Layout] | None:
    """Of layouts with equal numbers the one of the images, and the one of the masks, of which there may be several to
    choose from (two readers, a field of view); None if there are no such layouts.

    Raises:
        SiteFileError: there are several, and nobody says which.
    """
    if len(found) < 2 or any(each.files.keys() != found[0].files.keys() for each in found):
        return None
    masks = [each for each in found if all(_is_mask(path) for path in list(each.files.values())[:looked])]
    images = [each for each in found if each not in masks]
    if len(images) != 1:
        return None
    names = [each.pattern for each in masks]
    guess = names[0] if len(names) == 1 else None
    chosen = answers.get("masks", "Which files are the masks?", guess, names)
    return images[0], masks[names.index(chosen)]


def _is_mask(path: Path) -> bool:
    try:
        with Image.open(path) as image:
            if image.mode in ("1", "L", "P") or image.mode.startswith("I"):  # of 16 bits: Pillow's grey has 8
                return len(np.unique(np.asarray(image))) <= _VALUES
            values = np.asarray(image.convert("RGB"))
            grey = (values == values[..., :1]).all()
            return bool(grey) and len(np.unique(values)) <= _VALUES
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path}: cannot be read as an image: {error}") from error


def eyes(stems: Sequence[str]) -> str | None:
    """The pattern of names that tell a patient's left eye from the right one, with {patient}; None if they do not, or
    if there is no patient with both."""
    fits = [_EYE.fullmatch(stem) for stem in stems]
    found = [fit for fit in fits if fit is not None]
    if not found or len(found) < len(stems) or len({(fit["before"], fit["gap"], len(fit["eye"])) for fit in found}) > 1:
        return None
    if len({fit["patient"] for fit in found}) == len(found):
        return None
    first = found[0]
    return f"{first['before']}{{patient}}{first['gap']}{'[LR]' if len(first['eye']) == 1 else 'O[DS]'}"
