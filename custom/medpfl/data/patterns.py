# SPDX-License-Identifier: Apache-2.0
"""Files by pattern: a glob whose placeholders, such as {patient}, name parts of the path."""

import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field

from medpfl.data.declared import Problems


def _a_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _usable(patterns: list[str]) -> list[str]:
    for pattern in patterns:
        if not pattern or re.search(r"[{}]", _PLACEHOLDER.sub("", pattern)):
            raise ValueError(f"expected a pattern such as images/{{class}}/*.png, got '{pattern}'")
    return patterns


Patterns = Annotated[list[str], BeforeValidator(_a_list), Field(min_length=1), AfterValidator(_usable)]
_PLACEHOLDER = re.compile(r"\{([A-Za-z]\w*)\}")
_TOKEN = re.compile(r"\*\*/|\*+|\?|\[[!]?\]?[^]]*\]|\{\w+\}")


@dataclass(frozen=True)
class Found:
    """A file. ``name``: its path relative to the site file; ``fields``: what stands for the placeholders."""

    path: Path
    name: str
    fields: dict[str, str]


def placeholders(patterns: Sequence[str]) -> set[str]:
    """The placeholders that all patterns have."""
    return set.intersection(*(set(_PLACEHOLDER.findall(pattern)) for pattern in patterns))


def find_files(folder: Path, patterns: Sequence[str], problems: Problems) -> list[Found]:
    """All files that a pattern matches, each once, pattern by pattern and sorted by name; a pattern that is the name of
    a file means that file alone."""
    found: dict[str, Found] = {}
    for pattern in patterns:
        pattern = pattern.removeprefix("./")
        regex = _regex(pattern)
        if (folder / pattern).is_file():
            found.setdefault(pattern, Found(folder / pattern, pattern, {}))
            continue
        names = glob.glob(_PLACEHOLDER.sub("*", pattern), root_dir=folder, recursive=True)
        fits = [(name, fit) for name in sorted(names) if (fit := regex.fullmatch(name)) and (folder / name).is_file()]
        if not fits:
            problems.add(f"{folder / pattern}: there is no such file")
        for name, fit in fits:
            found.setdefault(name, Found(folder / name, name, fit.groupdict()))
    return list(found.values())


def _regex(pattern: str) -> re.Pattern[str]:
    parts, at, seen = [], 0, set[str]()
    for token in _TOKEN.finditer(pattern):
        text = token.group()
        parts.append(re.escape(pattern[at : token.start()]))
        at = token.end()
        if text.startswith("{"):
            name = text[1:-1]
            parts.append(f"(?P={name})" if name in seen else f"(?P<{name}>[^/]*)")
            seen.add(name)
        elif text.startswith("["):
            inside = text[1:-1].replace("\\", r"\\")
            parts.append(f"[^{inside[1:]}]" if inside.startswith("!") else f"[{inside}]")
        else:
            parts.append({"**/": "(?:.*/)?", "?": "[^/]", "*": "[^/]*"}.get(text, ".*"))
    return re.compile("".join(parts) + re.escape(pattern[at:]), re.DOTALL)
