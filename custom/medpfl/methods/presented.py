# SPDX-License-Identifier: Apache-2.0
"""What a hospital's network was shown in a round, kept for the next one, or made while a step runs: augmenting can take
longer than a step."""

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor

from medpfl.data.samples import in_parallel

MOST = 256 * 2**20
"""Bytes that are kept; what is beyond is made again."""
Shown = tuple[Tensor, Tensor]
Planned = TypeVar("Planned")
Made = TypeVar("Made")


class Presented:
    """The batches of one round, in memory. Whoever is given one must not change it in place.

    Args:
        most: bytes that are kept.
        ahead: whether a thread makes the next batches, up to three, while a step runs.
    """

    def __init__(self, most: int = MOST, ahead: bool = False) -> None:
        self._most, self._ahead = most, ahead
        self._round = 0
        self._left = most
        self._batches: dict[tuple[str, int, bytes], Shown] = {}

    def batch(self, round_number: int, key: tuple[str, int, bytes], make: Callable[[], Shown]) -> Shown:
        """What ``make`` returned for this key in this round.

        Args:
            key: all that ``make`` depends on within the round: the purpose, the step and the samples' numbers.
        """
        if round_number != self._round:
            self._round, self._left = round_number, self._most
            self._batches.clear()
        if key not in self._batches:
            made = make()
            size = sum(tensor.numel() * tensor.element_size() for tensor in made)
            if size > self._left:
                return made
            self._left -= size
            self._batches[key] = made
        return self._batches[key]

    def in_turn(self, make: Callable[[Planned], Made], planned: Iterable[Planned]) -> Iterator[Made]:
        """What ``make`` returns for each of ``planned``, in their order; the thread ends with the iterator."""
        return in_parallel(make, planned, threads=1) if self._ahead else map(make, planned)
