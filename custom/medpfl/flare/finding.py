# SPDX-License-Identifier: Apache-2.0
"""What a check of a startup kit found."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Finding:
    """One line: ``check`` names what was looked at; ``mend`` is a command or a sentence, for problems always."""

    check: str
    status: Literal["ok", "note", "problem"]
    text: str
    mend: str = ""


def ok(check: str, text: str) -> Finding:
    """Nothing to do."""
    return Finding(check, "ok", text)


def note(check: str, text: str, mend: str = "") -> Finding:
    """Worth knowing; the site runs."""
    return Finding(check, "note", text, mend)


def problem(check: str, text: str, mend: str) -> Finding:
    """Keeps the site from running, or from running safely."""
    return Finding(check, "problem", text, mend)
