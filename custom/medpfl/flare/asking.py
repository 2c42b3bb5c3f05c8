# SPDX-License-Identifier: Apache-2.0
"""Hospitals that wait for their next task ask once, and the server answers when there is one (long polling).

FLARE's hospitals ask again and again, every time interval that the server tells them. A task then comes too late by
half of that in the mean, and every question costs either side some milliseconds of processor time: the shorter the
interval, the dearer is the wait for the slowest hospital. Here the answer to a question is kept back until a task is
there for who asked, or for ``HOLD`` seconds. FLARE's cells take a future for an answer, so no thread waits meanwhile.
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from nvflare.apis.fl_constant import FLContextKey, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey
from nvflare.fuel.f3.message import Message
from nvflare.private.defs import CellMessageHeaderKeys

HOLD = 4.0
"""Seconds that a question is kept at the most."""
LOST = 15.0
"""Seconds after which a hospital takes its question, or the answer to it, for lost, and asks again. FLARE's own 300 are
for questions that are answered at once, which a line that breaks seldom meets; here there is always one."""
SENT = 60.0
"""Seconds after which a hospital takes the answer for lost that its result has come, asks whether it has, and sends it
again if not. It names its tensors only, which are fetched apart."""
AGAIN = 0.01
"""Seconds after which a hospital asks that has sent its result, or whose question was kept for ``HOLD``."""
_AT_ONCE = 8
"""So many answers are made side by side: a task's data may have to be encoded for each."""
_LOG = logging.getLogger(__name__)


class _Settings(Protocol):
    """What of FLARE's server is set here."""

    task_request_interval: float


def ask_again(fl_ctx: FLContext) -> None:
    """At a hospital, as a job begins: a question is lost after ``LOST`` seconds, and a result after ``SENT``, where the
    job or FLARE's configuration gives it no other time."""
    communicator = getattr(getattr(fl_ctx.get_engine(), "client", None), "communicator", None)
    if communicator is not None and communicator.timeout > LOST:  # else it is not apart from the server
        runner = fl_ctx.get_prop(FLContextKey.RUNNER)
        runner.submit_task_result_timeout = runner.submit_task_result_timeout or min(SENT, communicator.timeout)
        communicator.timeout = LOST


@dataclass(frozen=True)
class _Question:
    """One of ``site``'s that is not answered yet; ``until``: when it has been kept for long enough, by the clock of
    ``time.monotonic``."""

    site: str
    request: Message
    until: float
    answer: Future[Message] = field(default_factory=Future)

    @property
    def who(self) -> tuple[str, str]:
        """Whose process waits for the answer: the hospital's, and its cell."""
        return self.site, str(self.request.get_header(MessageHeaderKey.ORIGIN))


class Asking:
    """Answers the hospitals' questions for tasks, from the beginning of a job until ``close``.

    Args:
        fl_ctx: the server's, of a job that begins. Where hospitals are not apart from the server, nothing is kept.
    """

    def __init__(self, fl_ctx: FLContext):
        engine = fl_ctx.get_engine()
        cell, server = engine.get_cell(), getattr(engine, "server", None)
        self._changed = threading.Condition()
        self._ready: set[str] = set()  # of whom a task is awaited
        self._kept: dict[str, _Question] = {}
        self._answering: dict[tuple[str, str], _Question] = {}  # FLARE is at work, which takes long with codecs
        self._open = False
        if cell is None or server is None or server.command_agent is None:
            return
        self._open = True
        self._process: Callable[[Message], Message] = server.command_agent.execute_command
        self._clients = server.client_manager.clients
        self._config: _Settings = fl_ctx.get_prop(FLContextKey.RUNNER).config
        self._interval = self._config.task_request_interval
        self._config.task_request_interval = AGAIN
        self._few = threading.Semaphore(_AT_ONCE)
        threading.Thread(target=self._watch, name="asking", daemon=True).start()
        # By keyword, for FLARE's cell looks at the channel's to tell whether its messages are streams, as these are.
        cell.register_request_cb(channel=CellChannel.SERVER_COMMAND, topic=ServerCommandNames.GET_TASK, cb=self.ask)

    def task_for(self, site: str) -> None:
        """There is a task for ``site``; if it has asked, it is answered now."""
        with self._changed:
            self._ready.add(site)
            kept = self._kept.pop(site, None)
        if kept:
            self._answer(kept)

    def no_task_for(self, site: str) -> None:
        """Its task is done, or no longer awaited."""
        with self._changed:
            self._ready.discard(site)

    def close(self) -> None:
        """Nothing is kept any more: the job ends."""
        with self._changed:
            if not self._open:
                return
            self._open = False
            kept = [self._kept.pop(site) for site in sorted(self._kept)]
            self._config.task_request_interval = self._interval
            self._changed.notify_all()
        for question in kept:
            self._answer(question)

    def ask(self, request: Message) -> Message | Future[Message]:
        """What FLARE's cell calls for a question; who is not known is answered by FLARE at once."""
        client = self._clients.get(request.get_header(CellMessageHeaderKeys.TOKEN))
        if client is None:
            return self._process(request)
        question = _Question(client.name, request, time.monotonic() + HOLD)
        with self._changed:
            keep = self._open and client.name not in self._ready and question.who not in self._answering
            if keep:
                self._kept.pop(client.name, None)  # of a process that is no more, or that took it for lost
                self._kept[client.name] = question
                self._changed.notify_all()
        if not keep:
            self._answer(question)
        return question.answer

    def _answer(self, question: _Question) -> None:
        """By FLARE, in a thread that no process waits for at its end. A process that took its question for lost
        meanwhile gets the answer for the one that it asked last, and FLARE makes no other."""
        with self._changed:
            under_way = question.who in self._answering
            self._answering[question.who] = question
        if not under_way:
            threading.Thread(target=self._by_flare, args=(question,), name="asking", daemon=True).start()

    def _by_flare(self, question: _Question) -> None:
        try:
            with self._few:
                reply = self._process(question.request)
        except Exception as error:  # who asked is told, as if the question had not been kept
            _LOG.exception("%s's question could not be answered", question.site)
            self._asked_last(question).set_exception(error)
        else:
            self._asked_last(question).set_result(reply)

    def _asked_last(self, question: _Question) -> Future[Message]:
        with self._changed:
            return self._answering.pop(question.who).answer

    def _watch(self) -> None:
        """Answer those that were kept for long enough."""
        while True:
            with self._changed:
                if not self._open:
                    return
                now = time.monotonic()
                over = [self._kept.pop(site) for site in sorted(self._kept) if self._kept[site].until <= now]
                if not over:
                    # The first that was kept is the first of the dictionary.
                    self._changed.wait(next((kept.until - now for kept in self._kept.values()), None))
            for question in over:
                self._answer(question)
