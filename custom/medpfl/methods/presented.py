# SPDX-License-Identifier: Apache-2.0
"""What a hospital's network was shown in a round, kept for the next one: augmenting can take longer than a step."""

from collections.abc import Callable

from torch import Tensor

MOST = 256 * 2**20
"""Bytes that are kept; what is beyond is made again."""
Shown = tuple[Tensor, Tensor]


class Presented:
    """The batches of one round, in memory. Whoever is given one must not change it in place."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
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
