# SPDX-License-Identifier: Apache-2.0
"""State on disk: one safetensors file with tensors and JSON, written atomically; nothing is ever unpickled.

Every file holds two checksums, of its tensors and of what it says of them. A file whose content is not what was written
is never read: a disk, a copy or a full file system may change it without a word.
"""

import errno
import hashlib
import json
import os
import re
from collections.abc import Collection, Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from torch import Tensor

from medpfl.core import safetensors_file
from medpfl.core.errors import MedPFLError

_META = "medpfl"
"""The only entry of the file's metadata, for safetensors writes several in any order: the checksum of the rest, that of
the tensors, and the JSON, with a space between each two."""
FORMAT = 2
_UNFINISHED = re.compile(r"\..+\.\d+")


class DamagedFile(MedPFLError):
    """A file is not what was written: truncated, empty, or changed since."""


Meta = dict[str, JsonValue]
"""What a file says beside its tensors."""


def save(path: Path, tensors: Mapping[str, Tensor], meta: Mapping[str, object], synced: bool = True) -> None:
    """Write tensors and a JSON-able ``meta``; a reader sees the old file or the new one, never half of it.

    Args:
        synced: whether its content outlives a power failure from now on; else it outlives this process only, until
            ``sync``. A power failure may set its name back to the file before, until the folder is synced.

    Raises:
        MedPFLError: the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        text, told = json.dumps({"format": FORMAT, **meta}), fingerprint(tensors)
        safetensors_file.write(temporary, tensors, {_META: f"{_sum(text, told)} {told} {text}"}, synced)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        # Of the place nothing is told outside; that its disk is full, say, is what the server's events need.
        raise MedPFLError(f"cannot write {path}: {error}", f"a file could not be written: {_reason(error)}") from error


def sweep(folder: Path) -> None:
    """Remove what processes that were killed while they wrote, text files too, have left in a folder (".NAME.PID"), and
    in those within. Nobody else may be writing there now."""
    for path in folder.rglob(".*"):
        if _UNFINISHED.fullmatch(path.name):
            path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Bring to the disk a file that was saved without, or which files a folder has.

    Raises:
        MedPFLError: it cannot be written.
    """
    try:
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        if error.errno == errno.EINVAL and path.is_dir():  # a file system that does so for files alone
            return
        raise MedPFLError(f"cannot write {path}: {error}", f"a file could not be written: {_reason(error)}") from error


def _reason(error: OSError) -> str:
    """The operating system's words."""
    return os.strerror(error.errno) if error.errno else "unknown"


def _sum(text: str, tensors: str) -> str:
    return hashlib.sha256(f"{text} {tensors}".encode()).hexdigest()


def read_meta(path: Path) -> Meta:
    """The ``meta`` that ``save`` wrote, without reading the tensors.

    Raises:
        DamagedFile: it is not what was written.
        MedPFLError: the file is missing, or none of this format.
    """
    with _opened(path) as file:
        return _meta_of(file, path)


def read(path: Path) -> tuple[dict[str, Tensor], Meta]:
    """What ``save`` wrote.

    Raises:
        DamagedFile: it is not what was written.
        MedPFLError: the file is missing, or none of this format.
    """
    with _opened(path) as file:
        meta = _meta_of(file, path)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if fingerprint(tensors) != file.metadata()[_META].split(" ")[1]:
            raise _damaged(path, "its tensors are not those that were written")
        return tensors, meta


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error}") from error
    except (SafetensorError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error


def _meta_of(file: Any, path: Path) -> Meta:
    given: dict[str, str] = file.metadata() or {}
    text = given.get(_META, "{}")
    if not text.startswith("{"):  # one that does is of before
        told, tensors, text = (*text.split(" ", 2), "", "")[:3]
        if told != _sum(text, tensors):
            raise _damaged(path, "what it says of itself is not what was written")
    elif any(re.match("[0-9a-f]{64} ", other) for other in given.values()):  # the entry's name is not what it was
        raise _damaged(path, "what it says of itself is not what was written")
    meta: Any = json.loads(text)
    if not isinstance(meta, dict) or type(meta.get("format")) is not int:
        raise MedPFLError(f"{path}: not a file of MedPFL's")
    if meta["format"] != FORMAT:
        raise MedPFLError(f"{path}: expected format {FORMAT}, got {meta['format']}: made by another version of MedPFL")
    return meta


def _damaged(path: Path, why: str) -> DamagedFile:
    return DamagedFile(f"cannot read {path}: it is damaged: {' '.join(why.split())[:300]}")


def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, whatever their order."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in safetensors_file.buffers(tensor):
            digest.update(part)
    return digest.hexdigest()


def file_digest(path: Path) -> str:
    """SHA-256 of a file.

    Raises:
        MedPFLError: it cannot be read.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise MedPFLError(f"cannot read {path}: {error.strerror}") from error


def numbered(folder: Path, kind: str) -> dict[int, Path]:
    """Files ``<kind>-<round>.safetensors`` in a folder, by round."""
    pattern = re.compile(rf"{re.escape(kind)}-(\d+)\.safetensors")
    found = {}
    for path in folder.glob(f"{kind}-*.safetensors"):
        if match := pattern.fullmatch(path.name):
            found[int(match[1])] = path
    return found


def path_of(folder: Path, kind: str, round_number: int) -> Path:
    """Where the file ``kind`` of a round lies."""
    return folder / f"{kind}-{round_number:05d}.safetensors"


@dataclass(frozen=True)
class Kept:
    """A numbered file as it was read.

    Attributes:
        number: its round.
    """

    number: int
    tensors: dict[str, Tensor]
    meta: Meta


def newest(folder: Path, kind: str, last: int | None = None) -> tuple[Kept | None, list[int]]:
    """The newest intact file of a kind, and the rounds of the damaged ones that are newer, newest first.

    Args:
        last: files of later rounds do not count; None: all do.

    Raises:
        MedPFLError: a file cannot be read for another reason than damage.
    """
    damaged: list[int] = []
    for number, path in sorted(numbered(folder, kind).items(), reverse=True):
        if last is not None and number > last:
            continue
        try:
            return Kept(number, *read(path)), damaged
        except DamagedFile:
            damaged.append(number)
    return None, damaged


def discard(folder: Path, kind: str, kept: Container[int | None] = ()) -> None:
    """Remove the files of a kind whose rounds are not among ``kept``."""
    for number, path in numbered(folder, kind).items():
        if number not in kept:
            path.unlink()


def prune(folder: Path, kind: str, last: int, keep: int, more: Collection[int] = ()) -> None:
    """Remove the files of rounds after ``last``, and all but the newest ``keep`` of the others and ``more``."""
    rounds = [number for number in sorted(numbered(folder, kind)) if number <= last]
    discard(folder, kind, {*rounds[-keep:], *more})
