# SPDX-License-Identifier: Apache-2.0
"""All broken inputs, and the page of the answers to them."""

import shutil
from pathlib import Path

from broken_inputs import dicom_labels, images, jobs, sequences, tables, volumes
from broken_inputs.broken import Broken, Group

GROUPS: list[Group] = [
    *tables.GROUPS,
    *images.GROUPS,
    *volumes.GROUPS,
    *dicom_labels.GROUPS,
    *sequences.GROUPS,
    *jobs.GROUPS,
]


def sound(group: Group, scratch: Path) -> Path:
    """A sound hospital of a group, written once in ``scratch``."""
    folder = scratch / str(GROUPS.index(group))
    if not folder.exists():
        folder.mkdir()
        group.write(folder)
    return folder


def told(group: Group, row: Broken, scratch: Path) -> list[str]:
    """What is said of a broken hospital: a copy of the sound one with the row's change."""
    folder = scratch / "hospital"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(sound(group, scratch), folder)
    row.change(folder)
    return group.answers(folder)


INTRODUCTION = """# Broken inputs and the answers to them

This page lists {count} mistakes, in site files, data, schemas and jobs, with the sentence that MedPFL answers to each.
Every sentence names the file, the row or the key, and says what was expected and what is there. Use the page to find
out whether a message that you got means what you think, or what a check finds before a hospital joins.

Two commands give these answers before anything is trained. `medpfl check-data SITE_FILE` looks at a hospital's data,
and with `--schema SCHEMA` also at what the hospitals have agreed on. `medpfl check-job JOB` looks at a job. When such
a mistake first shows while a job runs, the job ends at this hospital with the same sentence; a sentence that may name
the hospital's files stays in the hospital's own log. Where the same mistake occurs many times, with other files or
numbers, it is told once, with the number of times and three examples.

The page is written by `./tests/broken-inputs`, which makes each of these files, breaks it and asks. A test does the
same, and fails where an answer is not the one on this page.
"""


def page(scratch: Path) -> str:
    """The page, from asking anew."""
    parts = [INTRODUCTION.format(count=sum(len(group.rows) for group in GROUPS))]
    for group in GROUPS:
        lines = [line(row.what, told(group, row, scratch)) for row in group.rows]
        parts.append("\n".join([f"## {group.title}\n", "| what is wrong | the answer |", "|---|---|", *lines]) + "\n")
    return "\n".join(parts)


def line(what: str, answers: list[str]) -> str:
    """A row of the page's tables."""
    text = "<br>".join(answers).replace("|", "\\|")
    return f"| {what} | ``{text}`` |"
