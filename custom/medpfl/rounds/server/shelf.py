# SPDX-License-Identifier: Apache-2.0
"""Where the server keeps the hospitals' models: in memory where they fit, else in files that are mapped into memory.

What is mapped is read, checked and mixed by the same code, so nothing else depends on where a model lies. A file holds
what one hospital sent in one message. It is mixed in place once, after which it is written no more: the checkpoints
name these files and hold no models of their own.
"""

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from medpfl.core import safetensors_file
from medpfl.core.errors import MedPFLError, RefusedUpdate
from medpfl.core.mapped import give_back, is_mapped, release
from medpfl.core.mixing import State
from medpfl.rounds.memory import WANTED, budget
from medpfl.rounds.messages import Slots, byte_count, flatten, unflatten
from medpfl.store import DamagedFile, fingerprint


class Shelf:
    """The files of a run.

    Args:
        hospitals: how many there are.
        scratch: folder for what comes before the run has a folder; those files go when nobody holds their tensors.

    Attributes:
        copies: how many there are of every hospital's model: what it was sent last, what it sends, and more
            where a component remembers it.
        on_disk: whether models lie in files; so it is from the first message on that does not fit so often.
    """

    def __init__(self, hospitals: int, scratch: Path):
        self.on_disk, self.copies = False, 2
        self._hospitals, self._scratch = hospitals, scratch
        self._folder: Path | None = None
        self._serial = 0
        self._names: dict[int, str] = {}
        self._digests: dict[str, str] = {}
        self._budget = budget()
        self._log = logging.getLogger(__name__)

    def open(self, folder: Path) -> None:
        """The run's folder is known now; what an interrupted run left there is kept until ``forget``."""
        self._folder = folder
        self._serial = max(
            (int(path.stem) for path in folder.glob("*.safetensors") if path.stem.isdecimal()), default=0
        )

    def take(self, slots: Slots) -> Slots:
        """The same tensors, where they are to lie; those that were given are not held.

        Raises:
            RefusedUpdate: a value is of a type that no file holds.
            MedPFLError: the disk is full, or cannot be written.
        """
        size = byte_count(slots)
        if not self.on_disk and size * self._hospitals * self.copies > self._budget:
            self.on_disk = True
            self._log.info(
                "the models of %d hospitals, %d MiB each, lie in files: models may take %d MiB of memory here (%s)",
                self._hospitals, -(-size // 2**20), self._budget // 2**20, WANTED,
            )  # fmt: skip
        if not (self.on_disk and size):
            return slots
        for name, tensor in flatten(slots).items():
            if not safetensors_file.has_type(tensor):
                raise RefusedUpdate(f"entry '{name}' is of {tensor.dtype}, which is no type of a model's weights")
        give_back()  # of the answers before, which were as large
        return self._written(slots)

    def begin_mixing(self) -> None:
        """All answers are there, and lie where they are to lie."""
        if self.on_disk:
            give_back()

    def settle(self, states: Sequence[State]) -> list[dict[str, Tensor]]:
        """K mixed states where they are to lie; states that are one stay one."""
        if not self.on_disk:
            return [dict(state) for state in states]
        found: dict[int, dict[str, Tensor]] = {}
        for state in states:
            if id(state) not in found:
                lies = all(map(is_mapped, state.values())) and self._file(state) is not None
                found[id(state)] = dict(state) if lies or not state else self._written({"": dict(state)})[""]
        release(tensor for state in found.values() for tensor in state.values())
        return [found[id(state)] for state in states]

    def copy(self, state: State) -> dict[str, Tensor]:
        """A copy that may be written to."""
        if self.on_disk and state:
            return self._written({"": dict(state)})[""]
        return {key: tensor.clone() for key, tensor in state.items()}

    def _written(self, slots: Slots) -> Slots:
        folder = self._folder or self._scratch
        self._serial += 1
        path = folder / (f"{self._serial:08d}.safetensors" if self._folder else f".{os.getpid()}-{self._serial}")
        tensors = flatten(slots)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            safetensors_file.write(path, tensors, {}, synced=False)
            found = safetensors_file.open_mapped(path)
            if self._folder is None:
                path.unlink()
        except OSError as error:
            with suppress(OSError):  # what is there of it would fill the disk
                path.unlink(missing_ok=True)
            raise MedPFLError(
                f"cannot keep a hospital's models in {path}: {error.strerror}",
                f"models could not be kept: {error.strerror}",
            ) from error
        release(tensors.values())
        self._name(found, path)
        return unflatten(found)

    def _name(self, tensors: Mapping[str, Tensor], path: Path) -> None:
        place = next((tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor.numel()), 0)
        self._names.pop(place, None)  # of a file that is gone
        if self._folder is not None:
            self._names[place] = path.name

    def _file(self, state: State) -> str | None:
        """The name of the run's file that a state lies in; None: it lies in none."""
        places = {tensor.untyped_storage().data_ptr() for tensor in state.values() if tensor.numel()}
        return self._names.get(next(iter(places))) if len(places) == 1 else None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The number of the run's newest file."""
        return self._serial

    def names(self, stack: Mapping[str, Sequence[State]]) -> dict[str, list[str]]:
        """Slot to the names of the K files that the stack lies in; "" where a copy holds no value: of what is
        encrypted, one that nobody has mixed yet."""
        found: dict[str, list[str]] = {}
        for slot, states in stack.items():
            files = [self._file(state) if any(t.numel() for t in state.values()) else "" for state in states]
            found[slot] = [name for name in files if name is not None]
            assert len(found[slot]) == len(files), f"a model of slot '{slot}' lies in no file"
        return found

    def seal(self, names: Mapping[str, Sequence[str]]) -> dict[str, str]:
        """Bring files to the disk, which are written no more: file to its tensors' SHA-256.

        Args:
            names: slot to its files.

        Raises:
            MedPFLError: it cannot be written.
        """
        assert self._folder is not None
        used = sorted({name for files in names.values() for name in files if name})
        for name in used:
            if name in self._digests:
                continue
            path = self._folder / name
            tensors = safetensors_file.open_mapped(path)
            self._digests[name] = fingerprint(tensors)
            try:
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
            except OSError as error:
                raise MedPFLError(f"cannot write {path}: {error.strerror}") from error
        return {name: self._digests[name] for name in used}

    def restore(
        self, names: Mapping[str, Sequence[str]], digests: Mapping[str, str]
    ) -> dict[str, list[dict[str, Tensor]]]:
        """The stack that ``seal`` told of.

        Raises:
            DamagedFile: one of its files is missing, or not what was written.
        """
        assert self._folder is not None
        self.on_disk, read = True, {}
        for name, digest in digests.items():
            path = self._folder / name
            try:
                tensors = safetensors_file.open_mapped(path)
                whole = fingerprint(tensors) == digest
            except (OSError, ValueError, KeyError, AssertionError, RuntimeError) as error:
                raise DamagedFile(f"cannot read {path}: {error}") from error
            if not whole:
                raise DamagedFile(f"cannot read {path}: its tensors are not those that were written")
            self._name(tensors, path)
            read[name] = unflatten(tensors)
            self._digests[name] = digest
        return {slot: [self._of(read[name], slot) if name else {} for name in files] for slot, files in names.items()}

    @staticmethod
    def _of(slots: Slots, slot: str) -> dict[str, Tensor]:
        return slots[slot] if slot in slots else slots[""]

    def forget(self, kept: Collection[str] = (), last: int | None = None) -> None:
        """Remove the run's files that no checkpoint names; their space is free once nobody holds their tensors.

        Args:
            last: of those up to this number; what came since is of answers that no checkpoint can name yet.
        """
        if self._folder is None:
            return
        for path in self._folder.glob("*.safetensors"):
            newer = last is not None and path.stem.isdecimal() and int(path.stem) > last
            if path.name not in kept and not newer:
                path.unlink(missing_ok=True)
                self._digests.pop(path.name, None)
