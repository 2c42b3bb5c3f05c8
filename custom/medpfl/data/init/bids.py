# SPDX-License-Identifier: Apache-2.0
"""BIDS folders: a subject's anatomical scans with the label maps of its derivatives, and what participants.tsv tells.

pybids would bring a database and pandas queries for what is a pattern of names here.
"""

import csv
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from medpfl.core.errors import DataError
from medpfl.data.init.answers import Answers, Entry, as_value
from medpfl.data.init.splitting import given_group, split_column, split_entry
from medpfl.data.init.volumes import labels_in, shown, split_of

_SCANS = ("T1w", "T2w", "FLAIR", "PDw", "T2starw", "inplaneT1", "inplaneT2", "angio", "T1map", "T2map")
"""Suffixes of images, the usual first."""
_LABELS = ("dseg", "mask")
_OWN = {"space", "desc", "res", "den", "label", "atlas", "seg", "hemi"}
"""Entities that a derivative has of its own; the others say of which scan it is."""
_SHOWN = ("desc", "label", "atlas", "seg")
"""Entities that say what a derivative shows."""
_MISSING = "n/a"


@dataclass(frozen=True)
class _File:
    """A file by its name: entities (``sub``, ``ses``, ...) and suffix."""

    path: Path
    entities: dict[str, str]
    suffix: str

    def of(self, scan: "_File") -> bool:
        """Whether it may be a scan's: what both names say is the same, and it says nothing that the scan does not."""
        return all(scan.entities.get(key) == value for key, value in self.entities.items() if key not in _OWN)


def is_bids(folder: Path) -> bool:
    """Whether a folder holds subjects with anatomical scans."""
    return any(folder.glob("sub-*/anat")) or any(folder.glob("sub-*/ses-*/anat"))


def from_bids(folder: Path, datalist: Path, answers: Answers) -> tuple[list[Entry], str]:
    """Entries, and the text of a datalist to be written at ``datalist``: an item a scan, its subject as the patient,
    and the columns of participants.tsv.

    Of the contrasts the first that most scans have is taken. Without label maps a column of participants.tsv is the
    class; with them only where it was asked for.

    Raises:
        DataError: a scan has several label maps, those of the scans may not show the same, or no subject has any and
            there is no participants.tsv.
        SiteFileError: what is needed was not answered.
    """
    found = [_parsed(path) for path in sorted(_files(folder))]
    maps = [file for file in found if file and file.suffix in _LABELS]
    scans = [file for file in found if file and file.suffix in _SCANS and not _derived(folder, file.path)]
    told, columns = _participants(folder)
    scans, others = _of_one_contrast(folder, scans)
    pairs = _paired(folder, scans, maps)
    by_class = "label" in answers.given or not maps
    if by_class and not columns:
        raise DataError(
            f"{folder}: found no label map (derivatives/*/sub-*/.../anat/*_dseg.nii.gz or *_mask.nii.gz), and no "
            "column of participants.tsv that could be predicted"
        )
    column = (
        answers.get("label", "Which column of participants.tsv is to be predicted?", None, columns) if by_class else ""
    )
    items: list[dict[str, str]] = []
    for scan, label in pairs:
        item = {"image": shown(scan.path, datalist.parent)}
        if maps and label is None:
            continue
        if label:
            item["label"] = shown(label.path, datalist.parent)
        subject = f"sub-{scan.entities['sub']}"
        facts = told.get(subject, {})
        if column and column not in facts:
            continue
        items.append({**facts, **item, "patient": subject})
    left = len(scans) - len(items)
    comment = f"written from {folder}: {len(items)} {scans[0].suffix} scans of {_subjects(items)} subjects"
    comment += f"; {left} without a label are left out" if left else ""
    comment += f"; not used: {', '.join(others)}" if others else ""
    entries = [Entry("kind", "volumes"), Entry("datalist", datalist.name, comment)]
    if maps:
        entries += labels_in([label.path for _, label in pairs if label], answers)
    if column:
        values = sorted({as_value(item[column]) for item in items}, key=str)
        classes = answers.class_values(values, [str(value) for value in values], f"column '{column}'")
        entries.append(Entry("label", {"column": column, "classes": classes}, "from participants.tsv"))
    if not items:
        raise DataError(f"{folder}: no {scans[0].suffix} scan has a label")
    told_of_all = {name: [item[name] for item in items] for name in columns if all(name in item for item in items)}
    group, split = given_group(answers, "patient", columns), split_column(told_of_all, column)
    cut = split_entry(split, group) if split else split_of(group or None)
    return [*entries, cut], json.dumps({"training": items}, indent=1) + "\n"


def _files(folder: Path) -> list[Path]:
    patterns = (f"{top}sub-*/{session}anat/*.nii*" for top in ("", "derivatives/*/") for session in ("", "ses-*/"))
    return [path for pattern in patterns for path in folder.glob(pattern)]


def _derived(folder: Path, path: Path) -> bool:
    """The folder itself may be a data set of derivatives."""
    return "derivatives" in path.relative_to(folder).parts


def _parsed(path: Path) -> _File | None:
    """By its name, sub-01_ses-1_T1w.nii.gz; None for another name."""
    match = re.fullmatch(r"(sub-[A-Za-z0-9]+(?:_[a-z0-9]+-[A-Za-z0-9+]+)*)_([A-Za-z0-9]+)\.nii(\.gz)?", path.name)
    if match is None:
        return None
    parts = (part.partition("-") for part in match[1].split("_"))
    return _File(path, {key: value for key, _, value in parts}, match[2])


def _of_one_contrast(folder: Path, scans: Sequence[_File]) -> tuple[list[_File], list[str]]:
    """The scans of the contrast that most subjects have, the usual one if several do; and the other contrasts."""
    subjects = {suffix: {scan.entities["sub"] for scan in scans if scan.suffix == suffix} for suffix in _SCANS}
    if not scans:
        raise DataError(f"{folder}: found no anatomical scan (sub-*/anat/*_T1w.nii.gz, ..._T2w, ..._FLAIR and others)")
    chosen = max(_SCANS, key=lambda suffix: len(subjects[suffix]))
    others = [suffix for suffix in _SCANS if subjects[suffix] and suffix != chosen]
    return [scan for scan in scans if scan.suffix == chosen], others


def _paired(folder: Path, scans: Sequence[_File], maps: Sequence[_File]) -> list[tuple[_File, _File | None]]:
    """The scans and their label maps: segmentations (dseg) where any scan has one, else masks. Never both: who lacks a
    segmentation of lesions has a mask of the brain, whose 1 is something else.

    Raises:
        DataError: see ``_map_of``; or by their names and folders not all show the same.
    """
    pairs: list[tuple[_File, _File | None]] = []
    for suffix in _LABELS:
        these = [file for file in maps if file.suffix == suffix]
        pairs = [(scan, _map_of(scan, these, scans)) for scan in scans]
        if any(label for _, label in pairs):
            break
    labels = [label for _, label in pairs if label]
    for label in labels:
        if _what(folder, label) != _what(folder, labels[0]):
            raise DataError(
                f"{label.path}: by its name or folder it may show something else than {labels[0].path}; leave the ones "
                "that count below derivatives, or name a datalist instead"
            )
    return pairs


def _what(folder: Path, label: _File) -> tuple[str, ...]:
    """What a label map shows, as far as its name and the data set of derivatives that it is of say so."""
    _, _, inner = label.path.relative_to(folder).as_posix().partition("derivatives/")
    return (inner.partition("/")[0], *(label.entities.get(key, "") for key in _SHOWN))


def _map_of(scan: _File, maps: Sequence[_File], scans: Sequence[_File]) -> _File | None:
    """A scan's label map of these; those on other voxels do not count, nor those of which the name of another of the
    ``scans`` says no more than theirs does.

    Raises:
        DataError: there are several; or it may as well be another scan's, on whose voxels it need not lie.
    """
    others = [one for one in scans if one.entities["sub"] == scan.entities["sub"] and one is not scan]
    these = [
        file
        for file in maps
        if file.of(scan)
        and file.entities.get("space", scan.suffix) in (scan.suffix, "orig")
        and not any(file.of(one) and len(one.entities) < len(scan.entities) for one in others)
    ]
    if len(these) > 1:
        raise DataError(
            f"{scan.path}: it has several label maps, {these[0].path} and {these[1].path}; leave the ones that count "
            "below derivatives, or name a datalist instead"
        )
    if these and (same := [one for one in others if these[0].of(one) and len(one.entities) == len(scan.entities)]):
        raise DataError(
            f"{these[0].path}: its name does not say whether it is the label map of {scan.path.name} or of "
            f"{same[0].path.name}; name it as its scan is (with run or ses), or name a datalist instead"
        )
    return these[0] if these else None


def _participants(folder: Path) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Subject to what participants.tsv says of it, without what is not known, and the names of its columns but the
    first."""
    file = folder / "participants.tsv"
    if not file.is_file():
        return {}, []
    try:
        with file.open(encoding="utf-8-sig", newline="") as opened:
            rows = list(csv.reader(opened, delimiter="\t"))
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"{file}: cannot be read as a table: {error}") from error
    header = rows[0] if rows else []
    if header[:1] != ["participant_id"] or len(set(header)) != len(header):
        raise DataError(
            f"{file}: expected 'participant_id' as the first of its columns, each once, got {', '.join(header)}"
        )
    told: dict[str, dict[str, str]] = {}
    for number, row in enumerate(rows[1:], start=2):
        if len(row) != len(header) or row[0] in told:
            what = (
                f"{row[0]} is there twice"
                if row and row[0] in told
                else f"expected {len(header)} cells, got {len(row)}"
            )
            raise DataError(f"{file}:{number}: {what}")
        told[row[0]] = {name: cell for name, cell in zip(header[1:], row[1:], strict=True) if cell != _MISSING}
    return told, header[1:]


def _subjects(items: Sequence[dict[str, str]]) -> int:
    return len({item["patient"] for item in items})
