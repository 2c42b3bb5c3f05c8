# SPDX-License-Identifier: Apache-2.0
"""MONAI's Decathlon datalist as it stands in its file."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from medpfl.core.errors import DataError, meant, shown
from medpfl.data.declared import Problems
from medpfl.data.patients import PATIENT
from medpfl.data.split_file import SPELLINGS

LISTS = {"train": ("training",), "validation": ("validation",), "test": ("test", "testing")}
"""Split to the lists that are read for it."""


def read_datalist(path: Path) -> dict[str, object]:
    """A datalist's content, which has the list ``training``.

    Raises:
        DataError: it cannot be read, or is something else.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read the datalist {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("training"), list):
        got = f"the keys {', '.join(map(str, content)) or '(none)'}" if isinstance(content, dict) else shown(content)
        raise DataError(f"{path}: expected a Decathlon datalist with a list 'training', got {got}")
    return content


def items_of(
    path: Path, content: dict[str, object], keys: Sequence[str], problems: Problems
) -> Iterator[tuple[str, object]]:
    """The items of the lists with these keys: where each stands, and what it is."""
    for key in keys:
        items = content.get(key) or []
        if isinstance(items, list):
            yield from ((f"{path}: {key}[{number}]", item) for number, item in enumerate(items))
        else:
            problems.add(f"{path}: '{key}' must be a list, got {items!r}")


def labelled_items(
    path: Path, content: dict[str, object], split: str, needed: Sequence[str], problems: Problems
) -> Iterator[tuple[str, object]]:
    """The items of a split's lists, as ``items_of`` gives them, without the images of validation and test that have no
    label, as the Decathlon's own test lists hold them. Where the label's key is misspelt, a case would be among these
    and vanish without a word; that is a problem.

    Args:
        needed: the fields that a case must have beside its image.
    """
    every = [item for key in sum(LISTS.values(), ()) for _, item in items_of(path, content, [key], Problems(keep=True))]
    known = {key for item in every if isinstance(item, dict) and all(one in item for one in needed) for key in item}
    for where, item in items_of(path, content, LISTS[split], problems):
        lacking = [one for one in needed if one not in item] if isinstance(item, dict) and "image" in item else []
        if split == "train" or not (lacking or isinstance(item, str)):
            yield where, item
        elif isinstance(item, dict) and (near := meant(lacking[0], item.keys() - known)):
            problems.add(f"{where}: it has no '{lacking[0]}', without which a case is left out{near}")


def check_lists(path: Path, content: dict[str, object], needed: Sequence[str], problems: Problems) -> None:
    """Refuse a list with a case under a name that is not read: its cases would vanish without a word.

    Args:
        needed: the fields that a case must have beside its image; lists of unlabelled images may have any name.
    """
    read = [name for names in LISTS.values() for name in names]
    for key, items in content.items():
        if key in read or not isinstance(items, list):
            continue
        if any(isinstance(item, dict) and all(field in item for field in ("image", *needed)) for item in items):
            split = SPELLINGS.get(key.lower())
            near = f"; did you mean '{LISTS[split][0]}'?" if split else meant(key, read)
            problems.add(
                f"{path}: the list '{key}' holds cases and is not read, unlike 'training', 'validation', 'test' and "
                f"'testing'; rename it, or leave it out{near}"
            )


def fields(content: dict[str, object]) -> list[str]:
    """The fields that items have, sorted."""
    items = [item for some in content.values() if isinstance(some, list) for item in some]
    return sorted({str(key) for item in items if isinstance(item, dict) for key in item})


def other_field(content: dict[str, object], usual: str) -> str | None:
    """The field that says whose an item is, by its name and because items share it, of items that lack the usual one;
    None where there is none. A field "id" is none, for every list may number its items."""
    items = [item for some in content.values() if isinstance(some, list) for item in some if isinstance(item, dict)]
    known = [str(item[usual]) for item in items if usual in item]
    for field in (field for field in fields(content) if PATIENT.fullmatch(field) and field.lower() != "id"):
        found = [str(item[field]) for item in items if usual not in item and item.get(field) is not None]
        if len({*found, *known}) < len({*known}) + len(found):
            return field
    return None


def no_field(path: Path, content: dict[str, object], field: str, key: str) -> str:
    """What is said of a field that a ``key`` of the site file names and no item has."""
    return f"{path}: no item has the field '{field}', which '{key}' names{meant(field, fields(content))}"
