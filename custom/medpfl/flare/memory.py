# SPDX-License-Identifier: Apache-2.0
"""The memory of messages that are over.

FLARE's messages lie in objects that refer to each other, which only Python's search for such circles gives back. It is
made when there are a quarter more objects than before: in a process that has loaded torch, after hundreds of messages.
Until then two copies of the models stay in memory for every round, at the server and at the hospitals.
"""

import gc

from nvflare.fuel.utils.memory_utils import cleanup_memory

EVERY = 10
BIG = 50_000_000
"""Bytes of a message's models above which memory is looked at after every one."""


_PIECES = 32 * 2**20


class Cleaner:
    """Gives back what messages left behind, for one process."""

    def __init__(self) -> None:
        self._calls = 0
        self._settled = False
        self._passed = 0

    def clean(self, size: int) -> None:
        """Every tenth call, or where ``size`` (bytes of the models in the message) is large."""
        self._calls += 1
        if self._calls % EVERY and size <= BIG:
            return
        if not self._settled:  # what is there by now stays: to look at it again each time would take a second
            gc.collect()
            gc.freeze()
            self._settled = True
        cleanup_memory()

    def passed(self, size: int) -> None:
        """Called with the bytes of every piece of a message that was made or read here: what is left of it, another
        piece's size, is given back now and then, and not when the whole message is there."""
        self._passed += size
        if self._passed >= _PIECES and self._settled:
            self._passed = 0
            gc.collect(1)  # they are young; to look at everything takes 20 ms


CLEANER = Cleaner()
"""This process's."""
