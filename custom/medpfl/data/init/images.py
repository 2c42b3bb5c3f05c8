# SPDX-License-Identifier: Apache-2.0
"""Image files: in class folders, with a folder of masks, or named by a table."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from medpfl.core.errors import DataError
from medpfl.data.declared import composed
from medpfl.data.init import tables
from medpfl.data.init.answers import Answers, Entry
from medpfl.data.init.pairing import Layout, eyes, images_and_masks, layouts
from medpfl.data.init.splitting import given_group, only_splits, patient_column, split_column, split_entry
from medpfl.data.init.volumes import LABELS, LOOKED, MARK, label_entries
from medpfl.data.parquet import SUFFIXES as PARQUET
from medpfl.data.paths import seen_below, seen_in
from medpfl.data.patients import are_patients
from medpfl.data.pixels import SUFFIXES, read_mask

_MASKS = 200
"""Masks that are read to find their values: more than label maps of volumes, for a stray value is often in one of many,
and an image is read quickly."""
_FOLDER = "folder"
"""What the folder of an image is called where images lie in several."""


@dataclass(frozen=True)
class _Listing:
    """A table beside images: its path, as the site file names it, its column of their names, and how many images have
    no row in it."""

    path: Path
    shown: str
    names: str
    without: int

    @property
    def note(self) -> str:
        """For the one who edits the site file."""
        return f"one row an image{f'; not used, for lack of a row: {self.without}' if self.without else ''}"


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
        return _with_layouts(base, *pair, _listed(folder, base, list(pair[0].files.values())), answers)
    listing = _listed(folder, base, images)
    if masks:
        return _with_masks(folder, base, images, masks, listing, answers)
    if listing:
        return _with_table(folder, base, images, listing, answers)
    return _with_folders(folder, base, images, answers)


def _listed(folder: Path, base: str, images: Sequence[Path]) -> _Listing | None:
    """The first table of the folder that names the images."""
    for table in seen_in(folder):
        known = table.suffix.lower() in tables.SUFFIXES and _has_columns(table)
        if known and (column := _image_column(table, images)):
            named = {composed(Path(cell).name) for cell in tables.read(table)[0][column]}
            without = sum(not {composed(path.name), composed(path.stem)} & named for path in images)
            return _Listing(table, "/".join(part for part in (base, table.name) if part), column, without)
    return None


def _start(base: str, folder: Path, images: Sequence[Path], inner: str, answers: Answers) -> list[Entry]:
    return [
        Entry("kind", "images"),
        Entry("files", _patterns(base, inner, images, eyes([path.stem for path in images]) or "*")),
        _channels_entry(images[0], answers),
    ]


def _patterns(base: str, inner: str, images: Sequence[Path], stem: str = "*") -> list[str]:
    suffixes = sorted({path.suffix for path in images})
    return ["/".join(part for part in (base, inner, f"{stem}{suffix}") if part) for suffix in suffixes]


def _with_layouts(base: str, images: Layout, masks: Layout, listing: _Listing | None, answers: Answers) -> list[Entry]:
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
        *_split(files[0], answers, listing),
    ]


def _split(files: str, answers: Answers, listing: _Listing | None = None, evenly: bool = False) -> list[Entry]:
    """``split`` of images whose answers are in no table, and ``table`` where one beside them says whose they are, or in
    which split; else their names may say it.

    Args:
        files: the pattern of the images' files, with what it says in braces.
        evenly: classes are to have the same shares in all splits.
    """
    known = _known(listing) if listing else {}
    column = split_column(known) or ("split" if "{split}" in files else "")
    asked = answers.given.get("group", "none") in (*known, "none")
    group = patient_column(known, "", replace(answers, prompt=None)) if asked else ""
    group = group or _named_group(files, list(known), answers)
    told = listing and [_table(listing)] * (group in known or column in known)
    if column:
        return [*(told or ()), split_entry(column, group)]
    if group:
        said = "both eyes of a patient" if group == "patient" else f"images of one {group}"
        said += f" stay together{', as of one patient' * (group == _FOLDER)}"
        return [*(told or ()), split_entry("", group, said)]
    alone = "every image counts as another patient; name the patient in braces if that is not so"
    return [split_entry("", "", alone, **({"stratify": True} if evenly else {}))]


def _named_group(files: str, columns: Sequence[str], answers: Answers) -> str:
    """The part of the files' names that says whose they are; "" for none."""
    found = "patient" if "{patient}" in files else ""
    if not found and f"{{{_FOLDER}}}" in files:
        question = f"Does the folder in '{files}' name the patient? '{_FOLDER}', or 'none' if each image is another one"
        found = answers.get("group", question, _FOLDER, [_FOLDER, *columns, "none"]).replace("none", "")
    return given_group(answers, found, columns)


def _known(listing: _Listing) -> dict[str, list[str]]:
    """Of each column of the table, but that of images, the cells that are not missing."""
    frame = tables.read(listing.path)[0]
    columns = [str(column) for column in frame.columns if column != listing.names]
    return {column: [cell for cell in frame[column] if cell not in tables.MISSING] for column in columns}


def _table(listing: _Listing) -> Entry:
    separator = tables.read(listing.path)[2]
    written = {"separator": separator} if separator else {}
    return Entry("table", {"file": listing.shown, "image": listing.names, **written}, listing.note)


def _no_group(answers: Answers) -> dict[str, str]:
    return {flag: value for flag, value in answers.given.items() if flag != "group"}


def _values(masks: Sequence[Path]) -> list[int]:
    """The stored values of the masks; of very many, of the first.

    Raises:
        DataError: they are no masks.
    """
    values: set[int] = set()
    for path in masks[:_MASKS]:
        values |= {int(value) for value in np.unique(read_mask(path))}
    if len(values) > 32:
        raise DataError(f"{masks[0]}: expected a mask, got {len(values)} different values")
    return sorted(values)


def _with_masks(
    folder: Path,
    base: str,
    images: Sequence[Path],
    masks: Sequence[Path],
    listing: _Listing | None,
    answers: Answers,
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
    start = _start(base, folder, images, image_folder, answers)
    return [
        *start,
        Entry("masks", declared, f"a mask has its image's name{f' and {ending}' if ending else ''}"),
        *_split(start[1].value[0], answers, listing),
    ]


def _with_table(folder: Path, base: str, images: Sequence[Path], listing: _Listing, answers: Answers) -> list[Entry]:
    inner, in_folder = _common(folder, images), answers.given.get("group") == _FOLDER
    own = replace(answers, given=_no_group(answers)) if in_folder else answers
    declared = {entry.key: entry for entry in tables.describe([listing.path], [listing.shown], own, of_images=True)}
    split = declared["split"]
    written: dict[str, str | dict[str, list[str]]] = {
        key: declared[key].value for key in ("separator", "decimal") if key in declared
    }
    answer = declared["label" if "label" in declared else "value"]
    note = listing.note
    missing = declared["missing"].value
    if answer.key == "label" and (empty := tables.count_of(listing.path, column := answer.value["column"], missing)):
        note += f"; those without a value of '{column}' are left out: {empty}"
        known = [value for values in answer.value["classes"].values() for value in values]
        written["where"] = {column: known}
    named = _named(folder, images)
    if in_folder:
        given_group(answers, _FOLDER if f"{{{_FOLDER}}}" in named else "", [])
    if "{" in named and (in_folder or not {"group", "column"} & split.value.keys()):
        # Of folders that are classes there are no more than classes; folders of patients are more.
        fewest = max(3, len(answer.value["classes"]) if answer.key == "label" else 0)
        several = len({path.parent for path in images}) > fewest and "group" not in answers.given
        asked = answers if in_folder or several else replace(answers, given={**answers.given, "group": "none"})
        if (cut := _split(named, asked)[0]).value.keys() & {"group", "column"}:
            inner, split = named, cut
    return [
        *_start(base, folder, images, inner, answers),
        Entry("table", {"file": listing.shown, "image": listing.names, **written}, note),
        answer,
        split,
    ]


def _with_folders(folder: Path, base: str, images: Sequence[Path], answers: Answers) -> list[Entry]:
    parts = [path.relative_to(folder).parts[:-1] for path in images]
    levels = [set(each) for each in zip(*parts, strict=False)]
    deep = len(levels) > 1
    called = [
        "split" if deep and not place and only_splits(level) else _FOLDER if deep and are_patients(level) else "class"
        for place, level in enumerate(levels)
    ]
    if len({len(part) for part in parts}) > 1 or called.count("class") != 1 or called.count(_FOLDER) > 1:
        raise DataError(
            f"{folder}: found neither masks (a folder 'masks', or NAME_mask beside NAME), nor a table that names the "
            "images, nor one folder a class"
        )
    inner, place = "/".join(f"{{{name}}}" for name in called), called.index("class")
    names = sorted({composed(part[place]) for part in parts})
    if not answers.classes and (are_patients(names) or only_splits(names)):
        what = "patients" if are_patients(names) else "splits"
        raise DataError(
            f"{folder}: its folders are called as {what} are ({names[0]}, ...) and so say no classes: put a table "
            "beside them that names the images and what is to be predicted, or say with --class what they mean"
        )
    classes = answers.class_values(names, names, "a folder")
    start = _start(base, folder, images, inner, answers)
    label = Entry("label", {"column": "class", "classes": classes}, "class: the folders that hold it")
    return [*start, label, *_split(start[1].value[0], answers, evenly=True)]


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
        elif only_splits(there):
            named.append("{split}")
        else:
            named.append(f"{{{_FOLDER}}}" if numbered == 1 else f"{{{_FOLDER}_{numbered}}}")
            numbered += 1
    return "/".join(named)


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
            return 1 if image.mode in ("1", "L", "LA", "F") or image.mode.startswith("I") else 3
    except (OSError, UnidentifiedImageError) as error:
        raise DataError(f"{path}: cannot be read as an image: {error}") from error


def _has_columns(table: Path) -> bool:
    """Whether a text file has several, and is no list of names, say, which tells nothing of them."""
    if table.suffix.lower() in PARQUET or not table.is_file():
        return table.is_file()
    with table.open("rb") as file:
        first = next((line for line in file if line.strip()), b"")
    return any(sign in first for sign in b";\t|,")


def _image_column(table: Path, images: Sequence[Path]) -> str | None:
    """The column most of whose cells name an image."""
    names = {composed(name) for path in images for name in (path.name, path.stem)}
    frame, *_ = tables.read(table)
    for column in frame.columns:
        if sum(composed(Path(cell).name) in names for cell in frame[column]) > len(frame) / 2:
            return str(column)
    return None
