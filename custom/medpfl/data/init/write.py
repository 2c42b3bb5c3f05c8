# SPDX-License-Identifier: Apache-2.0
"""From a folder or a table to a site file that loads."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import yaml

from medpfl.core.errors import MedPFLError, SiteFileError
from medpfl.data.init import arrays, bids, images, recordings, tables, volumes
from medpfl.data.init.answers import Answers, Entry
from medpfl.data.init.like import like
from medpfl.data.paths import seen_in
from medpfl.data.schema import Schema
from medpfl.data.site_file import load_site_file


def write_site_file(place: Path, output: Path, answers: Answers) -> list[Path]:
    """Look at ``place``, ask what is needed and write the site file (and a datalist, if there is none for volumes).

    Returns:
        The files that were written, the site file first; nothing is ever overwritten.

    Raises:
        SiteFileError: a file is there already, an answer is missing or wrong, or nothing known is found.
        DataError: the data cannot be described.
    """
    if not place.exists():
        raise SiteFileError(f"{place}: no such file or folder")
    if output.exists():
        raise SiteFileError(f"{output} is there already and is not overwritten; name another with -o")
    site = answers.get("site", "This hospital's name in the federation", output.stem if output.stem != "site" else None)
    if answers.schema:
        answers = like(answers, answers.schema)
    name = answers.get("dataset", "Name of the dataset, as jobs call it")
    for flag, text in (("site", site), ("dataset", name)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
            raise SiteFileError(f"--{flag}: expected letters, digits, '.', '_' or '-', got '{text}'")
    datalist = output.with_name(f"{output.stem}-{name}.json")
    entries, listed = look(place, output.parent, datalist, answers)
    if answers.schema and entries[0].value != answers.schema.kind:
        raise SiteFileError(f"{place}: the schema describes '{answers.schema.kind}', found '{entries[0].value}'")
    texts = {output: _render(place, site, name, entries)}
    if listed:
        texts[datalist] = listed
    return _write(texts, output, answers.schema)


def look(place: Path, base: Path, datalist: Path, answers: Answers) -> tuple[list[Entry], str]:
    """The dataset's entries, and the text of a datalist to be written ("" for none).

    Args:
        base: the site file's folder; paths are relative to it.
    """
    if place.is_file():
        return _look_at_file(place, base, answers), ""
    lists = [path for path in sorted(place.glob("*.json")) if volumes.read_datalist(path) is not None]
    if len(lists) == 1:
        return volumes.from_datalist(lists[0], volumes.shown(lists[0], base), answers), ""
    if len(lists) > 1:
        raise SiteFileError(f"{place}: it holds several datalists ({_named(lists)}); name one of them")
    tree = bids.is_bids(place)
    if tree or volumes.find_volumes(place):
        if datalist.exists():
            raise SiteFileError(f"{datalist} is there already and is not overwritten; name another site file with -o")
        return (bids.from_bids if tree else volumes.from_folder)(place, datalist, answers)
    if images.find_images(place):
        shown = volumes.shown(place, base)
        return images.describe(place, "" if shown == "." else shown, answers), ""
    files = [path for path in seen_in(place) if path.suffix.lower() in (*tables.SUFFIXES, ".npz")]
    if len(files) == 1:
        return _look_at_file(files[0], base, answers), ""
    found = recordings.find_recordings(place)
    if not found and not files:
        raise SiteFileError(
            f"{place}: found no datalist, NIfTI, DICOM, PNG or JPEG files below it, and no table or .npz file in it"
        )
    if len(files) > len(found):
        raise SiteFileError(f"{place}: it holds several tables or .npz files ({_named(files)}); name one of them")
    shown = volumes.shown(place, base)
    question = f"Is each of the {len(found)} tables a recording, with a row per time step, or are they one 'table'?"
    if answers.get("kind", question, "recording", ["recording", "table"]) == "recording":
        return recordings.describe(place, shown, found, answers), ""
    return tables.describe(found, [volumes.shown(path, base) for path in found], answers), ""


def _look_at_file(file: Path, base: Path, answers: Answers) -> list[Entry]:
    shown = volumes.shown(file, base)
    if file.suffix.lower() == ".npz":
        return arrays.describe(file, shown, answers)
    if file.suffix.lower() == ".json":
        if volumes.read_datalist(file) is None:
            raise SiteFileError(f"{file}: expected a Decathlon datalist with a list 'training'")
        return volumes.from_datalist(file, shown, answers)
    if file.suffix.lower() in tables.SUFFIXES and answers.given.get("kind") == "recording":
        return recordings.describe(file.parent, volumes.shown(file.parent, base), [file], answers)
    if file.suffix.lower() in tables.SUFFIXES:
        return tables.describe([file], [shown], answers)
    known = ", ".join((*tables.SUFFIXES, ".npz", ".json"))
    raise SiteFileError(f"{file}: expected a folder, or a file of one of the kinds {known}")


def _named(files: Sequence[Path]) -> str:
    return ", ".join(path.name for path in files[:5]) + (", ..." if len(files) > 5 else "")


def _render(place: Path, site: str, name: str, entries: Sequence[Entry]) -> str:
    lines = [
        f"# Proposed by 'medpfl site init' from {place.resolve()}. It is yours: edit it.",
        "# It stays at this hospital. Paths are relative to this file.",
        _yaml("site", site),
        "datasets:",
        f"  {_yaml(name, None).split(':')[0]}:",
    ]
    for entry in entries:
        if entry.comment:
            lines.append(f"    # {' '.join(entry.comment.split())}")  # it may name a column with a line break
        lines += [f"    {line}" for line in _yaml(entry.key, entry.value).splitlines()]
    return "\n".join(lines) + "\n"


def _yaml(key: str, value: object) -> str:
    style = None if isinstance(value, list | dict) else False  # lists and inner mappings on one line

    def dumped(unicode: bool) -> str:
        return yaml.safe_dump(
            {key: value}, default_flow_style=style, sort_keys=False, width=100, allow_unicode=unicode
        ).rstrip()  # fmt: skip

    text = dumped(True)
    # These end a line of YAML, and PyYAML leaves them as they are, so that it reads another text than it wrote.
    return dumped(False) if any(sign in text for sign in "\x85\u2028\u2029") else text


def _write(texts: dict[Path, str], output: Path, schema: Schema | None) -> list[Path]:
    """Write all files; the site file last, and only if it loads and follows the schema."""
    written: list[Path] = []
    try:
        for path, text in reversed(texts.items()):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                written.insert(0, path)
                file.write(text)
        loaded = load_site_file(output)
        for difference in schema.differences(loaded.datasets[schema.dataset]) if schema else []:
            raise SiteFileError(f"what was found does not follow the schema: {difference}")
    except OSError as error:
        _remove(written)
        raise SiteFileError(f"cannot write {error.filename or output}: {error.strerror}") from error
    except MedPFLError:
        _remove(written)
        raise
    return written


def _remove(files: Sequence[Path]) -> None:
    for path in files:
        os.unlink(path)
