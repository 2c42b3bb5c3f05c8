# SPDX-License-Identifier: Apache-2.0
"""Writes docs/cli.md, the reference of the command ``medpfl``, from the command: ``python docs/.site/cli.py``."""

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "cli.md"
BEGINNING = """# The command `medpfl`

Every verb with its arguments and options, as `medpfl VERB --help` prints them. This page is made from the command
([how](../CONTRIBUTING.md#the-documentation-site)). Who needs which verb when is told in [running jobs](running.md) and
in the pages for the [lead](roles/lead.md), [hospital IT](roles/hospital-it.md) and the [data
steward](roles/data-steward.md).

"""
SECTION = re.compile(r"^#+ `medpfl ([^`]+)`\n\n(.+?)\n\n", re.MULTILINE | re.DOTALL)
LISTED = re.compile(r"^\* `([\w-]+)`: .*$", re.MULTILINE)


def page() -> str:
    """The page as it should be: what Typer's own command writes, with each verb's first sentence whole in the lists."""
    command = [sys.executable, "-m", "typer", "medpfl.cli", "utils", "docs", "--name", "medpfl"]
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    text = done.stdout.replace("&#x27;", "'")
    _, usage, text = text.partition("**Usage**")
    first = {verb: told.splitlines()[0] for verb, told in SECTION.findall(text)}
    parts = re.split(r"(?=^#+ `medpfl )", text, flags=re.MULTILINE)
    made = []
    for part in parts:
        heading = re.match(r"#+ `medpfl ([^`]+)`", part)
        above = f"{heading[1]} " if heading else ""
        made.append(LISTED.sub(lambda line, above=above: _entry(line, above, first), part))
    return f"{BEGINNING}{usage}{''.join(made).rstrip()}\n"


def _entry(line: re.Match[str], above: str, first: dict[str, str]) -> str:
    """A verb's line in a list; other lines stay as they are."""
    return f"* `{line[1]}`: {first[above + line[1]]}" if above + line[1] in first else line[0]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
