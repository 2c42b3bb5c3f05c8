# SPDX-License-Identifier: Apache-2.0
"""Volumes in folders: NIfTI files or DICOM series, paired with their label maps, patients named where evident."""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, JsonValue

from medpfl.core.errors import DataError, SiteFileError
from medpfl.data.init.answers import Answers, Entry, Value
from medpfl.data.init.splitting import FRACTIONS, are_splits, given_group, split_column
from medpfl.data.paths import seen_below
from medpfl.data.volumes.datalist import other_field
from medpfl.data.volumes.nifti import SUFFIXES as NIFTI
from medpfl.data.volumes.nifti import stored_values

LABELS = re.compile(r"(labels?|masks?|segs?|segmentations?|gt|ground.?truth)(tr|ts|s)?", re.IGNORECASE)
MARK = re.compile(r"[._-]?(label|mask|seg|segmentation|gt)s?$", re.IGNORECASE)
_TESTS = re.compile(r"(images?|imgs?|scans?)ts", re.IGNORECASE)
"""Folders of images that nnU-Net and the Decathlon keep apart, for which there may be no label maps."""
CHANNEL = re.compile(r"_(\d{4})$")  # nnU-Net's channel number
PATIENT = re.compile(r"(sub-[A-Za-z0-9]+|[A-Za-z]*\d+)(?=[_-])")
_USUAL = "patient"
"""The field of a datalist's items that says whose they are, if it is called as usual."""
LOOKED = 20  # label maps that are read to find the values


@dataclass(frozen=True)
class Pair:
    """Images (one a channel) and their label map."""

    images: tuple[Path, ...]
    label: Path


class Listed(TypedDict):
    """A case of a Decathlon datalist that is written."""

    image: str | list[str]
    label: str
    patient: NotRequired[str]
    split: NotRequired[str]


def from_datalist(path: Path, shown: str, answers: Answers) -> list[Entry]:
    """Entries for a datalist as it is; class names from its ``labels``, else from the label maps' values."""
    content = read_datalist(path)
    assert content is not None
    named = content.labels
    classes = None
    if isinstance(named, dict) and not answers.classes:
        try:
            classes = {int(value): str(name) for value, name in named.items()}
        except ValueError:
            classes = None
    items, others = (_labelled(some) for some in (content.training, content.others()))
    every = [*items, *others]
    fields = list(dict.fromkeys(key for item in every for key in item))
    known = {key: [str(item[key]) for item in every if key in item] for key in fields}
    found = other_field({"training": [*every]}, _USUAL) or (_USUAL if _USUAL in known else "")
    group = given_group(answers, found, fields)
    entries = [Entry("kind", "volumes"), Entry("datalist", shown, "used as it is")]
    if classes and sorted(classes) == list(range(len(classes))) and len(classes) > 1:
        entries.append(Entry("labels", classes, "taken from the datalist"))
    else:
        entries += labels_in([path.parent / str(item["label"]) for item in items], answers)
    split = "" if others else split_column({key: cells for key, cells in known.items() if len(cells) == len(every)})
    if split or content.others():
        return entries + _split_by(split, group if group or found else _USUAL)
    return [*entries, split_of(group or (None if found else _USUAL), bool(group))]


def from_folder(folder: Path, datalist: Path, answers: Answers) -> tuple[list[Entry], str]:
    """Entries, and the text of a datalist to be written at ``datalist``.

    Raises:
        DataError: the files cannot be paired.
        SiteFileError: what is needed was not answered.
    """
    pairs = find_pairs(folder)
    splits = _splits(folder, pairs)
    grouped = given_group(answers, _USUAL)
    patients = _patients(folder, pairs, answers, behind=bool(splits)) if grouped else [""] * len(pairs)
    if grouped and "patient" not in answers.given:
        patients = _by_headers(pairs, patients)
    items: list[Listed] = []
    for pair, patient, split in zip(pairs, patients, splits or [""] * len(pairs), strict=True):
        images = [shown(image, datalist.parent) for image in pair.images]
        item: Listed = {"image": images[0] if len(images) == 1 else images, "label": shown(pair.label, datalist.parent)}
        if patient:
            item["patient"] = patient
        if split:
            item["split"] = split
        items.append(item)
    used = {file for pair in pairs for file in (*pair.images, pair.label)}
    unused = sum(file not in used for file in find_volumes(folder))
    left = f"; not used: {unused} files of test images without label maps" if unused else ""
    entries = [
        Entry("kind", "volumes"),
        Entry("datalist", datalist.name, f"written from {folder}: {len(items)} images with label maps{left}"),
        *labels_in([pair.label for pair in pairs], answers),
        Entry("split", {"column": "split"}, "the folders say it") if splits else split_of(_USUAL, any(patients)),
    ]
    return entries, json.dumps({"training": items}, indent=1) + "\n"


def _labelled(items: Sequence[JsonValue]) -> list[dict[str, JsonValue]]:
    return [item for item in items if isinstance(item, dict) and isinstance(item.get("label"), str)]


def shown(path: Path, base: Path) -> str:
    """Relative to ``base`` where it lies below, else absolute. A link keeps its name: its target may be a hash."""
    path, base = Path(os.path.abspath(path)), Path(os.path.abspath(base))
    return os.path.relpath(path, base) if path.is_relative_to(base) else str(path)


class Datalist(BaseModel):
    """What we read of a Decathlon datalist; what else it holds is the data set's own affair."""

    training: list[JsonValue]
    validation: JsonValue = None
    test: JsonValue = None
    testing: JsonValue = None
    labels: JsonValue = None

    def others(self) -> list[JsonValue]:
        """The items of the other lists, of which the Decathlon's own have no labels."""
        lists = (self.validation, self.test, self.testing)
        return [item for some in lists if isinstance(some, list) for item in some]


def read_datalist(path: Path) -> Datalist | None:
    """The file's content if it is a Decathlon datalist."""
    try:
        return Datalist.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # pydantic's error is one, too
        return None


def find_volumes(folder: Path) -> list[Path]:
    """NIfTI files, and folders that hold DICOM files, below a folder."""
    found: set[Path] = set()
    for path in seen_below(folder):
        if path.is_file() and path.name.lower().endswith(NIFTI):
            found.add(path)
        elif path.is_file() and path.parent not in found and is_dicom(path):
            found.add(path.parent)
    return sorted(found)


def is_dicom(path: Path) -> bool:
    """By its name, or by the mark that DICOM files without one bear."""
    if path.suffix.lower() == ".dcm":
        return True
    if path.suffix and not path.suffix[1:].isdigit():
        return False
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def find_pairs(folder: Path) -> list[Pair]:
    """Images with their label maps: in two folders (images, labels), or side by side (x.nii.gz, x_seg.nii.gz), or a
    folder a patient. Test images (imagesTs) none of which has a label map are left out.

    Raises:
        DataError: an image has no label map, or a label map no image.
    """
    images: dict[str, list[Path]] = {}
    labels: dict[str, Path] = {}
    beside: dict[Path, tuple[list[Path], list[Path]]] = {}
    for path in find_volumes(folder):
        inner = path.relative_to(folder)
        stem = path.name.removesuffix(".gz").removesuffix(".nii")
        parents = [part for part in inner.parts[:-1]]
        below = "/".join(part for part in parents if not _is_side(part))
        is_label = any(LABELS.fullmatch(part) for part in parents) or bool(MARK.search(stem) or LABELS.fullmatch(stem))
        beside.setdefault(path.parent, ([], []))[is_label].append(path)
        key = f"{below}/{MARK.sub('', stem) if is_label else CHANNEL.sub('', stem)}"
        if is_label and key in labels:
            raise DataError(f"{path}: {labels[key]} is a label map of the same name; name one datalist instead")
        if is_label:
            labels[key] = path
        else:
            images.setdefault(key, []).append(path)
    # One label map a folder: images of any name beside it are its channels.
    single = all(len(maps) == 1 and there for there, maps in beside.values())
    if single and beside and set(images) != set(labels):
        counts = {len(there) for there, _ in beside.values()}
        if len(counts) > 1:
            raise DataError(
                f"{folder}: the folders hold {' or '.join(map(str, sorted(counts)))} images; expected one number"
            )
        return _of_same_channels([Pair(tuple(sorted(there)), maps[0]) for _, (there, maps) in sorted(beside.items())])
    for key in _unlabelled(folder, images, labels):
        del images[key]
    for key in sorted(images):
        if key not in labels:
            raise DataError(
                f"{images[key][0]}: found no label map of the same name (labels/NAME, or NAME_seg beside it)"
            )
    for key in sorted(set(labels) - set(images)):
        raise DataError(f"{labels[key]}: found no image for this label map")
    return _of_same_channels([Pair(tuple(sorted(images[key])), labels[key]) for key in sorted(images)])


def _unlabelled(folder: Path, images: Mapping[str, Sequence[Path]], labels: Mapping[str, Path]) -> list[str]:
    """Of the images those of a folder of test images without any label map."""
    tests = [key for key in images if any(map(_TESTS.fullmatch, images[key][0].relative_to(folder).parts[:-1]))]
    return [] if set(tests) & set(labels) else tests


def _of_same_channels(pairs: list[Pair]) -> list[Pair]:
    """The pairs, whose images are channels in the order of their names: so the names must say the same in every one.

    Raises:
        DataError: they do not, as where a scanner's series number stands before "T1" and "T2".
    """
    for pair in pairs:
        if _channels(pair.images) != _channels(pairs[0].images):
            here, there = (", ".join(image.name for image in each.images) for each in (pair, pairs[0]))
            raise DataError(
                f"{pair.images[0].parent}: by their names, {here} are not the same channels in the same order as "
                f"{there} in {pairs[0].images[0].parent}: give a channel the same name for every patient (T1.nii.gz, "
                "say), or name one datalist instead"
            )
    return pairs


def _channels(images: Sequence[Path]) -> tuple[str, ...]:
    """What tells a case's images apart: of s1_flair.nii.gz and s1_t1.nii.gz "flair" and "t1"."""
    names = [image.name.removesuffix(".gz").removesuffix(".nii") for image in images]
    rest = [name[_alike(names) :] for name in names]
    after = _alike([name[::-1] for name in rest])
    return tuple(name[: len(name) - after] for name in rest)


def _alike(names: Sequence[str]) -> int:
    """Letters with which all of them begin."""
    first, last = min(names), max(names)
    return next((n for n, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(len(first), len(last)))


def _is_side(part: str) -> bool:
    return bool(LABELS.fullmatch(part) or re.fullmatch(r"(images?|imgs?|scans?)(tr|ts)?", part, re.IGNORECASE))


def _splits(folder: Path, pairs: Sequence[Pair]) -> list[str]:
    """Each pair's split, where the outermost folders are called train, test and the like; empty where they are not."""
    found = [next(iter(_folders(folder, pair)), "").lower() for pair in pairs]
    return found if are_splits(found) else []


def _folders(folder: Path, pair: Pair) -> list[str]:
    """The folders in which a pair lies, but those of images and of label maps."""
    return [part for part in pair.images[0].relative_to(folder).parts[:-1] if not _is_side(part)]


def _patients(folder: Path, pairs: Sequence[Pair], answers: Answers, behind: bool = False) -> list[str]:
    """Each pair's patient: its sub-folder, a number at the start of its name, or as answered; "" where each file is
    another patient.

    Args:
        behind: the outermost folder is that of a split.
    """
    given = answers.given.get("patient")
    paths = [pair.images[0].relative_to(folder) for pair in pairs]
    folders = [_folders(folder, pair)[behind:] for pair in pairs]
    while all(folders) and len({parts[0] for parts in folders}) == 1:  # which names nobody
        folders = [parts[1:] for parts in folders]
    guess = "file"
    if given is None and len({tuple(parts) for parts in folders}) > 1 and all(folders):
        if len({parts[0] for parts in folders}) == len({tuple(parts) for parts in folders}):
            return ["/".join(parts) for parts in folders]
        # p1/2019 and p1/2020 are visits of one patient, and scanner1/p1 and scanner1/p2 patients: who is not asked
        # gets what puts nobody into training and test.
        sides = {path.parts.index(parts[0]) for path, parts in zip(paths, folders, strict=True)}
        guess = f"^{'[^/]+/' * sides.pop()}([^/]+)" if len(sides) == 1 else guess
    names = [PATIENT.match(path.name) for path in paths]
    if given is None and any(folders) and not all(folders):  # some lie beside the patients' folders
        return [parts[0] if parts else name[1] if name else "" for parts, name in zip(folders, names, strict=True)]
    if given is None and guess == "file" and all(names):
        return [match[1] for match in names if match]
    question = (
        f"Which part of '{paths[0].as_posix()}' names the patient? A regular expression, or 'file' if every file is "
        "another patient"
    )
    answer = answers.get("patient", question, guess)
    if answer == "file":
        return [""] * len(pairs)
    try:
        found = [re.search(answer, path.as_posix()) for path in paths]
    except re.error as error:
        raise SiteFileError(f"--patient: '{answer}' is not a regular expression: {error}") from error
    for path, match in zip(paths, found, strict=True):
        if match is None:
            raise SiteFileError(f"--patient: '{answer}' is not found in '{path.as_posix()}'")
    return [match[match.lastindex or 0] for match in found if match]


def _by_headers(pairs: Sequence[Pair], patients: list[str]) -> list[str]:
    """Each pair's patient by DICOM's PatientID, as a number, where it is the same of what passed for several; else as
    it was. One that all have, as some programs write it, says nothing."""
    from medpfl.data.volumes.dicom import patient_of

    found = [patient_of(pair.images[0]) for pair in pairs]
    numbers = {one: str(number) for number, one in enumerate(dict.fromkeys(found), start=1)}
    passed = {patient or str(place) for place, patient in enumerate(patients)}
    return [numbers[one] for one in found] if all(found) and 1 < len(numbers) < len(passed) else patients


def labels_in(files: Sequence[Path], answers: Answers) -> list[Entry]:
    """``labels``, and ``label_map`` where needed, for the values that label maps hold.

    Raises:
        DataError: one cannot be read or holds other than whole numbers, or all hold one value.
    """
    values: set[int] = set()
    for file in files[:LOOKED]:
        found = _values(file)
        if not np.array_equal(found, np.round(found)) or len(found) > 256:
            raise DataError(f"{file}: expected a label map with whole numbers, got {len(found)} different values")
        values |= {int(value) for value in found}
    return label_entries(sorted(values), f"values found in {min(len(files), LOOKED)} label maps", answers)


def _values(file: Path) -> NDArray[Any]:
    """The different values of a label map."""
    if file.name.lower().endswith(NIFTI):
        return stored_values(file)
    from medpfl.data.volumes.prepare import read_image
    from medpfl.data.volumes.structures import structures_of

    if found := structures_of(file):
        raise DataError(
            f"{found}: a DICOM segmentation or structure set, for which 'medpfl site init' proposes nothing: write a "
            "datalist of images and label maps, and declare 'labels' and, where names are to be mapped, 'structures'"
        )
    return np.unique(read_image(file, finite=False)[0])


def label_entries(values: Sequence[int], comment: str, answers: Answers) -> list[Entry]:
    """``labels``, and ``label_map`` where the files' values are not 0, 1, 2, ...

    Raises:
        DataError: there are fewer than two values.
    """
    if len(values) < 2 and not answers.classes:
        raise DataError(f"the label maps hold one value only ({values}); name the classes with --class NAME=VALUE")
    names = ["background" if value == 0 else f"label-{value}" for value in values]
    if answers.schema and set(values) <= set(range(len(answers.schema.classes))):
        names = [answers.schema.classes[value] for value in values]
    classes = answers.class_values(list[Value](values), names, "a label map")
    entries = [Entry("labels", dict(enumerate(classes)), comment)]
    mapped = {v: number for number, there in enumerate(classes.values()) for v in there if v != number}
    if mapped:
        entries.append(Entry("label_map", mapped, "value in the files: declared value"))
    return entries


def split_of(group: str | None, grouped: bool = True) -> Entry:
    """``split``, drawn. ``group``: the field that names the patient; ``grouped``: whether items have it."""
    comment = "scans of one patient stay together" if group and grouped else "every scan counts as another patient"
    return Entry("split", {"group": group, "seed": 0, "fractions": FRACTIONS}, comment)


def _split_by(column: str, group: str) -> list[Entry]:
    """``split`` by the datalist's lists or a field of its items; nothing where it is what would be taken anyhow."""
    named = {**({"column": column} if column else {}), **({"group": group or None} if group != _USUAL else {})}
    return [Entry("split", named, "the datalist says it")] if named else []
