# SPDX-License-Identifier: Apache-2.0
"""Prepared cases, kept on disk between runs where the hospital's site file names a folder for them."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, TypeAlias

from pydantic import JsonValue

from medpfl import __version__
from medpfl.core.sources import code_of
from medpfl.data.declared import StorageRule

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 5
"""To be raised whenever cases are prepared otherwise than before, or are kept in another form."""
_FOLDER = "medpfl-prepared"
_KEPT, _PART = ".case", ".part"
_ABANDONED = 3600.0  # seconds after which a file that nobody finished is removed
_DIGEST = hashlib.sha256().digest_size

How = Mapping[str, JsonValue]
"""All that says how a case is prepared, beside its files."""
Tensors: TypeAlias = "dict[str, Tensor]"


class PreparedCases:
    """The cache of one loading of a dataset; several threads and processes may use one folder.

    A file is the SHA-256 of its name and content, and then the content, in safetensors' format. Its name is the SHA-256
    of what the case was prepared from and how. Its time of modification is when it was last used. Whatever goes wrong
    here costs time only: the case is prepared anew.

    Args:
        rule: says the folder, if any, and the most bytes.
        folder: of the site file.
    """

    def __init__(self, rule: StorageRule, folder: Path):
        self._most = int(rule.cache_gb * 2**30)
        self._lock = Lock()
        self._used: set[str] = set()
        """Names of this loading; what it needs itself is not removed for its later cases, or nothing would be left of
        a dataset beyond the bound when it is read again from its start."""
        self._held: int | None = None
        """Bytes in the folder: found when it was last looked through, and added since."""
        self._added = 0
        self._writing = True
        self._folder = Path(folder, rule.cache, _FOLDER).absolute() if rule.cache else None
        if self._folder:
            try:
                _make_private(self._folder)
            except OSError as error:
                self._folder = None
                _tell(error)

    def get(
        self, sources: Sequence[Path], how: How, prepare: Callable[[], Tensors], by: Sequence[type] = ()
    ) -> Tensors:
        """What ``prepare`` gives for these files (or folders of files), from the cache if it is there.

        Args:
            by: classes that prepare; of those of other packages the code counts, too (``code_of``).

        Raises:
            Whatever ``prepare`` raises; of such cases nothing is kept.
        """
        name = _name(sources, how, by) if self._folder else None
        if self._folder is None or name is None:
            return prepare()
        kept = self._read(self._folder / name)
        if kept is None:
            kept = prepare()
            if _name(sources, how, by) == name:  # else a file was changed meanwhile
                self._keep(self._folder / name, kept)
        return kept

    def _read(self, file: Path) -> Tensors | None:
        from safetensors.torch import load

        try:
            with open(file, "rb") as opened:
                told, content = opened.read(_DIGEST), opened.read()
        except OSError:
            return None
        if told != _digest(file.name, content):
            return None
        with suppress(OSError):
            os.utime(file)
        with self._lock:
            self._used.add(file.name)
        return load(content)

    def _keep(self, file: Path, tensors: Tensors) -> None:
        from safetensors.torch import save

        content = save({name: tensor.contiguous() for name, tensor in tensors.items()})
        try:
            if self._has_room(file, _DIGEST + len(content)):
                _write(file, content)
        except OSError as error:
            with self._lock:
                first, self._writing = self._writing, False
            if first:
                _tell(error)

    def _has_room(self, file: Path, size: int) -> bool:
        """Whether a file of so many bytes may be written; what was not used for longest is removed for it."""
        with self._lock:
            if not self._writing or size > self._most:
                return False
            slack = self._most // 16  # others write too; and looking through the folder for each file would take long
            if self._held is None or self._held + size > self._most or self._added > slack:
                self._held, self._added = self._removed(file.parent, self._most - size - slack), 0
                if self._held + size > self._most:
                    self._writing = False
                    return False
            self._held += size
            self._added += size
            self._used.add(file.name)
            return True

    def _removed(self, folder: Path, aim: int) -> int:
        """Remove files until ``aim`` bytes are left, or those of this loading; returns the bytes that are left."""
        found = []
        with os.scandir(folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    facts = entry.stat(follow_symlinks=False)
                    found.append((facts.st_mtime_ns, facts.st_size, entry.name))
        left = sum(size for _, size, _ in found)
        for used, size, name in sorted(found):
            abandoned = name.endswith(_PART) and time.time() - used / 1e9 > _ABANDONED
            if abandoned or (left > aim and name.endswith(_KEPT) and name not in self._used):
                with suppress(FileNotFoundError):
                    os.unlink(folder / name)
                left -= size
        return left


def _name(sources: Sequence[Path], how: How, by: Sequence[type]) -> str | None:
    """Of the file that keeps a case; None where a source cannot be looked at, which ``prepare`` says better, or what
    prepares it has no file that could.

    The sources' bytes are not read: that is half of what preparing a case costs.
    """
    try:
        facts = [(str(path.absolute()), each.st_size, each.st_mtime_ns) for path, each in _looked_at(sources)]
        own = {"own": code} if (code := {name: digest for kind in by for name, digest in _code(kind).items()}) else {}
    except OSError:
        return None
    text = json.dumps({"format": FORMAT, "by": _libraries(), "of": facts, "how": how, **own}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest() + _KEPT


def _looked_at(sources: Sequence[Path]) -> list[tuple[Path, os.stat_result]]:
    files = [file for source in sources for file in (sorted(source.iterdir()) if source.is_dir() else [source])]
    return [(file, file.stat()) for file in files]


_code = cache(code_of)
"""Of a class as it is in this process: of a file that is changed afterwards it does not know."""


@cache
def _libraries() -> list[str]:
    """Versions of what may resample or decode otherwise in its next one; "" of an extra's that is not installed."""
    readers = ("nibabel", "pydicom", "pillow", "SimpleITK", "highdicom", "pyjpegls")
    return [__version__, *map(_version, ("torch", "monai", "numpy", *readers))]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _digest(name: str, content: bytes) -> bytes:
    digest = hashlib.sha256(name.encode())
    digest.update(content)
    return digest.digest()


def _write(file: Path, content: bytes) -> None:
    """A reader sees the whole file or none; nobody else on the machine may read it."""
    descriptor, temporary = tempfile.mkstemp(suffix=_PART, dir=file.parent)  # with mode 600
    try:
        with open(descriptor, "wb") as opened:
            opened.write(_digest(file.name, content))
            opened.write(content)
        os.replace(temporary, file)
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _make_private(folder: Path) -> None:
    """The folder exists and only this user may look into it.

    Raises:
        OSError: it cannot be made, or is another user's, who could change what is trained on.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.geteuid():
        raise PermissionError(0, "the folder is not this user's own")
    folder.chmod(0o700)


def _tell(error: OSError) -> None:
    """Into the hospital's own log, and even there without the folder's name."""
    logging.getLogger(__name__).warning(
        "prepared cases are not kept in what the site file names as storage.cache: %s; going on without",
        error.strerror,
    )
