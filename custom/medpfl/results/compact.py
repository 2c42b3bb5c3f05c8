# SPDX-License-Identifier: Apache-2.0
"""Result files that are kept: JSON with one line for each entry, compressed if the name ends in ``.xz`` or ``.gz``."""

import gzip
import json
import lzma
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
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def read_compact(path: Path) -> dict[str, JsonValue]:
    """The content of a result file, compressed or not.

    Raises:
        MedPFLError: it cannot be read, or is not a JSON object.
    """
    try:
        data = path.read_bytes()
        match path.suffix:
            case ".xz":
                data = lzma.decompress(data)
            case ".gz":
                data = gzip.decompress(data)
        content = json.loads(data)
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error.strerror or error}") from error
    except (EOFError, ValueError, lzma.LZMAError) as error:
        raise MedPFLError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise MedPFLError(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content
