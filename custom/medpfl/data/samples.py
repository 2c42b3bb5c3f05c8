# SPDX-License-Identifier: Apache-2.0
"""Samples ready for training, in memory up to a stated budget and in a file beyond it."""

import collections
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.errors import DataError
from medpfl.data.declared import StorageRule
from medpfl.data.preparation import Preparation

_READERS = min(4, os.cpu_count() or 1)


class FileRows:
    """Rows of one shape in an open file; indexing reads just the rows asked for."""

    def __init__(self, file: IO[bytes], like: Tensor, count: int):
        self._file, self._like, self._count = file, like, count
        self._size = like.element_size() * like[0:0].new_empty(like.shape[1:]).numel()

    @property
    def shape(self) -> torch.Size:
        """N x ..., as of a tensor."""
        return torch.Size((self._count, *self._like.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        """Rows by slice, by index tensor or by mask."""
        if isinstance(index, slice):
            numbers = list(range(*index.indices(self._count)))
        else:
            numbers = (index.nonzero()[:, 0] if index.dtype == torch.bool else index).tolist()
        rows = self._like.new_empty((len(numbers), *self._like.shape[1:]))
        if numbers and self._size:
            bytes_ = memoryview(rows.numpy().data).cast("B")
            for place, number in enumerate(numbers):
                part = bytes_[place * self._size : (place + 1) * self._size]
                if os.preadv(self._file.fileno(), [part], number * self._size) != self._size:
                    raise DataError(f"the scratch file of decoded data ended before row {number}")
        return rows


Rows = Tensor | FileRows


def take(rows: Rows, numbers: Tensor) -> Tensor:
    """A copy of the rows with these numbers. Of a tensor: in a quarter of the time that indexing it takes."""
    return rows.index_select(0, numbers) if isinstance(rows, Tensor) else rows[numbers]


@dataclass(frozen=True)
class Samples:
    """One split, ready for training.

    Attributes:
        inputs: N x ... float32.
        targets: N x ..., as ``Target`` has it.
        case: N indices into ``names``; several samples (slices) may belong to one case (volume).
        names: the cases' names at the hospital; they never leave it.
        classes: number of declared classes, whether or not each occurs in this split; 0 where the answer is a number.
    """

    inputs: Rows
    targets: Rows
    case: NDArray[np.int64]
    names: list[str]
    classes: int = 2

    def __len__(self) -> int:
        return len(self.inputs)


@dataclass(frozen=True)
class SiteData:
    """A hospital's samples of a task, split by split ("validation" may be empty).

    Attributes:
        splits: split to its samples.
        class_names: names of the classes in their order; none where the answer is a number.
        preparation: how inputs were prepared; kept with the deployed model so that new cases are prepared alike. None:
            nothing is known of it.
    """

    splits: dict[str, Samples]
    class_names: list[str]
    preparation: Preparation | None = None

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as networks are built for it: (C, H, W) for slices, (F,) for rows."""
        return tuple(self.splits["train"].inputs.shape[1:])


class Budget:
    """Bytes of decoded data that may still be held in memory."""

    def __init__(self, rule: StorageRule, folder: Path):
        self.left = int(rule.memory_gb * 2**30)
        self.scratch = str(Path(folder, rule.scratch)) if rule.scratch else None


class Store:
    """Collects rows of one shape, in memory while the budget lasts, else in an unnamed file."""

    def __init__(self, budget: Budget):
        self._budget = budget
        self._file: IO[bytes] = io.BytesIO()
        self._held = 0
        self._count = 0
        self._like: Tensor | None = None

    def __len__(self) -> int:
        return self._count

    def append(self, rows: Tensor) -> None:
        """Add rows, N x ...; all rows of a store have one shape and type.

        Raises:
            DataError: the scratch file cannot be written.
        """
        if self._like is None:
            self._like = rows[:0].clone()
        assert rows.shape[1:] == self._like.shape[1:] and rows.dtype == self._like.dtype
        size = rows.numel() * rows.element_size()
        if not size:
            return
        self._count += len(rows)
        try:
            if isinstance(self._file, io.BytesIO):
                if size > self._budget.left:
                    self._spill(self._file)
                else:
                    self._budget.left -= size
                    self._held += size
            self._file.write(rows.contiguous().numpy().data)
        except OSError as error:
            raise DataError(
                f"decoded data do not fit into the scratch folder {self._budget.scratch or tempfile.gettempdir()}: "
                f"{error.strerror}; name another as storage.scratch in the site file"
            ) from error

    def _spill(self, held: io.BytesIO) -> None:
        file = tempfile.TemporaryFile(prefix="medpfl-", dir=self._budget.scratch)  # noqa: SIM115 (kept open)
        with held.getbuffer() as content:
            file.write(content)
        self._budget.left += self._held
        self._file = file

    def finish(self) -> Rows:
        """The rows; a tensor if they are in memory."""
        assert self._like is not None, "nothing was appended"
        if isinstance(self._file, io.BytesIO):
            if not self._count:
                return self._like
            return torch.frombuffer(self._file.getbuffer(), dtype=self._like.dtype).view(-1, *self._like.shape[1:])
        self._file.flush()
        return FileRows(self._file, self._like, self._count)


Given = TypeVar("Given")
Read = TypeVar("Read")


def in_parallel(read: Callable[[Given], Read], cases: Iterable[Given]) -> Iterator[Read]:
    """``read`` of every case, in order, by a few threads; only a few results wait at a time."""
    waiting: collections.deque[Future[Read]] = collections.deque()
    with ThreadPoolExecutor(_READERS) as pool:
        try:
            for case in cases:
                waiting.append(pool.submit(read, case))
                if len(waiting) > 2 * _READERS:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def empty_like(samples: Samples) -> Samples:
    """A split without samples, of the same shapes."""
    return Samples(samples.inputs[:0], samples.targets[:0], samples.case[:0], [], samples.classes)


def joined_targets(parts: Sequence[Samples]) -> Samples:
    """The targets and cases of several splits, one after another, and no inputs: what metrics need."""
    starts = np.cumsum([0, *(len(part.names) for part in parts)])
    targets = torch.cat([part.targets[:] for part in parts])
    return Samples(
        torch.empty(len(targets), 0),
        targets,
        np.concatenate([part.case + start for part, start in zip(parts, starts[:-1], strict=True)]),
        [name for part in parts for name in part.names],
        parts[0].classes,
    )


def to_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor of ``dtype``."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
