# SPDX-License-Identifier: Apache-2.0
"""Result files that are kept: JSON with one line for each entry, compressed where the name ends in ``.gz``.

Numbers have eight significant digits, which is more than any table or figure shows of them.
"""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from medpfl.core.errors import MedPFLError


def compact(content: Mapping[str, object]) -> str:
    """JSON text: a line for each key, or for each entry of a key that holds a list or a mapping of several."""
    lines = ",\n".join(f"{json.dumps(key)}:{_entries(value)}" for key, value in content.items())
    return f"{{\n{lines}\n}}\n"


def _entries(value: object) -> str:
    if isinstance(value, list) and value and all(isinstance(entry, dict | list) for entry in value):
        return "[\n" + ",\n".join(map(_line, value)) + "\n]"
    if isinstance(value, dict) and value and all(isinstance(entry, dict | list) for entry in value.values()):
        return "{\n" + ",\n".join(f"{json.dumps(key)}:{_line(entry)}" for key, entry in value.items()) + "\n}"
    return _line(value)


def _line(value: object) -> str:
    return json.dumps(_short(value), separators=(",", ":"), ensure_ascii=False)


def _short(value: object) -> object:
    match value:
        case float():
            return float(f"{value:.8g}")
        case list() | tuple():
            return [_short(entry) for entry in value]
        case dict():
            return {key: _short(entry) for key, entry in value.items()}
        case _:
            return value


def read_compact(path: Path) -> dict[str, JsonValue]:
    """The content of a result file, compressed or not.

    Raises:
        MedPFLError: it cannot be read, or is not a JSON object.
    """
    try:
        data = path.read_bytes()
        content = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, ValueError) as error:
        raise MedPFLError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise MedPFLError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content
