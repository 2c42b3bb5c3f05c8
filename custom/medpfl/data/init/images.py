# SPDX-License-Identifier: Apache-2.0
"""Image files: in class folders, with a folder of masks, or named by a table."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from medpfl.core.errors import DataError
from medpfl.data.declared import composed
from medpfl.data.init import tables
from medpfl.data.init.answers import Answers, Entry
from medpfl.data.init.pairing import Layout, eyes, images_and_masks, layouts
from medpfl.data.init.volumes import LABELS, LOOKED, MARK, label_entries
from medpfl.data.paths import seen_below, seen_in
from medpfl.data.pixels import SUFFIXES

_MASKS = 200
"""Masks that are read to find their values: more than label maps of volumes, for a stray value is often in one of many,
and an image is read quickly."""


def find_images(folder: Path) -> list[Path]:
    """All image files below a folder."""
    return sorted(path for path in seen_below(folder) if path.suffix.lower() in SUFFIXES and path.is_file())


def describe(folder: Path, base: str, answers: Answers) -> list[Entry]:
    """Entries for a folder of images; ``base``: the folder as the site file names it ("" for its own).

    Raises:
        DataError: neither masks, nor a table, nor class folders are there.
        SiteFileError: what is needed was not answered.
    """
    found = find_images(folder)
    masks = [path for path in found if _is_mask(path.relative_to(folder))]
    images = [path for path in found if path not in set(masks)]
    if not images:
        raise DataError(f"{folder}: the folder holds masks but no images")
    alike = layouts(folder, found)
    if (not masks or len(alike) > 2) and (pair := images_and_masks(alike, LOOKED, answers)):
        return _with_layouts(base, *pair, answers)
    if masks:
        return _with_masks(folder, base, images, masks, answers)
    listing = [path for path in seen_in(folder) if path.suffix.lower() in (".csv", ".tsv")]
    for table in listing:
        column = _image_column(table, images)
        if column:
            return _with_table(folder, base, images, table, column, answers)
    return _with_folders(folder, base, images, answers)


def _start(base: str, folder: Path, images: Sequence[Path], inner: str, answers: Answers) -> list[Entry]:
    return [
        Entry("kind", "images"),
        Entry("files", _patterns(base, inner, images, eyes([path.stem for path in images]) or "*")),
        _channels_entry(images[0], answers),
    ]


def _patterns(base: str, inner: str, images: Sequence[Path], stem: str = "*") -> list[str]:
    suffixes = sorted({path.suffix for path in images})
    return ["/".join(part for part in (base, inner, f"{stem}{suffix}") if part) for suffix in suffixes]


def _with_layouts(base: str, images: Layout, masks: Layout, answers: Answers) -> list[Entry]:
    """Masks that are told from the images by the rest of their names."""
    named = masks.ending.startswith(images.ending) and Path(images.pattern).stem in Path(masks.pattern).stem
    suffix = masks.ending.removeprefix(images.ending) if named else ""
    files = [f"{base}/{each.pattern}" if base else each.pattern for each in (images, masks)]
    if suffix:
        files = [name.replace("{case}", eyes(list(images.files)) or "*") for name in files]
    declared = {"files": files[1:], **({"suffix": suffix} if suffix else {})}
    labels = label_entries(_values(list(masks.files.values())), "", answers)
    comment = f"a mask has its image's name and {suffix}" if suffix else "a mask is its image's by the name in braces"
    first = next(iter(images.files.values()))
    return [
        Entry("kind", "images"),
        Entry("files", files[:1]),
        _channels_entry(first, answers),
        Entry("masks", {**declared, **{entry.key: entry.value for entry in labels}}, comment),
        _split("{patient}" in files[0]),
    ]


def _split(grouped: bool, **others: bool) -> Entry:
    fixed = {**others, "seed": 0, "fractions": tables.FRACTIONS}
    if grouped:
        return Entry("split", {"group": "patient", **fixed}, "both eyes of a patient stay together")
    return Entry("split", fixed, "every image counts as another patient; name the patient in braces if that is not so")


def _values(masks: Sequence[Path]) -> list[int]:
    """The values of the masks; of very many, of the first.

    Raises:
        DataError: they are no masks.
    """
    values: set[int] = set()
    for path in masks[:_MASKS]:
        with Image.open(path) as mask:
            values |= {int(value) for value in np.unique(np.array(mask.convert("L") if mask.mode != "P" else mask))}
    if len(values) > 32:
        raise DataError(f"{masks[0]}: expected a mask, got {len(values)} different values")
    return sorted(values)


def _with_masks(
    folder: Path, base: str, images: Sequence[Path], masks: Sequence[Path], answers: Answers
) -> list[Entry]:
    image_folder, mask_folder = _named(folder, images), _named(folder, masks)
    endings = {match[0] if (match := MARK.search(path.stem)) else "" for path in masks}
    if len(endings) > 1:
        raise DataError(f"{folder}: the masks' names end in several ways: {', '.join(sorted(endings))}")
    labels = label_entries(_values(masks), "", answers)
    ending = endings.pop()
    files = _patterns(base, mask_folder, masks)
    if ending:
        files = [pattern.replace("*.", f"*{ending}.") for pattern in files]
    declared = {"files": files, **({"suffix": ending} if ending else {}), **{e.key: e.value for e in labels}}
    return [
        *_start(base, folder, images, image_folder, answers),
        Entry("masks", declared, f"a mask has its image's name{f' and {ending}' if ending else ''}"),
        _split_by_folder(image_folder, answers) or _split(eyes([path.stem for path in images]) is not None),
    ]


def _with_table(
    folder: Path, base: str, images: Sequence[Path], table: Path, names: str, answers: Answers
) -> list[Entry]:
    name = "/".join(part for part in (base, table.name) if part)
    declared = {entry.key: entry for entry in tables.describe([table], [name], answers)}
    split = declared["split"]
    written: dict[str, str | dict[str, list[str]]] = {
        key: declared[key].value for key in ("separator", "decimal") if key in declared
    }
    answer = declared["label" if "label" in declared else "value"]
    note = "one row an image"
    missing = declared["missing"].value
    if answer.key == "label" and (empty := tables.count_of(table, column := answer.value["column"], missing)):
        note += f"; those without a value of '{column}' are left out: {empty}"
        known = [value for values in answer.value["classes"].values() for value in values]
        written["where"] = {column: known}
    return [
        *_start(base, folder, images, _common(folder, images), answers),
        Entry("table", {"file": name, "image": names, **written}, note),
        answer,
        split,
    ]


def _with_folders(folder: Path, base: str, images: Sequence[Path], answers: Answers) -> list[Entry]:
    parts = [path.relative_to(folder).parts[:-1] for path in images]
    depth = {len(part) for part in parts}
    if depth == {1}:
        inner, split, place = "{class}", "", 0
    elif depth == {2} and {part[0].lower() for part in parts} <= tables.SPLITS:
        inner, split, place = "{split}/{class}", "split", 1
    else:
        raise DataError(
            f"{folder}: found neither masks (a folder 'masks', or NAME_mask beside NAME), nor a table that names the "
            "images, nor one folder a class"
        )
    names = sorted({composed(part[place]) for part in parts})
    classes = answers.class_values(names, names, "a folder")
    cut = _split(grouped=False, stratify=True)
    if split:
        cut = Entry("split", {"column": split})
    elif eyes([path.stem for path in images]):
        cut = _split(grouped=True)
    return [
        *_start(base, folder, images, inner, answers),
        Entry("label", {"column": "class", "classes": classes}, "class: the folders that hold it"),
        cut,
    ]


def _is_mask(inner: Path) -> bool:
    return any(LABELS.fullmatch(part) for part in inner.parts[:-1]) or bool(MARK.search(inner.stem))


def _named(folder: Path, paths: Sequence[Path]) -> str:
    """The folders of all of them, relative, where they differ in braces, so that a mask is found by its image's folder:
    {split}/images, where the folders are called train, test and the like, or {folder}/images."""
    parts = [path.parent.relative_to(folder).parts for path in paths]
    if len({len(part) for part in parts}) > 1:
        return "**"
    named, numbered = [], 1
    for there in zip(*parts, strict=True):
        if len(set(there)) == 1:
            named.append(there[0])
        elif {part.lower() for part in there} <= tables.SPLITS:
            named.append("{split}")
        else:
            named.append("{folder}" if numbered == 1 else f"{{folder_{numbered}}}")
            numbered += 1
    return "/".join(named)


def _split_by_folder(pattern: str, answers: Answers) -> Entry | None:
    """``split`` where the pattern of the images' folders says more than one folder."""
    if "{split}" in pattern:
        return Entry("split", {"column": "split"}, "the folders say it")
    if "{folder}" not in pattern:
        return None
    question = f"Does the folder in '{pattern}' name the patient? 'folder', or 'none' if every image is another patient"
    if answers.get("group", question, "folder", ["folder", "none"]) == "none":
        return _split(False)
    fixed = {"group": "folder", "seed": 0, "fractions": tables.FRACTIONS}
    return Entry("split", fixed, "images of one folder stay together, as of one patient")


def _common(folder: Path, paths: Sequence[Path]) -> str:
    """The one folder that holds all of them, relative; else a pattern for all below."""
    parents = {path.parent.relative_to(folder).as_posix() for path in paths}
    return ("" if (only := parents.pop()) == "." else only) if len(parents) == 1 else "**"


def _channels_entry(path: Path, answers: Answers) -> Entry:
    """What the hospitals agreed on, to which images of any colour are converted; else what the first image is."""
    agreed = answers.schema.declared.get("channels") if answers.schema else None
    return Entry("channels", agreed or _channels(path), "1 grey, 3 colour; all images are converted")


def _channels(path: Path) -> int:
    try:
        with Image.open(path) as image:
            return 1 if image.mode in ("1", "L", "LA", "I", "I;16", "F") else 3
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path}: cannot be read as an image: {error}") from error


def _image_column(table: Path, images: Sequence[Path]) -> str | None:
    """The column most of whose cells name an image."""
    names = {composed(name) for path in images for name in (path.name, path.stem)}
    frame, *_ = tables.read(table)
    for column in frame.columns:
        if sum(composed(Path(cell).name) in names for cell in frame[column]) > len(frame) / 2:
            return str(column)
    return None
