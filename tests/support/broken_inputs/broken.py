# SPDX-License-Identifier: Apache-2.0
"""A sound hospital, one change that breaks it, and what the user is told."""

import gzip
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hospitals import change_json, change_yaml
from medpfl.check.check import check_data
from medpfl.core.errors import MedPFLError

Change = Callable[[Path], object]


@dataclass(frozen=True)
class Broken:
    """One way in which an input can be wrong.

    Attributes:
        what: what is wrong, in words.
        names: what the answer must name: a file, a row or a key.
        change: makes a sound hospital's folder wrong.
    """

    what: str
    names: str
    change: Change


@dataclass(frozen=True)
class Group:
    """Inputs of one kind.

    Attributes:
        title: what they are.
        write: writes a sound hospital, or a sound job, into an empty folder.
        problems: what the package says of such a folder; the same as the command that the page names.
    """

    title: str
    write: Callable[[Path], object]
    problems: Callable[[Path], list[str]]
    rows: list[Broken]

    def answers(self, folder: Path) -> list[str]:
        """All that is said of a folder, without the folder's own name."""
        try:
            found = self.problems(folder)
        except MedPFLError as error:
            found = [str(error)]
        return [text.replace(f"{folder}/", "").replace(str(folder), ".") for text in found]


def of_data(folder: Path) -> list[str]:
    """The problems that ``medpfl check-data`` finds."""
    return check_data(folder / "site.yaml", None, None, lambda what, done, count: None).problems


def holding(name: str, content: bytes | str) -> Change:
    """The file holds something else."""
    return lambda folder: (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def without(name: str) -> Change:
    return lambda folder: (folder / name).unlink()


def cut(name: str, keep: float = 0.5) -> Change:
    """The file ends too early."""

    def change(folder: Path) -> None:
        content = (folder / name).read_bytes()
        (folder / name).write_bytes(content[: int(len(content) * keep)])

    return change


def cut_inside(name: str) -> Change:
    """A sound .gz, of content that ends too early."""

    def change(folder: Path) -> None:
        content = gzip.decompress((folder / name).read_bytes())
        (folder / name).write_bytes(gzip.compress(content[:-500]))

    return change


def replaced(name: str, old: str, new: str) -> Change:
    """A text file with one change."""

    def change(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return change


def declared(**values: Any) -> Change:
    """The only dataset is declared otherwise."""
    return lambda folder: change_yaml(
        folder / "site.yaml", lambda site: next(iter(site["datasets"].values())).update(values)
    )


def site(**values: Any) -> Change:
    """The site file has other keys."""
    return lambda folder: change_yaml(folder / "site.yaml", lambda content: content.update(values))


def listed(key: str, number: int, **values: Any) -> Change:
    """An entry of the datalist is another."""
    return lambda folder: change_json(folder / "list.json", lambda lists: lists[key][number].update(values))
