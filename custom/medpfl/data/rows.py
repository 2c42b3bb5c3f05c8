# SPDX-License-Identifier: Apache-2.0
"""Rows of decoded data: of one shape, or whole cases of differing shape; in memory or in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from medpfl.core.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_PLACES = 1000
"""Voxels of each label value, at most, that a case offers as centres of patches."""


class FileRows:
    """Rows of one shape in an open file; indexing reads just the rows asked for."""

    def __init__(self, file: IO[bytes], like: Tensor, count: int):
        self._file, self._like, self._count = file, like, count
        self._size = like.element_size() * like[0:0].new_empty(like.shape[1:]).numel()

    @property
    def shape(self) -> torch.Size:
        """N x ..., as of a tensor."""
        import torch

        return torch.Size((self._count, *self._like.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        """Rows by slice, by index tensor or by mask."""
        numbers = numbers_of(index, self._count)
        rows = self._like.new_empty((len(numbers), *self._like.shape[1:]))
        if numbers and self._size:
            bytes_ = memoryview(rows.numpy().data).cast("B")
            for place, number in enumerate(numbers):
                part = bytes_[place * self._size : (place + 1) * self._size]
                if os.preadv(self._file.fileno(), [part], number * self._size) != self._size:
                    raise DataError(f"the scratch file of decoded data ended before row {number}")
        return rows

    def mapped(self) -> NDArray[Any]:
        """All rows as an array that stays in the file; only what is looked at is read."""
        return np.memmap(self._file, dtype=self._like.numpy().dtype, mode="r", shape=tuple(self.shape))


class CaseRows:
    """Whole cases of differing shape, each L x spatial axes, where L may be channels or nothing.

    What knows nothing of that sees rows of one shape: indexing gives each case's *view*, its centre, cut or padded with
    zeros to a fixed size. Training draws other patches of this size, ``whole`` gives a case as it is.

    Args:
        values: all cases' values, one case after another, in memory or in a file.
        shapes: of the cases, with L.
        size: spatial lengths of views and patches.
    """

    def __init__(self, values: Tensor | FileRows, shapes: Sequence[tuple[int, ...]], size: tuple[int, ...]):
        from torch import Tensor

        self.values, self.shapes, self.size = values, tuple(shapes), size
        flat = values.numpy() if isinstance(values, Tensor) else values.mapped()
        self._ends = ends = list(accumulate((int(np.prod(shape)) for shape in self.shapes), initial=0))
        self._cases = [
            flat[start:end].reshape(shape) for start, end, shape in zip(ends[:-1], ends[1:], self.shapes, strict=True)
        ]
        self._places: dict[int, dict[int, NDArray[np.int64]]] = {}

    @property
    def shape(self) -> torch.Size:
        """N x L x size: as of a tensor of the views."""
        import torch

        lead = self.shapes[0][: len(self.shapes[0]) - len(self.size)]
        return torch.Size((len(self), *lead, *self.size))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.shapes)

    def __getitem__(self, index: slice | Tensor) -> Tensor:
        """Views by slice, by index tensor or by mask: N x L x size."""
        import torch

        views = [self.patch(number, self.centre(number)) for number in numbers_of(index, len(self))]
        return torch.stack(views) if views else torch.empty((0, *self.shape[1:]), dtype=self.dtype)

    def spatial(self, number: int) -> tuple[int, ...]:
        """A case's lengths."""
        return self.shapes[number][-len(self.size) :]

    def centre(self, number: int) -> tuple[int, ...]:
        """Where the view of a case begins; below 0 along axes that are shorter than it."""
        return tuple((length - side) // 2 for length, side in zip(self.spatial(number), self.size, strict=True))

    def whole(self, number: int) -> Tensor:
        """A copy of a case."""
        import torch

        return torch.from_numpy(np.array(self._cases[number]))

    def whole_in(self, values: Tensor, number: int) -> Tensor:
        """The same case in a copy of all ``values``; a view of it."""
        return values[self._ends[number] : self._ends[number + 1]].view(self.shapes[number])

    def patch(self, number: int, start: Sequence[int]) -> Tensor:
        """A copy of ``size`` of a case from ``start`` on, with zeros where it lies beyond the case: L x size."""
        import torch

        case, lengths = self._cases[number], self.spatial(number)
        lead = case.shape[: case.ndim - len(lengths)]
        patch = np.zeros((*lead, *self.size), dtype=case.dtype)
        begins = [max(first, 0) for first in start]
        ends = [
            max(begin, min(first + side, length))
            for begin, first, side, length in zip(begins, start, self.size, lengths, strict=True)
        ]
        inside = list(zip(begins, ends, strict=True))
        source = tuple(slice(*ends) for ends in inside)
        target = tuple(slice(a - first, b - first) for (a, b), first in zip(inside, start, strict=True))
        every = (slice(None),) * len(lead)
        patch[every + target] = case[every + source]
        return torch.from_numpy(patch)

    def places(self, number: int) -> dict[int, NDArray[np.int64]]:
        """Of a label map's values above 0 that are there: up to 1000 of their voxels each, evenly spread over them in
        the order of memory, n x axes. Found once a case, and kept."""
        if number not in self._places:
            case = self._cases[number]
            self._places[number] = {
                int(value): _some(np.argwhere(case == value)) for value in np.unique(case).tolist() if value > 0
            }
        return self._places[number]


def _some(places: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(places) <= _PLACES:
        return places
    return places[np.linspace(0, len(places) - 1, _PLACES).round().astype(np.int64)]


Rows: TypeAlias = "Tensor | FileRows | CaseRows"


def numbers_of(index: slice | Tensor, count: int) -> list[int]:
    """The row numbers that a slice, an index tensor or a mask means."""
    import torch

    if isinstance(index, slice):
        return list(range(*index.indices(count)))
    numbers: list[int] = (index.nonzero()[:, 0] if index.dtype == torch.bool else index).tolist()
    return numbers


def take(rows: Rows, numbers: Tensor) -> Tensor:
    """A copy of the rows with these numbers. Of a tensor: in a quarter of the time that indexing it takes."""
    from torch import Tensor

    return rows.index_select(0, numbers) if isinstance(rows, Tensor) else rows[numbers]


def held(rows: Rows) -> tuple[int, int]:
    """Bytes of the rows in memory, and in the scratch folder."""
    import torch
    from torch import Tensor

    values = rows.values if isinstance(rows, CaseRows) else rows
    size = torch.Size(values.shape).numel() * torch.empty((), dtype=values.dtype).element_size()
    return (size, 0) if isinstance(values, Tensor) else (0, size)
