# SPDX-License-Identifier: Apache-2.0
"""Work that is done in a thread of its own, while who asked for it goes on: one piece at a time."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from medpfl.core.errors import MedPFLError


class Behind:
    """The thread; ``name``: what it is called in a debugger. What it reads must not change until ``wait`` returns."""

    def __init__(self, name: str):
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._now: Future[None] | None = None

    def start(self, work: Callable[[], None]) -> None:
        """Begin it, after what was begun before.

        Raises:
            MedPFLError: the work before did.
        """
        self.wait()
        self._now = self._thread.submit(work)

    def wait(self) -> None:
        """Until the work is done.

        Raises:
            MedPFLError: the work did; it is told once.
        """
        if self._now is not None:
            wait([self._now])  # who is interrupted here, by Ctrl-C, waits again when it closes
            now, self._now = self._now, None
            now.result()

    def close(self) -> None:
        """Wait, and end the thread. Of work that nobody waits for any more an error is only written to the log."""
        now, self._now = self._now, None
        if now is not None:
            wait([now])
            error = now.exception()
            if isinstance(error, MedPFLError):
                logging.getLogger(__name__).error("%s", error)
            elif error is not None:
                raise error
        self._thread.shutdown()
