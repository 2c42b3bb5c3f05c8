# SPDX-License-Identifier: Apache-2.0
"""MONAI's Decathlon datalist as it stands in its file."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from medpfl.core.errors import DataError, meant, shown
from medpfl.data.declared import Problems


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


def fields(content: dict[str, object]) -> list[str]:
    """The fields that items have, sorted."""
    items = [item for some in content.values() if isinstance(some, list) for item in some]
    return sorted({str(key) for item in items if isinstance(item, dict) for key in item})


def no_field(path: Path, content: dict[str, object], field: str, key: str) -> str:
    """What is said of a field that a ``key`` of the site file names and no item has."""
    return f"{path}: no item has the field '{field}', which '{key}' names{meant(field, fields(content))}"
