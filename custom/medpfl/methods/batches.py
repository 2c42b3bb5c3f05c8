# SPDX-License-Identifier: Apache-2.0
"""A batch, and where it stands in its pass over the data and in the job."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from medpfl.core.seeding import derive_seed
from medpfl.privacy.lots import Lot


@dataclass(frozen=True)
class Span:
    """The rounds over which a schedule runs: so many ``rounds``, counted on from number ``first``.

    The job's training is one span. Fine-tuning after it is another, with a beginning of its own.
    """

    first: int
    rounds: int

    def passed(self, round_number: int, part: float) -> float:
        """Rounds before this moment, in [0, ``rounds``]; ``part`` of the round, in [0, 1), is over."""
        return min(round_number - self.first + part, float(self.rounds))


@dataclass(frozen=True)
class Place:
    """Where a batch stands in its pass over the data: ``number``, from 0, ``of`` so many; with record-level privacy
    a batch is a case, ``number`` is that of its ``lot``. ``rows``: numbers of its training samples; None: it is not of
    training samples. ``weights``: of each in the batch's gradient; None: all alike. ``public``: it is of a public
    dataset, whose samples no noise has to hide."""

    number: int
    of: int
    lot: Lot | None = None
    rows: Tensor | None = field(default=None, compare=False)
    weights: Tensor | None = field(default=None, compare=False)
    public: bool = False

    def in_step(self, accumulate: int) -> tuple[int, int]:
        """Its number, from 0, among the batches of its optimiser's step, and how many these are."""
        if self.lot is not None:
            return self.lot.number, self.lot.of
        first = self.number - self.number % accumulate
        return self.number - first, min(accumulate, self.of - first)


@dataclass(frozen=True)
class Batch:
    """``inputs``: B x ...; ``targets``: B x ...; both on the training device."""

    inputs: Tensor
    targets: Tensor
    place: Place = Place(0, 1)


def starts_of(samples: int, size: int) -> list[int]:
    """Where the batches of an epoch begin; without a last one of a single sample when there are larger ones."""
    return [start for start in range(0, samples, size) if start == 0 or size == 1 or samples - start > 1]


def planned_batches(
    order: Callable[[], Tensor], size: int, epochs: int | None, steps: int | None
) -> Iterator[tuple[int, int, Tensor]]:
    """Each batch's number, of how many, and its training samples; ``order``: those of one pass."""
    done = 0
    for _ in range(steps or epochs or 0):
        taken = order()
        starts = starts_of(len(taken), size)
        for start in starts:
            yield done, steps or (epochs or 0) * len(starts), taken[start : start + size]
            done += 1
            if done == steps:
                return


def shuffled(rows: Tensor, *seed: str | int) -> Tensor:
    """In another order: what a task shows of a sample may go by its place in the batch, as that of patches does. It
    hangs on the seed alone, and so not on which other cases a lot holds."""
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(derive_seed(*seed)))]
