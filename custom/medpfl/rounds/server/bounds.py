# SPDX-License-Identifier: Apache-2.0
"""How far a hospital's update may be from the others'.

Norm bounding (Sun, Kairouz, Suresh, McMahan, "Can You Really Backdoor Federated Learning?", 2019) with a limit that
the round itself gives: a multiple of the median length of the other hospitals' updates.
"""

import functools
import math
import statistics
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from medpfl.core.mapped import pieces
from medpfl.core.mixing import State
from medpfl.rounds.messages import Slots

FAR = 10.0
"""An update that is so many times as long as the median of the others' is told of."""

_PIECE = 1 << 16
"""Values whose difference stays in the processor's cache."""
TINY, HUGE = 1e-12, 1e12
"""Between them the squares of a length fit its values' own type, float32 or wider."""


@dataclass(frozen=True)
class Far:
    """An update that is far longer than the others'; ``times``: the median of theirs; ``limit``: what it was shortened
    to, in the same unit; None: it was not."""

    site: str
    what: str
    times: float
    limit: float | None

    def __str__(self) -> str:
        shortened = f"; it was shortened to {self.limit:g} times" if self.limit is not None else ""
        return f"its update of {self.what} is {self.times:.3g} times as long as the median of the others'{shortened}"


def bound(
    slots: Sequence[str],
    sent: Mapping[str, Slots],
    held: Mapping[str, Slots],
    gradients: Collection[str],
    buffers: Collection[str],
    limit: float | None,
    known: Mapping[str, "Updates"] | None = None,
) -> list[Far]:
    """Shorten, in place, what is longer than ``limit`` times the median of the others' lengths; tell of what is far.

    The length is the Euclidean norm of the difference to what the hospital was sent, slot by slot, trained entries and
    buffers apart. Where the others did not move at all, there is nothing to compare with.

    Args:
        sent: hospital to what it answered; ``held``: to what it was sent.
        gradients: slots whose updates are gradients, which have a length of their own.
        buffers: entries that are not trained.
        limit: None: nothing is shortened.
        known: hospital to what ``updates_of`` its answer says, where that was looked at before.
    """
    known = known or {}
    updates = {
        site: known[site] if site in known else updates_of(slots, answer, held[site], gradients, buffers)
        for site, answer in sent.items()
    }
    found = []
    for slot in slots:
        for what, kept in ((f"'{slot}'", False), (f"the buffers of '{slot}'", True)):
            found += _bound_group(what, {site: each[slot, kept] for site, each in updates.items()}, limit)
    return found


def updates_of(
    slots: Sequence[str], answer: Slots, held: Slots, gradients: Collection[str], buffers: Collection[str]
) -> "Updates":
    """One hospital's updates: slot and whether it is of buffers, to the update. Arguments as ``bound`` has them."""
    return {
        (slot, kept): Update(
            {
                key: tensor
                for key, tensor in answer[slot].items()
                if (key in buffers) == kept and tensor.is_floating_point()
            },
            None if slot in gradients else held[slot],
        )
        for slot in slots
        for kept in (False, True)
    }


def _usual(lengths: Mapping[str, float]) -> dict[str, float]:
    """Each hospital to the median of the others' lengths."""
    return {site: statistics.median([length for other, length in lengths.items() if other != site]) for site in lengths}


def _alike(lengths: Mapping[str, float], times: float) -> bool:
    """Whether lengths that are known to three digits show that none is so many times as long as the others' median."""
    if not all(TINY < length < HUGE for length in lengths.values()):
        return False
    usual = _usual(lengths)
    return all(1.01 * length < times * usual[site] for site, length in lengths.items())


class Update:
    """Entries of what a hospital sent, and what it had been sent; None: they are a difference themselves."""

    def __init__(self, entries: State, base: State | None):
        self.entries, self._base = entries, base

    @functools.cached_property
    def length(self) -> float:
        return float(sum(float(apart.norm()) ** 2 for _, _, apart in self._pieces()) ** 0.5)

    @functools.cached_property
    def about(self) -> float:
        """The length to three digits, for a third of the work; NaN, 0 or infinite where that needs float64."""
        if any(tensor.dtype not in (torch.float32, torch.float64) for tensor in self.entries.values()):
            return math.nan
        found = 0.0
        for key, tensor in self.entries.items():
            base = () if self._base is None else (self._base[key],)
            for sent, *held in pieces(tensor, *base, values=_PIECE):
                found += float(torch.linalg.vector_norm(sent - held[0] if held else sent)) ** 2
        return math.sqrt(found)

    def _pieces(self) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """A piece of what was sent, of what had been sent, and the difference in float64."""
        for key, tensor in self.entries.items():
            if self._base is None:
                for (sent,) in pieces(tensor):
                    yield sent, None, sent.double()
            else:
                for sent, base in pieces(tensor, self._base[key]):
                    yield sent, base, sent.double() - base

    def shorten(self, factor: float) -> None:
        for sent, base, apart in self._pieces():
            sent.copy_(apart * factor if base is None else base + apart * factor)


Updates = Mapping[tuple[str, bool], Update]


def _bound_group(what: str, updates: Mapping[str, Update], limit: float | None) -> list[Far]:
    if len(updates) < 2 or not any(update.entries for update in updates.values()):
        return []
    if _alike({site: update.about for site, update in updates.items()}, FAR if limit is None else min(FAR, limit)):
        return []
    found = []
    usual = _usual({site: update.length for site, update in updates.items()})
    for site, update in updates.items():
        if not usual[site]:
            continue
        times = update.length / usual[site]
        shortened = limit is not None and times > limit
        if limit is not None and shortened:
            update.shorten(limit / times)
        if shortened or times > FAR:
            found.append(Far(site, what, times, limit if shortened else None))
    return found
