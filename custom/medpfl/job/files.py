# SPDX-License-Identifier: Apache-2.0
"""A job's JSON without surprises: no key twice, no NaN or infinity, no path, URL or variable, no link beside it."""

import json
import math
import re
from collections.abc import Collection
from pathlib import Path

from pydantic import JsonValue

from medpfl.core.errors import ConfigError, meant

Object = dict[str, JsonValue]
"""A JSON object."""

_UNIT = re.compile(r"(?!.*(?://|\.\.))[^/\\~{}][^\\~{}]{0,19}")
"""What a component's ``unit`` may be, which is only ever shown: "mmol/L", "mL/min/1.73 m²"."""


def read_object(path: Path, others: Collection[str] = ()) -> Object:
    """The object that a JSON file holds; ``others``: its keys of which MedPFL reads nothing, and whose values may hold
    what looks like a path.

    Raises:
        ConfigError: it cannot be read, is no such file, or names a path, URL or variable.
    """
    try:
        content: JsonValue = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a JSON object, got {type(content).__name__}")
    _no_paths({key: value for key, value in content.items() if key not in others}, path.name)
    return content


def no_links(folder: Path) -> None:
    """Raises ConfigError if there is a symbolic link in the folder."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ConfigError(f"{path} is a symbolic link; FLARE refuses or silently drops links in job folders")


def object_of(content: JsonValue, where: str, known: set[str]) -> Object:
    """An object with no other keys than the known ones.

    Raises:
        ConfigError: naming the place, and the key.
    """
    if not isinstance(content, dict):
        raise ConfigError(f"{where}: expected a JSON object, got {content!r}")
    for key in content:
        if key not in known:
            raise ConfigError(f"{where}: unknown key '{key}'; known are: {', '.join(sorted(known))}{meant(key, known)}")
    return content


def list_of(content: Object, key: str, where: str) -> list[JsonValue]:
    """The list under a key; empty if there is none.

    Raises:
        ConfigError: it is no list.
    """
    value = content.get(key, [])
    if not isinstance(value, list):
        raise ConfigError(f"{where}: '{key}' must be a list, got {value!r}")
    return value


def _unique_keys(pairs: list[tuple[str, JsonValue]]) -> Object:
    found: Object = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key '{key}' is there twice")
        found[key] = value
    return found


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _finite(text: str) -> float:
    """Python reads 1e999 as infinity."""
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text[:30]} is larger than any number here")
    return number


def _no_paths(value: JsonValue, where: str) -> None:
    """A job names declared datasets; a file path or URL in it is refused, wherever it stands. Units have slashes."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _no_paths(key, where)
            if not (key == "unit" and isinstance(inner, str) and _UNIT.fullmatch(inner)):
                _no_paths(inner, f"{where}: {key}")
    elif isinstance(value, list):
        for inner in value:
            _no_paths(inner, where)
    elif isinstance(value, str) and ("/" in value or "\\" in value or value.startswith("~") or "{" in value):
        raise ConfigError(
            f"{where}: a job may name what the site declares (datasets, checkpoints), never a path, URL or variable; "
            f"got {value!r}"
        )
