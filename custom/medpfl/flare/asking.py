# SPDX-License-Identifier: Apache-2.0
"""How often hospitals that wait ask the server for their next task.

FLARE's server says it to each of them in every answer. A hospital that has done its part asks until the slowest is
done: with the ten times a second that the shipped jobs say, a hundred hospitals would ask a thousand times a second for
as long as a round takes.
"""

from nvflare.apis.fl_constant import FLContextKey
from nvflare.apis.fl_context import FLContext

PART = 1 / 40
"""Of the time that an exchange has taken so far; it is what a hospital may come too late by."""
MOST = 2.0
"""Seconds; FLARE's own interval."""
TOGETHER = 200
"""Times a second that all hospitals ask, at the most: an answer takes the server about 3 ms of processor time."""


class Asking:
    """Sets the interval as an exchange goes on; ``fl_ctx``: the server's, of a job that begins."""

    def __init__(self, fl_ctx: FLContext):
        self._config = getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "config", None)  # None: hospitals are not apart
        if self._config:
            hospitals = len(fl_ctx.get_engine().get_clients())
            self._least: float = max(self._config.task_request_interval, hospitals / TOGETHER)

    def after(self, seconds: float) -> None:
        """The exchange under way has taken so long: 0 is its beginning, where answers may come at once."""
        if self._config:
            self._config.task_request_interval = max(self._least, min(MOST, PART * seconds))
