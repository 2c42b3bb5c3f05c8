# SPDX-License-Identifier: Apache-2.0
"""What of a hospital's data lies on its GPU, so that one copy serves several steps, several networks and, of whole
splits, all rounds."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from medpfl.core.devices import moved, placed
from medpfl.data.rows import CaseRows, Rows, take
from medpfl.data.samples import Samples

OnDevice = tuple[Tensor, Tensor, Tensor | None]
"""A batch's inputs and targets on the training device, and on the CPU what each sample counts in its loss (None: all
alike)."""


class Resident:
    """The training samples, where they fit; else the batches of the round, as far as they fit. In what room is left
    beside them the rows that are evaluated. Whoever is given one must not change it in place.

    Args:
        device: on which networks are trained.
        most: bytes; 0: nothing is kept.
        training: bytes of these that training will want; nothing else gets them.
        evaluated: the inputs and targets of the splits that are evaluated; no others are kept for it.
    """

    def __init__(
        self, device: torch.device, most: int = 0, training: int = 0, evaluated: Sequence[Samples] = ()
    ) -> None:
        self.device, self._most, self._reserved = device, most, min(training, most)
        self._evaluates = {id(rows): rows for samples in evaluated for rows in (samples.inputs, samples.targets)}
        self._rows: dict[int, tuple[Rows, Tensor | None]] = {}
        self._round, self._evaluated, self._trained, self._of_round = 0, 0, 0, 0
        self._batches: dict[tuple[str, int, bytes], OnDevice] = {}

    @property
    def keeps(self) -> bool:
        """Whether anything may stay."""
        return self._most > 0

    @property
    def size(self) -> int:
        """Bytes that lie on the device now."""
        return self._evaluated + self._trained + self._of_round

    def whole(self, samples: Samples) -> tuple[Tensor, Tensor] | None:
        """All inputs and all targets of training on the device, copied once in this process; None: they do not fit, or
        lie in a file or as whole cases, of which every step shows other patches."""
        parts = samples.inputs, samples.targets
        if any(id(part) not in self._rows for part in parts):
            size = sum(map(_held_size, parts))
            fits = all(isinstance(part, Tensor) for part in parts) and size <= self._most - self.size
            for part in parts:
                self._rows[id(part)] = part, self._copy(part) if fits else None
            self._trained += size if fits else 0
        inputs, targets = (self._rows[id(part)][1] for part in parts)
        return None if inputs is None or targets is None else (inputs, targets)

    def evaluated(self, rows: Rows) -> Tensor | None:
        """The values of these rows, copied once in this process; of whole cases one after another. None: they do not
        fit beside what training wants, lie in a file, or are of no split that is evaluated."""
        if id(rows) not in self._rows:
            if id(rows) not in self._evaluates:
                return None
            size = _held_size(rows)
            room = self._most - self._evaluated - max(self._reserved, self._trained + self._of_round)
            fits = 0 < size <= room
            self._rows[id(rows)] = rows, self._copy(rows) if fits else None
            self._evaluated += size if fits else 0
        return self._rows[id(rows)][1]

    def _copy(self, rows: Rows) -> Tensor:
        values = rows.values if isinstance(rows, CaseRows) else rows
        assert isinstance(values, Tensor)
        with torch.inference_mode(False):  # the first to ask may evaluate, and others train with it
            return placed(values, self.device)

    def batch(self, round_number: int, key: tuple[str, int, bytes], make: Callable[[], OnDevice]) -> OnDevice:
        """What ``make`` returned for this key in this round; beyond the budget it is made again.

        Args:
            key: all that ``make`` depends on within the round: the purpose, the step and the samples' numbers.
        """
        if not self.keeps:
            return make()
        if round_number != self._round:
            self.forget_round()
            self._round = round_number
        if key in self._batches:
            return self._batches[key]
        made = make()
        size = _size(made[0], made[1])
        if size <= self._most - self.size:
            self._of_round += size
            self._batches[key] = made
        return made

    def forget_round(self) -> None:
        """Give the memory of the round's batches back."""
        self._batches.clear()
        self._of_round = 0


_SERVING: ContextVar[Resident | None] = ContextVar("resident", default=None)


@contextmanager
def serving(resident: Resident | None) -> Iterator[None]:
    """While it lasts, ``part_of`` and ``case_of`` take what lies on the device from there, in this thread."""
    token = _SERVING.set(resident)
    try:
        yield
    finally:
        _SERVING.reset(token)


def part_of(rows: Rows, index: slice | Tensor, device: torch.device) -> Tensor:
    """Rows on the device, by slice or by numbers: of what lies there already, else copied."""
    values = None if isinstance(rows, CaseRows) else _lying(rows, device)
    if values is None:
        return moved(rows[index], device)
    return values[index] if isinstance(index, slice) else take(values, moved(index, values.device))


def case_of(rows: CaseRows, number: int, device: torch.device) -> Tensor:
    """A whole case on the device, likewise."""
    values = _lying(rows, device)
    return moved(rows.whole(number), device) if values is None else rows.whole_in(values, number)


def _lying(rows: Rows, device: torch.device) -> Tensor | None:
    resident = _SERVING.get()
    return resident.evaluated(rows) if resident is not None and resident.device == device else None


def bytes_shown(samples: Samples, count: int) -> int:
    """Of so many inputs and targets as training shows them: rows, or patches of whole cases."""
    each = (samples.inputs, samples.targets)
    return count * sum(rows.shape[1:].numel() * torch.empty((), dtype=rows.dtype).element_size() for rows in each)


def _held_size(rows: Rows) -> int:
    """Bytes of rows in memory; 0: they lie in a file."""
    values = rows.values if isinstance(rows, CaseRows) else rows
    return _size(values) if isinstance(values, Tensor) else 0


def _size(*tensors: Tensor) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
