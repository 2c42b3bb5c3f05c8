# SPDX-License-Identifier: Apache-2.0
"""How much the server keeps for one hospital of messages that are not whole yet.

FLARE 2.9 sends a message in pieces and keeps those of each message until the last one is there; of one whose first
piece never comes, or whose last one comes twice, for ever. For each message that has begun, threads of two pools wait.
It counts neither for whom: a single hospital could fill the memory, or take all threads, of the server and of each job.

All that comes from outside passes the server's own process, so it is counted there (``Unfinished``); that process and
each job's give up what FLARE would keep (``give_up_stalled``).

Nor does FLARE bound arrays: a message may refer to some that lie with its sender, and whoever reads it asks for pieces
of these as long as there are more. Where MedPFL reads messages it asks for those of its own kind, which says its size
before it comes (``refuse_arrays``).

Nor does it bound the names by which it counts messages, each as long as a header may be: they are kept for ever
(``bound_statistics``).
"""

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from nvflare.fuel.f3.cellnet.defs import MessageHeaderKey, MessagePropKey
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.comm_config import CommConfigurator
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.stats_pool import CounterPool, HistPool
from nvflare.fuel.f3.streaming.byte_receiver import READ_TIMEOUT, RxTask
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamDataType, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import StreamError
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer

from medpfl.flare.pieces import TravellingDecomposer

_MOST_BEGUN = 32
"""Messages of one hospital at a time: FLARE's smaller pool has 64 threads."""
_ASIDE = 1024
"""Bytes that a piece takes beside its content."""
_MOST_KINDS, _LONGEST_KIND = 5000, 300
"""Of messages in one of FLARE's statistics, and their names: a job has some hundred."""
OTHERS = "others"
_COUNTED = "medpfl_counted"
_LOG = logging.getLogger(__name__)

_Key = tuple[str, str, int | str]


def _patience() -> float:
    """Seconds without a piece after which FLARE gives up a message that it waits for."""
    return float(CommConfigurator().get_streaming_read_timeout(READ_TIMEOUT))


@dataclass
class _Begun:
    """A message of which not all pieces have been seen: their numbers, the highest of these, and that of the last
    piece, if it is known."""

    size: int = 0
    seen: set[int] = field(default_factory=set)
    highest: int = 0
    last: int = -1
    at: float = 0.0

    def whole(self) -> bool:
        return self.highest == self.last == len(self.seen) - 1


@dataclass
class _Sender:
    open: dict[_Key, _Begun] = field(default_factory=dict)
    size: int = 0

    def drop(self, key: _Key) -> None:
        self.size -= self.open.pop(key).size

    def forget(self, before: float) -> None:
        for key in [key for key, one in self.open.items() if one.at < before]:
            self.drop(key)

    def begun(self) -> int:
        return sum(0 in one.seen for one in self.open.values())


class Unfinished:
    """The pieces that came from each hospital, or relay (by the certificate of who is connected), of messages that are
    not whole.

    Args:
        most: bytes of one hospital; None: what FLARE takes as one message (4 GiB, if the kit says nothing else).
        clock: seconds.
    """

    def __init__(self, most: int | None = None, clock: Callable[[], float] = time.monotonic):
        self._most = most or CommConfigurator().get_streaming_max_blob_size()
        self._kept = 2 * _patience()  # the job's process has given them up by then
        self._clock = clock
        self._lock = threading.Lock()
        self._senders: dict[str, _Sender] = {}

    def too_much(self, message: Message) -> str | None:
        """Why a piece is not taken; None: it is, or it is none. One that is shown again (FLARE has two kinds of
        filters) is not counted again; one that is sent again is."""
        keys = (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION, MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC)
        origin, target, *what = (str(message.get_header(key)) for key in keys)
        if what != [STREAM_CHANNEL, STREAM_DATA_TOPIC] or FQCN.get_root(origin) == FQCN.ROOT_SERVER:
            return None
        number, name = (message.get_header(key) for key in (StreamHeaderKey.SEQUENCE, StreamHeaderKey.STREAM_ID))
        if message.get_header(StreamHeaderKey.ERROR_MSG) or message.get_prop(_COUNTED):
            return None
        if not isinstance(number, int) or number < 0 or not isinstance(name, int | str):
            return "it is no piece of a message"
        neighbour = message.get_prop(MessagePropKey.ENDPOINT)  # none of what came in a bundle
        speaker = message.get_prop(MessagePropKey.COMMON_NAME) or (neighbour.name if neighbour else origin)
        ends = message.get_header(StreamHeaderKey.DATA_TYPE) == StreamDataType.FINAL
        size = _ASIDE + (len(message.payload) if message.payload else 0)
        with self._lock:
            sender = self._senders.setdefault(FQCN.get_root(speaker), _Sender())
            why = self._refused(sender, size, number == 0 and not ends)
            if why is None:
                self._count(sender, (origin, target, name), number, ends, size)
                message.set_prop(_COUNTED, True)
        return why

    def _refused(self, sender: _Sender, size: int, begins: bool) -> str | None:
        for again in (True, False):
            if sender.size + size > self._most:
                why = f"of this hospital's messages that are not whole there would be more than {self._most} bytes"
            elif begins and sender.begun() >= _MOST_BEGUN:
                why = f"{_MOST_BEGUN} messages of this hospital have begun and are not whole"
            else:
                return None
            if again:
                sender.forget(self._clock() - self._kept)
        return why

    def _count(self, sender: _Sender, key: _Key, number: int, ends: bool, size: int) -> None:
        one = sender.open.setdefault(key, _Begun())
        one.seen.add(number)
        one.highest, one.last = max(one.highest, number), max(one.last, number if ends else -1)
        one.size, one.at = one.size + size, self._clock()
        sender.size += size
        if one.whole():
            sender.drop(key)


class Stalled:
    """The messages that this process receives, and since when nothing came of each."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, int], tuple[tuple[int, int], float]] = {}

    def give_up(self, now: float) -> None:
        """Those of which nothing came for somewhat longer than FLARE itself would wait."""
        with RxTask.map_lock:
            tasks = dict(RxTask.rx_task_map)
        found: dict[tuple[str, int], tuple[tuple[int, int], float]] = {}
        for key, task in tasks.items():
            if task.completed or task.failed:  # FLARE forgets these
                continue
            there = (task.received_offset, len(task.out_seq_chunks))
            before, since = self._since.get(key, (there, now))
            found[key] = there, (since if before == there else now)
            if now - found[key][1] > 1.1 * _patience():
                task.stop(StreamError(f"{task}: no further piece of it came"))
        self._since = found


def give_up_stalled() -> None:
    """From now on this process gives up messages of which nothing comes any more; once for a process."""
    stalled = Stalled()

    def watch() -> None:
        while True:
            time.sleep(_patience() / 5)
            try:
                stalled.give_up(time.monotonic())
            except Exception:  # noqa: BLE001 (whatever an ill-meant message made of one, the others are given up)
                _LOG.exception("messages that stand still could not be given up")

    threading.Thread(target=watch, name="stalled", daemon=True).start()


def refuse_arrays() -> None:
    """From now on this process asks for no arrays that a message refers to, but for those of ``flare.pieces``; safe to
    repeat."""
    asks = ViaDownloaderDecomposer._download_from_remote_cell
    if hasattr(asks, "__wrapped__"):
        return

    @functools.wraps(asks)
    def ask(how: ViaDownloaderDecomposer, *args: object, **named: object) -> object:
        if not isinstance(how, TravellingDecomposer):
            raise RuntimeError(f"arrays that come by {type(how).__name__} are not asked for here")
        return asks(how, *args, **named)

    ViaDownloaderDecomposer._download_from_remote_cell = ask


def bound_statistics() -> None:
    """From now on this process counts messages of unusual names, or of ever more of them, as ``OTHERS``; safe to
    repeat."""
    for kind, verb, held in ((HistPool, "record_value", "cat_bins"), (CounterPool, "increment", "cat_counters")):
        _bound_names(kind, verb, held)


def _bound_names(kind: type, verb: str, held: str) -> None:
    counts = getattr(kind, verb)
    if hasattr(counts, "__wrapped__"):
        return

    @functools.wraps(counts)
    def count(pool: object, category: str, *args: object, **named: object) -> object:
        return counts(pool, _kept_name(getattr(pool, held), category), *args, **named)

    setattr(kind, verb, count)


def _kept_name(known: Mapping[str, object], name: str) -> str:
    return name if name in known or (len(known) < _MOST_KINDS and len(name) <= _LONGEST_KIND) else OTHERS
