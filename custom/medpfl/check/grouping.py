# SPDX-License-Identifier: Apache-2.0
"""Problems with one cause, told once: the first in full, the number of the others and where three of them are."""

import re
from collections.abc import Sequence

EXAMPLES = 3
_FILE = re.compile(r"[^\s'(),;:]*\.[A-Za-z]\w*(\.gz)?")
_NUMBER = re.compile(r"\d+")
_PLACE = re.compile(r"[^\s:]+(?::\d+|: \w+\[\d+\])?(?=: )")
_LISTED = re.compile(r"\(listed as (.+)\)$")


def grouped(problems: Sequence[str]) -> list[str]:
    """The problems, in order; those that differ in their files and numbers only are one sentence."""
    alike: dict[str, list[str]] = {}
    for problem in problems:
        alike.setdefault(_NUMBER.sub("0", _FILE.sub("file", problem)), []).append(problem)
    return [_told(members) for members in alike.values()]


def _told(members: Sequence[str]) -> str:
    first, others = members[0], members[1:]
    if not others:
        return first
    places = [_place(member) for member in members]
    if len(set(places)) == 1:  # one file, many cases of it
        places = [
            found[1] if (found := _LISTED.search(member)) else place
            for member, place in zip(members, places, strict=True)
        ]
    named = list(dict.fromkeys(place for place in places[1:] if place and place != places[0]))
    examples = ", ".join(named[:EXAMPLES]) + (", ..." if len(named) > EXAMPLES else "")
    return f"{first}; {len(others)} more like it{f': {examples}' if examples else ''}"


def _place(problem: str) -> str:
    found = _PLACE.match(problem)
    return found[0] if found else ""
