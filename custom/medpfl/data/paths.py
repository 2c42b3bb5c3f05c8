# SPDX-License-Identifier: Apache-2.0
"""Which texts of a declared dataset are paths, whatever its kind (those under the keys datalist, files and file), and
which files of a folder are somebody's own."""

import re
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

_KEYS = ("datalist", "files", "file")
_PATTERN = re.compile(r"[*?[{]")


def map_paths(declared: Any, change: Callable[[str], str], named: bool = False) -> Any:
    """The declaration (mappings, lists and plain values) with every path changed."""
    if isinstance(declared, dict):
        return {key: map_paths(value, change, key in _KEYS) for key, value in declared.items()}
    if isinstance(declared, list):
        return [map_paths(value, change, named) for value in declared]
    return change(declared) if named and isinstance(declared, str) else declared


def paths_of(declared: Any) -> list[str]:
    """All paths of a declaration, in their order."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    map_paths(declared, keep)
    return found


def split_pattern(text: str) -> tuple[str, str]:
    """A path with a pattern as the folder that is fixed, and the rest: "images/*/a.png" is ("images", "*/a.png")."""
    parts = PurePath(text).parts
    fixed = next((number for number, part in enumerate(parts) if _PATTERN.search(part)), len(parts))
    return str(PurePath(*parts[:fixed])), "/".join(parts[fixed:])


def seen_below(folder: Path) -> Iterator[Path]:
    """Files and folders below a folder, but hidden ones and what is in these: Macs put one beside every file that they
    copy or pack (._scan.nii.gz), notebooks keep older states of files in .ipynb_checkpoints."""
    return (path for path in folder.rglob("*") if not any(part[0] == "." for part in path.relative_to(folder).parts))


def seen_in(folder: Path) -> list[Path]:
    """What lies in a folder, sorted, but hidden files and folders."""
    return sorted(path for path in folder.iterdir() if path.name[0] != ".")
