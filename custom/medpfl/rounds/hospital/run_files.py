# SPDX-License-Identifier: Apache-2.0
"""What a hospital keeps of a run: numbered files of several kinds in a folder.

In a federation every file is written at once, for a hospital's process may end at any time and the others go on. Where
all hospitals and the server are one process, which ends as one, they are only needed when that process begins anew: it
may keep them in memory and write them now and then, all hospitals' and the server's checkpoint of the same round.
"""

import time
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor

from medpfl import store


class RunFiles:
    """Files ``<kind>-<round>.safetensors`` in the folder of a run."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, kind: str, number: int) -> Path:
        return store.path_of(self.folder, kind, number)

    def save(
        self,
        kind: str,
        number: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, object],
        synced: bool = True,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        """See ``store.save``. ``given``: further tensors, to which nobody writes any more."""
        store.save(self.path(kind, number), {**tensors, **(given or {})}, meta, synced)

    def sync(self, kind: str, number: int) -> None:
        """See ``store.sync``."""
        store.sync(self.path(kind, number))

    def has(self, kind: str, number: int) -> bool:
        return self.path(kind, number).exists()

    def size(self, kind: str, number: int) -> int:
        """Bytes, about."""
        return self.path(kind, number).stat().st_size

    def read(self, kind: str, number: int) -> dict[str, Tensor]:
        """A file's tensors, which are not to be written to; see ``store.read``."""
        return store.read(self.path(kind, number))[0]

    def held(self, kind: str, number: int) -> Mapping[str, Tensor]:
        """A file's tensors, which are not to be written to, where they are in memory; else none."""
        return {}

    def newest(self, kind: str, last: int) -> tuple[store.Kept | None, list[int]]:
        """See ``store.newest``."""
        return store.newest(self.folder, kind, last)

    def remove(self, kind: str, number: int) -> None:
        """It may be missing."""
        self.path(kind, number).unlink(missing_ok=True)

    def discard(self, kind: str, kept: Collection[int] = ()) -> None:
        """See ``store.discard``."""
        store.discard(self.folder, kind, kept)

    def prune(self, kind: str, last: int, keep: int, more: Collection[int]) -> None:
        """See ``store.prune``."""
        store.prune(self.folder, kind, last, keep, more)

    def forget(self, kind: str) -> None:
        """A new run begins in this folder."""
        store.discard(self.folder, kind)


@dataclass(frozen=True)
class _Held:
    tensors: Mapping[str, Tensor]
    meta: Mapping[str, object]

    @property
    def size(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors.values())


class HeldFiles(RunFiles):
    """The same in memory, since they were last written; what is on the disk stays as it is until then.

    Of a kind that is pruned the newest is held and what is asked for besides: a process does not go back in the rounds
    that it is in. The others are for one that begins anew, and lie on the disk.
    """

    def __init__(self, folder: Path):
        super().__init__(folder)
        self._held: dict[tuple[str, int], _Held] = {}
        self._gone: dict[tuple[str | int, ...], Callable[[], None]] = {}
        """What is to be removed from the disk; of the same kind, what was said last."""
        self._newest: dict[str, list[int]] = {}
        """Of each kind that is pruned the rounds that were the newest when it was written, or taken up: the server's
        checkpoints go with these. Files of best rounds, which lie between them, do not count."""

    def save(
        self,
        kind: str,
        number: int,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, object],
        synced: bool = True,
        given: Mapping[str, Tensor] | None = None,
    ) -> None:
        own = {key: tensor.detach().cpu().clone() for key, tensor in tensors.items()}
        self._held[kind, number] = _Held({**own, **(given or {})}, dict(meta))

    def sync(self, kind: str, number: int) -> None:
        if (kind, number) not in self._held:
            super().sync(kind, number)

    def has(self, kind: str, number: int) -> bool:
        return (kind, number) in self._held or super().has(kind, number)

    def size(self, kind: str, number: int) -> int:
        held = self._held.get((kind, number))
        return held.size if held else super().size(kind, number)

    def read(self, kind: str, number: int) -> dict[str, Tensor]:
        held = self._held.get((kind, number))
        return dict(held.tensors) if held else super().read(kind, number)

    def held(self, kind: str, number: int) -> Mapping[str, Tensor]:
        held = self._held.get((kind, number))
        return held.tensors if held else {}

    def newest(self, kind: str, last: int) -> tuple[store.Kept | None, list[int]]:
        there = [number for of, number in self._held if of == kind and number <= last]
        if not there:
            found, damaged = super().newest(kind, last)
            self._newest[kind] = [found.number] if found else []
            return found, damaged
        held = self._held[kind, max(there)]
        tensors = {key: tensor.clone() for key, tensor in held.tensors.items()}  # optimisers go on with them
        return store.Kept(max(there), tensors, cast(store.Meta, held.meta)), []

    def remove(self, kind: str, number: int) -> None:
        if self._held.pop((kind, number), None) is None:
            self._gone[kind, number] = partial(super().remove, kind, number)

    def discard(self, kind: str, kept: Collection[int] = ()) -> None:
        self._drop(kind, set(kept))
        self._gone[kind, "discarded"] = partial(super().discard, kind, set(kept))

    def prune(self, kind: str, last: int, keep: int, more: Collection[int]) -> None:
        self._drop(kind, {last, *more})
        self._gone[kind, "pruned"] = partial(self._prune, kind, last, keep, set(more))

    def _prune(self, kind: str, last: int, keep: int, more: Collection[int]) -> None:
        self._newest[kind] = [*(number for number in self._newest.get(kind, []) if number < last), last][-keep:]
        super().discard(kind, {*self._newest[kind], *more})

    def _drop(self, kind: str, kept: Collection[int]) -> None:
        for key in [key for key in self._held if key[0] == kind and key[1] not in kept]:
            del self._held[key]

    def forget(self, kind: str) -> None:
        self._drop(kind, ())
        self._newest.pop(kind, None)
        super().forget(kind)

    @property
    def bytes(self) -> int:
        """That are held; a tensor counts once."""
        held = {id(tensor): tensor for entry in self._held.values() for tensor in entry.tensors.values()}
        return sum(tensor.numel() * tensor.element_size() for tensor in held.values())

    def write(self) -> list[Path]:
        """Write all that is held and remove what is gone; returns the files, which nobody has waited for yet."""
        written = []
        for (kind, number), held in self._held.items():
            super().save(kind, number, held.tensors, held.meta, synced=False)
            written.append(self.path(kind, number))
        for remove in self._gone.values():
            remove()
        self._held, self._gone = {}, {}
        return written


class Later:
    """When the files of all hospitals of this process, and the server's checkpoint, are written.

    Args:
        every: seconds of hospitals' work that may be lost when this process is killed, about; 0: write each round.
        room: bytes that may be held in memory.
    """

    SHARE = 20
    """Writing takes at most one part in so many of the time."""
    SPEED = 100e6
    """Bytes a second that are written, checksums included, of which nothing is known yet: a slow disk's."""
    AT_ONCE = 8
    """Files that are waited for side by side: the file system brings them to the disk together."""

    def __init__(self, every: float, room: int):
        self._every, self._room = every, room
        self._files: list[HeldFiles] = []
        self._wanted = 0
        self._worked, self._took = 0.0, 0.0

    def of(self, folder: Path) -> RunFiles:
        """A hospital's files of a run."""
        if self._wanted > self._room:
            return RunFiles(folder)
        self._files.append(HeldFiles(folder))
        return self._files[-1]

    def want(self, models: int, private: int) -> None:
        """A hospital has networks of so many bytes, so many of which are private: of these there are those before
        training, those of the best rounds and those after it, and beside them the optimisers' state."""
        self._wanted += 3 * private + 2 * models

    def worked(self, seconds: float) -> None:
        """So long the hospitals were at work."""
        self._worked += seconds

    @property
    def due(self) -> bool:
        """Whether all are to be written now, at the end of a round."""
        if not self._every or self._wanted > self._room:
            return True
        takes = max(self._took, sum(files.bytes for files in self._files) / self.SPEED)
        return self._worked >= max(self._every, self.SHARE * takes)

    def write(self) -> None:
        """Bring all to the disk.

        Raises:
            MedPFLError: it cannot be written.
        """
        started = time.monotonic()
        written = [path for files in self._files for path in files.write()]
        with ThreadPoolExecutor(self.AT_ONCE) as pool:
            list(pool.map(store.sync, written))
        self._worked, self._took = 0.0, time.monotonic() - started
