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

This page shows what MedPFL says to {count} inputs that are wrong, each in one way: the sentence names the file, the
row or the key, and says what was expected and what is there. Look here to see whether a message that you got means
what you think, or what a check finds before a hospital joins. Problems with data are found by `medpfl check-data
SITE_FILE` (with `--schema SCHEMA` for the schemas) before anything is trained; problems with jobs by `medpfl check-
job JOB`. The same sentence ends a job at a hospital; what may name its files stays in its own log. Problems that
differ only in their files and numbers are one sentence, with their number and three examples.

The page is written by `./tests/broken-inputs`, which makes each of these files, breaks it and asks. A test does the
same and fails where an answer is another one than here.
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
