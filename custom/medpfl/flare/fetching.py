# SPDX-License-Identifier: Apache-2.0
"""The tensors of hospitals' answers, got as they arrive.

An answer comes in two steps: its text, with a reference in each tensor's place, and the tensors, which FLARE's receiver
asks for piece by piece. FLARE does both before its controller hears of the answer: of all hospitals that answer at the
same moment at once, whatever memory there is, and a hospital that is lost meanwhile ends the server's whole job. Here
the references are passed through (what FLARE does where a message is forwarded), and tensors are asked for in threads
of our own: of so many hospitals at a time as memory has room for, and a hospital that is lost misses a round.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from nvflare.apis.client import Client
from nvflare.apis.dxo import DXO
from nvflare.apis.fl_constant import FLContextKey, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.streaming.download_service import download_object
from nvflare.fuel.utils.fobs.decomposers.via_downloader import LazyDownloadRef

from medpfl.core.errors import MedPFLError, ProtocolError
from medpfl.core.mapped import give_back
from medpfl.flare.memory import BIG, CLEANER
from medpfl.flare.pieces import KIND, WAIT, Arrays, cut_for, may_take
from medpfl.flare.wire import reason_of
from medpfl.rounds.memory import budget, resident

_THREADS = 32
_DEEPEST = 8
"""Levels of a message in which tensors are looked for."""
_WHY = {
    ReturnCode.TIMEOUT: f"no piece of it came for {WAIT:.0f} seconds",
    ReturnCode.INVALID_REQUEST: "its process was started again meanwhile",
    ReturnCode.TARGET_UNREACHABLE: "its process cannot be reached",
    ReturnCode.COMM_ERROR: "its line broke",
}


class LostAnswer(ProtocolError):
    """A hospital's answer did not come whole: its process was killed meanwhile, its line broke, or memory was short."""

    def __init__(self, reason: str = ""):
        super().__init__("its answer did not come whole" + (f": {reason}" if reason else ""))


class Fetcher:
    """Gets the tensors of one job's answers.

    Answers that pass a filter at the server are complete when they arrive: FLARE gets them for the filter.
    """

    def __init__(self, fl_ctx: FLContext):
        self._cell: Cell | None = fl_ctx.get_engine().get_cell()
        self._job = str(fl_ctx.get_job_id())
        self._room = budget()
        self._largest: int | None = None
        self._hospitals = len(fl_ctx.get_engine().get_clients())
        give_back()  # what starting up took, a third of the process
        self._tidy = resident()
        cut_for(self._hospitals, self._room)
        if self._cell is not None and not _filtered(fl_ctx):  # None: nothing comes over a network
            self._cell.decode_pass_through_topics.add((CellChannel.SERVER_COMMAND, ServerCommandNames.SUBMIT_UPDATE))

    def size_is(self, size: int) -> None:
        """An answer of ``size`` bytes has been read."""
        self._largest = max(size, self._largest or 0)

    def tidy(self) -> None:
        """Where all hospitals' models do not fit into memory: what messages left behind is the system's again."""
        if self._room < 2 * self._hospitals * (self._largest or 0) and resident() > self._tidy + BIG:
            CLEANER.clean(BIG + 1)
            self._tidy = resident()

    def at_once(self) -> int:
        """How many answers there is room for: one, until the size of one is known."""
        return 1 if self._largest is None else min(_THREADS, max(1, self._room // max(1, self._largest)))

    def fetch(self, client: Client, result: Shareable, over: Signal) -> None:
        """Put the tensors in the places of their references.

        Args:
            client: whose answer it is.
            over: ends it.

        Raises:
            ProtocolError: they lie with somebody else.
            LostAnswer: they do not come.
        """
        place = FQCN.join([client.get_fqcn(), self._job])
        holders = list(_references(result, _DEEPEST))
        if not holders or self._cell is None:
            return
        batches = {(ref.fqcn, ref.ref_id, ref.dot) for _, _, ref in holders}
        if len(batches) > 1 or {(fqcn, dot) for fqcn, _, dot in batches} != {(place, KIND)}:
            raise ProtocolError("its answer's tensors lie elsewhere than in its own process of this job")
        self.tidy()
        consumer = Arrays(may_take(self._room))
        # Asked for twice, no more: who is lost holds up others where there is room for one answer.
        download_object(place, batches.pop()[1], WAIT, self._cell, consumer, abort_signal=over, max_retries=1)
        if consumer.error is not None or any(ref.item_id not in consumer.arrays for _, _, ref in holders):
            raise LostAnswer(_plain(consumer.error or "a tensor is missing"))
        for holder, key, ref in holders:
            holder[key] = consumer.arrays[ref.item_id]


class Answers:
    """The answers of one exchange.

    Args:
        arrived: called when there is something to ``take``; in any thread.
        share: seconds that a hospital's answer may take while others wait for its room.
    """

    def __init__(self, fetcher: Fetcher, arrived: Callable[[], None], share: float):
        self._fetcher, self._arrived, self._share = fetcher, arrived, share
        self._came: set[str] = set()
        self._waiting: deque[tuple[Client, Shareable]] = deque()  # filled by FLARE's threads, as _complete by ours
        self._at_work: dict[str, tuple[float, Signal]] = {}
        self._complete: deque[tuple[str, Shareable | MedPFLError]] = deque()

    def came(self, client: Client, result: Shareable) -> None:
        """An answer's text is here. Runs under FLARE's locks, which every heartbeat waits for: think later."""
        if client.name not in self._came:  # the first one counts, as long as it is not lost
            self._came.add(client.name)
            self._waiting.append((client, result))
            self._arrived()

    def again(self, site: str) -> None:
        """The hospital is asked once more: its next answer counts."""
        self._came.discard(site)

    def take(self) -> Iterator[tuple[str, Shareable | MedPFLError]]:
        """Hospitals whose answers are complete, each with its answer or why there is none; once, and its memory is
        counted as free when the next one is asked for."""
        while True:
            self._start()
            if not self._complete:
                return
            site, answer = self._complete.popleft()
            yield site, answer
            del answer
            del self._at_work[site]

    def stop(self) -> None:
        """No more is asked for."""
        for _, over in self._at_work.values():
            over.trigger("the exchange is over")

    def _start(self) -> None:
        while self._waiting and len(self._at_work) < self._fetcher.at_once():
            client, result = self._waiting.popleft()
            self._at_work[client.name] = time.monotonic(), (over := Signal())
            threading.Thread(target=self._fetch, args=(client, result, over), daemon=True).start()
        for began, over in self._at_work.values() if self._waiting else ():
            if time.monotonic() - began > self._share and not over.triggered:
                over.trigger("others wait")

    def _fetch(self, client: Client, result: Shareable, over: Signal) -> None:
        found: Shareable | MedPFLError = LostAnswer()
        try:
            self._fetcher.fetch(client, result, over)
            found = result
        except MedPFLError as error:
            found = LostAnswer("it came so slowly that others had to wait") if over.triggered else error
        finally:  # what another machine sent may be anything; an error that nobody thought of is in the log
            self._complete.append((client.name, found))
            self._arrived()


def _plain(reason: str) -> str:
    """Why a download broke off; FLARE ends its sentence with a code."""
    code = reason.rpartition(": ")[2]
    return _WHY.get(code, reason_of(reason))


def _references(value: object, depth: int) -> Iterator[tuple[dict[object, object], object, LazyDownloadRef]]:
    """The references of a message: what holds each, and under which name."""
    if isinstance(value, DXO):
        value = value.data
    if not isinstance(value, dict):
        return
    for key, one in list(value.items()):
        if isinstance(one, LazyDownloadRef):
            yield value, key, one
        elif depth:
            yield from _references(one, depth - 1)


def _filtered(fl_ctx: FLContext) -> bool:
    """Whether a filter acts on answers here."""
    scope = fl_ctx.get_prop(FLContextKey.SCOPE_OBJECT)
    runner = fl_ctx.get_prop(FLContextKey.RUNNER)
    tables = [runner.config.task_result_filters, *([scope.task_result_filters] if scope else [])]
    return any(listed for table in tables for listed in table.values())
