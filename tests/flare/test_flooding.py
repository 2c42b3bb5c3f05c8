# SPDX-License-Identifier: Apache-2.0
"""What a server keeps of messages that are not whole: real cells of FLARE, and FLARE's own book of what it receives."""

import time
from collections.abc import Callable, Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import TargetMessage
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessagePropKey
from nvflare.fuel.f3.endpoint import Endpoint
from nvflare.fuel.f3.message import Message
from nvflare.fuel.f3.stats_pool import CounterPool, HistPool, StatsPoolManager
from nvflare.fuel.f3.streaming import byte_receiver
from nvflare.fuel.f3.streaming.byte_receiver import RxTask
from nvflare.fuel.f3.streaming.stream_const import STREAM_CHANNEL, STREAM_DATA_TOPIC, StreamDataType, StreamHeaderKey
from nvflare.fuel.f3.streaming.stream_types import StreamError
from nvflare.fuel.utils.fobs.decomposers.via_downloader import ViaDownloaderDecomposer
from nvflare.private.defs import new_cell_message

from cells import Cells
from medpfl.flare import flooding
from medpfl.flare.commands import refuse_floods
from medpfl.flare.executor import SiteExecutor
from medpfl.flare.flooding import Stalled, Unfinished
from medpfl.flare.pieces import Travelling
from medpfl.methods.fedavg import FedAvg
from medpfl.tasks.tabular import Tabular

MB = 2**20
TOPIC = "flooded"


@pytest.fixture
def server(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    """A server that takes messages of a topic, with no filters but the test's, and no watch that outlives it."""
    monkeypatch.setattr("medpfl.flare.commands.give_up_stalled", lambda: None)
    asks = ViaDownloaderDecomposer._download_from_remote_cell  # so that it is FLARE's own again after the test
    monkeypatch.setattr(ViaDownloaderDecomposer, "_download_from_remote_cell", getattr(asks, "__wrapped__", asks))
    for kind, verb in ((HistPool, "record_value"), (CounterPool, "increment")):
        counts = getattr(kind, verb)
        monkeypatch.setattr(kind, verb, getattr(counts, "__wrapped__", counts))
    kinds = (cells.server.core_cell.in_filter_reg, cells.server.core_cell.in_req_filter_reg)
    before = [kind.reg for kind in kinds]
    for kind in kinds:
        kind.reg = {}
    cells.server.register_request_cb(channel=CellChannel.AUX_COMMUNICATION, topic=TOPIC, cb=lambda _: None)
    yield cells.server
    for kind, reg in zip(kinds, before, strict=True):
        kind.reg = reg
    for task in kept():
        task.stop(StreamError("the test is over"), notify=False)  # or its threads would wait for five minutes
        task._remove_task()


def piece(name: int, number: int, size: int = MB, ends: bool = False) -> Message:
    """As FLARE cuts messages."""
    headers = {
        StreamHeaderKey.STREAM_ID: name,
        StreamHeaderKey.SEQUENCE: number,
        StreamHeaderKey.DATA_TYPE: StreamDataType.FINAL if ends else StreamDataType.CHUNK,
        StreamHeaderKey.CHANNEL: CellChannel.AUX_COMMUNICATION,
        StreamHeaderKey.TOPIC: TOPIC,
    }
    return Message(headers, bytes(size))


def send(cell: Cell, message: Message) -> None:
    cell.core_cell.fire_and_forget(STREAM_CHANNEL, STREAM_DATA_TOPIC, "server", message)


def kept(origin: str = "flood") -> list[RxTask]:
    """FLARE's own list of messages of which pieces are awaited."""
    return [task for (name, _), task in list(RxTask.rx_task_map.items()) if name.startswith(origin)]


def settled(count: Callable[[], int]) -> int:
    """The number when it has not changed for a second."""
    before, since = -1, time.monotonic()
    while time.monotonic() - since < 1:
        if count() != before:
            before, since = count(), time.monotonic()
        time.sleep(0.05)
    return before


def bytes_kept() -> int:
    return sum(len(piece[1] or b"") for task in kept() for piece in [*task.chunks, *task.out_seq_chunks.values()])


@pytest.mark.parametrize("bundled", [False, True])
def test_a_hospital_fills_no_memory_with_pieces(cells: Cells, server: Cell, bundled: bool) -> None:
    """Of messages whose first piece never comes FLARE kept a thousand pieces each, for ever."""
    hospital = cells.of("flood")

    def flood(names: range) -> int:
        for name in names:
            if bundled:  # past FLARE's first kind of filter
                inside = TargetMessage("server", STREAM_CHANNEL, STREAM_DATA_TOPIC, piece(name, 1)).to_dict()
                bulk = new_cell_message({}, [inside])
                hospital.core_cell.fire_and_forget(CellChannel.CELLNET, "bulk", "server", bulk)
            else:
                send(hospital, piece(name, 1))
        return settled(bytes_kept)

    first = 100 * (1 + bundled)
    assert flood(range(first, first + 20)) == 20 * MB
    refuse_floods(server, Unfinished(8 * MB))
    assert flood(range(first + 30, first + 50)) == 27 * MB


def test_one_hospital_does_not_take_all_threads(cells: Cells, server: Cell) -> None:
    """Each message that has begun holds two of FLARE's threads, of 64 and 128, for five minutes."""
    hospital, came = cells.of("flood"), Event()
    server.register_request_cb(channel=CellChannel.AUX_COMMUNICATION, topic=TOPIC, cb=lambda _: came.set())
    refuse_floods(server, Unfinished())
    for name in range(1000, 1080):
        send(hospital, piece(name, 0, 10))
    assert settled(lambda: len(kept())) == 32
    cells.of("other").fire_and_forget(
        channel=CellChannel.AUX_COMMUNICATION, topic=TOPIC, targets="server", message=new_cell_message({}, "a message")
    )
    assert came.wait(20)


def test_what_is_whole_does_not_count(cells: Cells, server: Cell) -> None:
    came: list[int] = []
    channel = CellChannel.AUX_COMMUNICATION
    server.register_request_cb(channel=channel, topic=TOPIC, cb=lambda message: came.append(len(message.payload)))
    refuse_floods(server, Unfinished(8 * MB))
    for number in range(6):
        message = new_cell_message({}, bytes(6 * MB))
        cells.of("honest").fire_and_forget(channel=channel, topic=TOPIC, targets="server", message=message)
        deadline = time.monotonic() + 20
        while len(came) <= number and time.monotonic() < deadline:
            time.sleep(0.02)
    assert came == [6 * MB] * 6


def at_a_hospital(_: Cell) -> None:
    context = FLContext()
    context.get_engine = lambda **_: None  # type: ignore[method-assign]
    SiteExecutor(FedAvg(), Tabular(dataset="blood")).handle_event(EventType.ABOUT_TO_START_RUN, context)


@pytest.mark.parametrize("closed", [refuse_floods, at_a_hospital])
def test_arrays_that_do_not_say_their_size_are_not_asked_for(
    cells: Cells, server: Cell, closed: Callable[[Cell], None]
) -> None:
    """FLARE asked a message's sender for more of its arrays as long as there was more, whatever the message was."""
    came: list[np.ndarray] = []
    channel = CellChannel.AUX_COMMUNICATION
    server.register_request_cb(channel=channel, topic=TOPIC, cb=lambda message: came.append(message.payload["a"]))

    def said(array: np.ndarray) -> int:
        message = new_cell_message({}, {"a": array})
        cells.of("arrays").fire_and_forget(channel=channel, topic=TOPIC, targets="server", message=message)
        return settled(lambda: len(came))

    assert said(np.ones(3)) == 1
    for _ in range(2):
        closed(server)
    assert said(np.ones(3)) == 1
    assert said(np.ones(3).view(Travelling)) == 2 and came[1].tolist() == [1, 1, 1]


def test_the_names_of_messages_are_not_kept_for_ever(cells: Cells, server: Cell) -> None:
    """FLARE counts messages by their channel and topic, which may be a megabyte long, and by where they say they began;
    each name stayed in the server's memory."""
    pools = StatsPoolManager.pools.values()

    def names() -> list[str]:
        return [name for pool in pools for name in getattr(pool, "cat_bins", None) or getattr(pool, "cat_counters", {})]

    def send_named(first: int) -> int:
        for number in range(first, first + 5):
            cells.of("named").core_cell.fire_and_forget("named", f"{number}" + 100_000 * "x", "server", Message())
        return settled(lambda: sum("xxx" in name for name in names()))

    before = send_named(0)
    assert before >= 5
    refuse_floods(server)
    refuse_floods(server)
    assert send_named(5) == before
    assert flooding.OTHERS in names()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(pieces: Unfinished, name: int, number: int, ends: bool = False, certified: str = "hospital-a") -> str | None:
    return pieces.too_much(arrived(piece(name, number, MB, ends), certified))


def arrived(
    message: Message, certified: str = "hospital-a", origin: str = "hospital-a.job", target: str = "server.job"
) -> Any:
    """As FLARE shows a message to a filter."""
    message.add_headers(
        {
            MessageHeaderKey.ORIGIN: origin,
            MessageHeaderKey.DESTINATION: target,
            MessageHeaderKey.CHANNEL: STREAM_CHANNEL,
            MessageHeaderKey.TOPIC: STREAM_DATA_TOPIC,
        }
    )
    message.set_prop(MessagePropKey.ENDPOINT, Endpoint(origin))
    message.set_prop(MessagePropKey.COMMON_NAME, certified)
    return message


def test_every_hospital_has_its_own_bound_whatever_it_calls_its_processes() -> None:
    pieces = Unfinished(4 * MB)
    assert [shown(pieces, name, 1) is None for name in range(5)] == [True, True, True, False, False]
    assert "would be more than 4194304 bytes" in str(shown(pieces, 9, 1))
    other = arrived(piece(9, 1), origin="hospital-a.another")
    assert pieces.too_much(other) is not None
    assert shown(pieces, 9, 1, certified="hospital-b") is None


def test_a_piece_that_is_shown_twice_counts_once_and_one_that_is_sent_twice_twice() -> None:
    pieces, one = Unfinished(4 * MB), arrived(piece(1, 1))
    assert [pieces.too_much(one) for _ in range(9)] == [None] * 9
    assert [shown(pieces, 1, 1) is None for _ in range(3)] == [True, True, False]


def test_pieces_come_in_any_order_and_the_last_one_is_the_highest() -> None:
    """FLARE keeps a piece beyond one that was called the last for ever."""
    pieces = Unfinished(4 * MB)
    for order in ((2, 0, 1), (0, 1, 2), (1, 2, 0)):
        assert [shown(pieces, 1, number, number == 2) for number in order] == [None] * 3
    for number, ends in ((3, True), (1, True), (0, False)):
        assert shown(pieces, 2, number, ends) is None
    assert shown(pieces, 3, 1) is not None
    beyond = Unfinished(4 * MB)
    for number, ends in ((1, True), (7, False), (8, False)):
        assert shown(beyond, 2, number, ends) is None
    assert shown(beyond, 3, 1) is not None


def test_what_flare_has_given_up_does_not_count() -> None:
    clock = Clock()
    pieces = Unfinished(4 * MB, clock)
    assert [shown(pieces, name, 0) is None for name in range(4)] == [True, True, True, False]
    clock.now = 2 * byte_receiver.READ_TIMEOUT - 1
    assert shown(pieces, 5, 1) is not None
    clock.now += 2
    assert shown(pieces, 5, 1) is None


@pytest.mark.parametrize("number", [None, "1", [1], 1.0, -1])
def test_what_is_no_piece_is_refused(number: Any) -> None:
    message = arrived(piece(1, 1))
    message.set_header(StreamHeaderKey.SEQUENCE, number)
    assert Unfinished().too_much(message) == "it is no piece of a message"


def test_the_server_s_own_processes_and_whole_messages_are_not_counted() -> None:
    pieces = Unfinished(MB // 2)
    assert pieces.too_much(arrived(piece(1, 0), "", "server.job", "hospital-a.job")) is None
    whole = arrived(piece(1, 0))
    whole.set_header(MessageHeaderKey.CHANNEL, CellChannel.SERVER_MAIN)
    assert pieces.too_much(whole) is None


def test_messages_that_stand_still_are_given_up(cells: Cells, server: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose first piece never comes, and those with pieces beyond the last one."""
    monkeypatch.setattr(flooding, "_patience", lambda: 100.0)
    hospital = cells.of("flood")
    for name, number, ends in ((2001, 1, False), (2002, 3, True), (2002, 0, False), (2002, 1, True), (2003, 1, False)):
        send(hospital, piece(name, number, 10, ends))
        settled(bytes_kept)
    assert len(kept()) == 3
    stalled = Stalled()
    stalled.give_up(0.0)
    send(hospital, piece(2003, 2, 10))
    settled(bytes_kept)
    stalled.give_up(60.0)
    stalled.give_up(115.0)
    assert {task.sid for task in kept() if task.failed} == {2001, 2002}
    stalled.give_up(171.0)
    assert all(task.failed for task in kept())
    deadline = time.monotonic() + 20
    while kept() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not kept()
