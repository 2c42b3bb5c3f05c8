# SPDX-License-Identifier: Apache-2.0
"""Samples ready for training, in memory up to a stated budget and in a file beyond it."""

from __future__ import annotations

import collections
import io
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError
from medpfl.data.declared import StorageRule
from medpfl.data.preparation import Preparation, Spec
from medpfl.data.rows import CaseRows, FileRows, Rows
from medpfl.data.subgroups import Grouping

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_READERS = min(4, os.cpu_count() or 1)
_ROWS = 256
_AT_A_TIME = 2**24  # values of a batch that is not trained on


@dataclass(frozen=True)
class Samples:
    """One split, ready for training.

    Attributes:
        inputs: N x ... float32; of whole cases (or slices) of any shape ``CaseRows`` whose views have one shape.
        targets: N x ..., as ``Target`` has it; beside such inputs ``CaseRows`` too.
        case: N indices into ``names``; several samples (slices) may belong to one case (volume).
        names: the cases' names at the hospital; they never leave it.
        classes: number of declared classes, whether or not each occurs in this split; 0 where the answer is a number.
        annotated: of label maps that show some of the classes only, their numbers without the background; None: all.
        owners: of each of ``names`` whose it is, where the site file groups cases (by patient, recording); None: each
            stands for itself. They never leave the hospital either.
    """

    inputs: Rows
    targets: Rows
    case: NDArray[np.int64]
    names: list[str]
    classes: int = 2
    annotated: tuple[int, ...] | None = None
    owners: list[str] | None = None

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def patients(self) -> NDArray[np.int64]:
        """Of each of ``names`` the number of its owner, from 0 in the order in which they come."""
        if self.owners is None:
            return np.arange(len(self.names))
        found: dict[str, int] = {}
        return np.array([found.setdefault(owner, len(found)) for owner in self.owners], dtype=np.int64)

    @property
    def known(self) -> NDArray[np.bool_]:
        """Of each of ``names`` whether anything of its answer is known; of several labels that may be none."""
        found = np.ones(len(self.names), dtype=bool)
        if self.targets.dtype.is_floating_point and len(self.targets.shape) == 2:
            found[self.case[self.targets[:].isnan().all(dim=1).numpy()]] = False  # such a case is one sample
        return found

    def patients_behind(self, rows: NDArray[np.int64]) -> int:
        """Of how many patients the loss of these samples is: of those of whom anything is known."""
        cases = self.case[rows]
        return len(np.unique(self.patients[cases[self.known[cases]]]))

    def together(self, most: int) -> int:
        """How many samples to take into memory at a time: ``most``, of large views of whole cases fewer."""
        if not isinstance(self.inputs, CaseRows):
            return most
        return max(1, min(most, _AT_A_TIME // self.inputs.shape[1:].numel()))

    @property
    def entries(self) -> Tensor:
        """How many entries of a tensor of decisions are about each sample, N: one; of whole cases that differ in shape
        all their voxels, for whose decisions lie one after another."""
        import torch

        if not isinstance(self.targets, CaseRows):
            return torch.ones(len(self), dtype=torch.int64)
        return torch.tensor([int(np.prod(shape)) for shape in self.targets.shapes])

    def masks(self, decisions: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each of ``names`` the mask that was decided and the true one, H x W x D (of an image D is 1), uint8."""
        import torch

        if isinstance(self.targets, CaseRows):
            each = torch.split(decisions, self.entries.tolist())
            for number in range(len(self.names)):
                rows = np.flatnonzero(self.case == number).tolist()
                found = [each[row].view(self.targets.spatial(row)) for row in rows]
                true = [self.targets.whole(row) for row in rows]
                flat = found[0].ndim == 2  # an image, or the slices of a volume
                yield (torch.stack(found, -1), torch.stack(true, -1)) if flat else (found[0], true[0])
            return
        for number in range(len(self.names)):
            mine = torch.from_numpy(self.case == number)
            yield decisions[mine].permute(1, 2, 0), self.targets[mine].permute(1, 2, 0)


@dataclass(frozen=True)
class SiteData:
    """A hospital's samples of a task, split by split ("validation" may be empty).

    Attributes:
        splits: split to its samples.
        class_names: names of the classes in their order; none where the answer is a number.
        preparation: how inputs were prepared; kept with the deployed model so that new cases are prepared alike. None:
            nothing is known of it.
        groupings: by which the hospital's own page tells scores apart; they never leave it.
    """

    splits: dict[str, Samples]
    class_names: list[str]
    preparation: Preparation | None = None
    groupings: tuple[Grouping, ...] = ()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input as networks are built for it: (C, H, W) for slices, (F,) for rows."""
        return tuple(self.splits["train"].inputs.shape[1:])

    @property
    def meaning(self) -> list[str]:
        """What the entries of an input mean; see ``Preparation.meaning``."""
        return self.preparation.meaning() if self.preparation else []


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
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> DataError:
        where = self._budget.scratch or tempfile.tempdir or "of the system"  # of which there may be none
        return DataError(
            f"decoded data do not fit into the scratch folder {where}: "
            f"{error.strerror}; name another as storage.scratch in the site file"
        )

    def _spill(self, held: io.BytesIO) -> None:
        file = tempfile.TemporaryFile(prefix="medpfl-", dir=self._budget.scratch)  # noqa: SIM115 (kept open)
        with held.getbuffer() as content:
            file.write(content)
        self._budget.left += self._held
        self._file = file

    def finish(self) -> Rows:
        """The rows; a tensor if they are in memory.

        Raises:
            DataError: the scratch file cannot be written.
        """
        import torch

        assert self._like is not None, "nothing was appended"
        if isinstance(self._file, io.BytesIO):
            if not self._count:
                return self._like
            return torch.frombuffer(self._file.getbuffer(), dtype=self._like.dtype).view(-1, *self._like.shape[1:])
        try:
            self._file.flush()  # of few rows all are written here
        except OSError as error:
            raise self._unwritable(error) from error
        return FileRows(self._file, self._like, self._count)


class CaseStore:
    """Collects whole cases, each L x spatial axes, of which the L agree, as ``Store`` does rows.

    Args:
        size: spatial lengths of the views and patches.
    """

    def __init__(self, budget: Budget, size: tuple[int, ...]):
        self._values, self._size = Store(budget), size
        self._shapes: list[tuple[int, ...]] = []

    def append(self, case: Tensor) -> None:
        """Add a case.

        Raises:
            DataError: the scratch file cannot be written.
        """
        self._values.append(case.reshape(-1))
        self._shapes.append(tuple(case.shape))

    def finish(self) -> CaseRows:
        """The cases; at least one was appended."""
        values = self._values.finish()
        assert not isinstance(values, CaseRows)
        return CaseRows(values, self._shapes, self._size)


def stores(spec: Spec, budget: Budget) -> tuple[Store, Store] | tuple[CaseStore, CaseStore]:
    """For inputs and targets, of whole cases or of rows of one shape."""
    if spec.whole:
        return CaseStore(budget, spec.size), CaseStore(budget, spec.size)
    return Store(budget), Store(budget)


Given = TypeVar("Given")
Read = TypeVar("Read")


def in_parallel(read: Callable[[Given], Read], cases: Iterable[Given], threads: int = _READERS) -> Iterator[Read]:
    """``read`` of every case, in order, by a few threads; at most twice as many results as threads wait at a time."""
    waiting: collections.deque[Future[Read]] = collections.deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for case in cases:
                waiting.append(pool.submit(read, case))
                if len(waiting) > 2 * threads:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def empty_like(samples: Samples) -> Samples:
    """A split without samples, of the same shapes."""
    return Samples(samples.inputs[:0], samples.targets[:0], samples.case[:0], [], samples.classes, samples.annotated)


def joined_targets(parts: Sequence[Samples]) -> Samples:
    """The targets and cases of several splits, one after another, and no inputs: what metrics need."""
    import torch

    starts = np.cumsum([0, *(len(part.names) for part in parts)])
    targets = joined_rows([part.targets for part in parts], Budget(StorageRule(), Path()))
    return Samples(
        torch.empty(len(targets), 0),
        targets,
        np.concatenate([part.case + start for part, start in zip(parts, starts[:-1], strict=True)]),
        [name for part in parts for name in part.names],
        parts[0].classes,
        _annotated_by_all(parts),
    )


def _annotated_by_all(parts: Sequence[Samples]) -> tuple[int, ...] | None:
    known = [set(part.annotated) for part in parts if part.annotated is not None]
    return tuple(sorted(set.intersection(*known))) if known else None


def joined_rows(parts: Sequence[Rows], budget: Budget) -> Rows:
    """The rows of all parts in their order; what is beyond the budget goes into a file."""
    cases = [part for part in parts if isinstance(part, CaseRows)]
    if cases:
        whole = CaseStore(budget, cases[0].size)
        for case in cases:
            for number in range(len(case)):
                whole.append(case.whole(number))
        return whole.finish()
    rows = Store(budget)
    for part in parts:
        for start in range(0, max(len(part), 1), _ROWS):
            rows.append(part[start : start + _ROWS])
    return rows.finish()


def to_tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
    """A contiguous CPU tensor of ``dtype``."""
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
