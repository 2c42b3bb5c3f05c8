# SPDX-License-Identifier: Apache-2.0
"""Answers' tensors are fetched from real cells of FLARE: from the sender only, as many at a time as memory has room."""

import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from nvflare.apis.client import Client, ClientPropKey
from nvflare.apis.dxo import from_shareable
from nvflare.apis.fl_constant import ServerCommandNames
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet.defs import CellChannel
from nvflare.fuel.f3.cellnet.utils import make_reply, new_cell_message
from nvflare.fuel.f3.message import Message

from cells import JOB, Cells
from medpfl.core.errors import MedPFLError, ProtocolError
from medpfl.flare import fetching, pieces
from medpfl.flare.fetching import Answers, Fetcher, LostAnswer
from medpfl.flare.filters import DecodeUpdate, take_decoding
from medpfl.flare.pieces import Pieces
from medpfl.flare.wire import put
from medpfl.rounds.memory import WANTED
from medpfl.rounds.messages import Message as OurMessage
from medpfl.rounds.protocol.replies import TrainReply

VALUES = 300_000


class Federation:
    """What a server's job hears of hospitals' answers."""

    def __init__(self, cells: Cells) -> None:
        self.cells, self.server = cells, cells.server
        self.came: dict[str, Shareable] = {}
        self.arrived = threading.Event()
        self.server.register_request_cb(
            channel=CellChannel.SERVER_COMMAND, topic=ServerCommandNames.SUBMIT_UPDATE, cb=self._submitted
        )

    def _submitted(self, message: Message) -> Message:
        self.came[message.get_header("medpfl_test")] = message.payload
        self.arrived.set()
        return make_reply("ok")

    def hospital(self, name: str) -> Client:
        self.cells.of(name)
        client = Client(name, name)
        client.set_prop(ClientPropKey.FQCN, name)
        return client

    def submit(self, client: Client, content: Shareable) -> Shareable:
        """What the server's job hears of an answer."""
        self.cells.of(client.name).send_request(
            channel=CellChannel.SERVER_COMMAND,
            target="server",
            topic=ServerCommandNames.SUBMIT_UPDATE,
            request=new_cell_message({"medpfl_test": client.name}, content),
            timeout=20.0,
        )
        return self.came[client.name]

    def context(self, **configured: object) -> SimpleNamespace:
        """As much of FLARE's context as is asked for."""
        engine = SimpleNamespace(get_cell=lambda: self.server, get_clients=lambda: [])
        runner = SimpleNamespace(config=SimpleNamespace(task_result_filters=configured))
        return SimpleNamespace(
            get_engine=lambda: engine,
            get_job_id=lambda: JOB,
            get_prop=lambda name: runner if "runner" in name else None,
        )


@pytest.fixture
def federation(cells: Cells) -> Federation:
    cells.server.decode_pass_through_topics.clear()
    return Federation(cells)


def answer(seed: int, values: int = VALUES) -> Shareable:
    slots = {"model": {"weight": torch.from_numpy(np.random.default_rng(seed).normal(size=values).astype("float32"))}}
    return put(OurMessage(TrainReply(round=1, metrics=(), loss={}, notes=(), seconds=1.0), slots), Shareable())


def weight(content: Shareable) -> np.ndarray:
    found: np.ndarray = from_shareable(content).data["model::weight"]
    return found


def test_an_answers_tensors_come_when_they_are_asked_for(federation: Federation) -> None:
    fetcher = Fetcher(federation.context())
    client = federation.hospital("anna")
    came = federation.submit(client, answer(1))
    assert not isinstance(weight(came), np.ndarray)  # a reference stands in its place
    fetcher.fetch(client, came, Signal())
    assert type(weight(came)) is np.ndarray
    assert weight(came).tobytes() == weight(answer(1)).tobytes()


def test_answers_that_pass_a_filter_here_are_complete(federation: Federation) -> None:
    fetcher = Fetcher(federation.context(train=["a filter"]))
    client = federation.hospital("anna")
    came = federation.submit(client, answer(1))
    assert type(weight(came)) is np.ndarray
    fetcher.fetch(client, came, Signal())
    assert weight(came).tobytes() == weight(answer(1)).tobytes()


def test_answers_that_the_controller_decodes_are_fetched_by_it(federation: Federation) -> None:
    """A job's codec filter is taken off their way; another filter stays on it."""
    one = [DecodeUpdate()]  # FLARE has one list for all tasks of a line in the job's file
    context = federation.context(**{"train/in": one, "refine/in": one, "init/in": [*one, "another"]})
    assert take_decoding(context) == {"train", "refine", "init"}
    table = context.get_prop("runner").config.task_result_filters
    assert table == {"train/in": [], "refine/in": [], "init/in": ["another"]}
    Fetcher(context)
    client = federation.hospital("anna")
    assert type(weight(federation.submit(client, answer(1)))) is np.ndarray
    table["init/in"].clear()
    fetcher = Fetcher(context)
    came = federation.submit(client, answer(1))
    assert not isinstance(weight(came), np.ndarray)
    fetcher.fetch(client, came, Signal())
    assert weight(came).tobytes() == weight(answer(1)).tobytes()


def test_a_piece_that_was_lost_on_the_way_is_asked_for_again_soon(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FLARE alone waits ten minutes for it, at a hospital that fetches its task, and where the server has filters."""
    monkeypatch.setattr(pieces, "WAIT", 1.0)
    plain, lost = Pieces.produce, threading.Event()

    def once_lost(self: Pieces, state: dict[str, object], requester: str) -> object:
        if not lost.is_set():
            lost.set()
            time.sleep(10)
        return plain(self, state, requester)

    monkeypatch.setattr(Pieces, "produce", once_lost)
    started = time.monotonic()
    came = federation.submit(federation.hospital("anna"), answer(5))
    assert lost.is_set() and time.monotonic() - started < 8
    assert weight(came).tobytes() == weight(answer(5)).tobytes()


def test_tensors_that_lie_with_another_hospital_are_refused(federation: Federation) -> None:
    fetcher = Fetcher(federation.context())
    anna, berta = federation.hospital("anna"), federation.hospital("berta")
    came = federation.submit(berta, answer(2))
    with pytest.raises(ProtocolError, match="lie elsewhere than in its own process"):
        fetcher.fetch(anna, came, Signal())
    mixed = federation.submit(anna, answer(1))
    from_shareable(mixed).data["model::other"] = weight(came)
    with pytest.raises(ProtocolError, match="lie elsewhere"):
        fetcher.fetch(anna, mixed, Signal())


def test_more_than_may_be_taken_is_refused(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    fetcher = Fetcher(federation.context())
    monkeypatch.setattr(fetching, "may_take", lambda room: 4 * VALUES - 1)
    client = federation.hospital("anna")
    with pytest.raises(ProtocolError, match=r"did not come whole: .* it has 1 MiB, and 1 MiB may be taken for it"):
        fetcher.fetch(client, federation.submit(client, answer(1)), Signal())


def test_a_hospital_that_is_gone_costs_its_answer_only(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "WAIT", 1.0)
    fetcher, arrived = Fetcher(federation.context()), threading.Event()
    answers = Answers(fetcher, arrived.set, 60.0)
    fetcher.size_is(1)
    anna, dora = federation.hospital("anna"), federation.hospital("dora")
    federation.submit(anna, answer(1)), federation.submit(dora, answer(2))
    federation.cells.of("dora").stop()
    for client in (anna, dora):
        answers.came(client, federation.came[client.name])
    found = all_of(answers, 1, arrived)
    answers.stop()
    found |= all_of(answers, 1, arrived)
    assert isinstance(found["anna"], Shareable) and weight(found["anna"]).tobytes() == weight(answer(1)).tobytes()
    assert isinstance(found["dora"], LostAnswer) and "did not come whole" in str(found["dora"])


def test_a_hospital_that_sends_its_answer_for_ever_does_not_keep_the_others_waiting(
    federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One answer at a time is fetched as long as no size is known: in a job's first exchange."""
    plain, fetcher, arrived = Pieces.produce, Fetcher(federation.context()), threading.Event()
    anna, emil = federation.hospital("anna"), federation.hospital("emil")
    federation.submit(anna, answer(1)), federation.submit(emil, answer(2))

    def endless(self: Pieces, state: dict[str, object], requester: str) -> object:
        if state and weight_of(self).tobytes() == weight(answer(2)).tobytes():
            time.sleep(0.1)
            return pieces.ProduceRC.OK, [], state
        return plain(self, state, requester)

    def weight_of(sent: Pieces) -> np.ndarray:
        return next(iter(sent.base_obj.values()))

    monkeypatch.setattr(Pieces, "produce", endless)
    answers = Answers(fetcher, arrived.set, 2.0)
    for client in (emil, anna):
        answers.came(client, federation.came[client.name])
    found = all_of(answers, 2, arrived)
    assert isinstance(found["anna"], Shareable) and weight(found["anna"]).tobytes() == weight(answer(1)).tobytes()
    assert isinstance(found["emil"], LostAnswer) and "so slowly that others had to wait" in str(found["emil"])


def test_a_process_that_was_started_again_has_nothing_of_the_answer(federation: Federation) -> None:
    fetcher, client = Fetcher(federation.context()), federation.hospital("anna")
    came = federation.submit(client, answer(1))
    from_shareable(came).data["model::weight"].ref_id = "of the process before"
    with pytest.raises(LostAnswer, match="did not come whole: its process was started again meanwhile"):
        fetcher.fetch(client, came, Signal())


@pytest.mark.parametrize("room, at_once", [("0", 1), ("3", 2), ("100", 3)])
def test_as_many_at_a_time_as_there_is_room_for(
    federation: Federation, monkeypatch: pytest.MonkeyPatch, room: str, at_once: int
) -> None:
    monkeypatch.setenv(WANTED, room)  # MiB; an answer has 1.2 MB
    fetcher, arrived = Fetcher(federation.context()), threading.Event()
    fetcher.size_is(4 * VALUES)
    download, under_way, most = fetching.download_object, set(), []

    def watched(place: str, *given: object, **named: object) -> None:
        under_way.add(place)
        most.append(len(under_way))
        time.sleep(0.3)
        download(place, *given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(fetching, "download_object", watched)
    answers = Answers(fetcher, arrived.set, 60.0)
    for number, name in enumerate(("anna", "berta", "clara")):
        client = federation.hospital(name)
        answers.came(client, federation.submit(client, answer(number)))
    found = all_of(answers, 3, arrived, lambda name: under_way.discard(f"{name}.{JOB}"))
    assert max(most) == at_once
    for number, name in enumerate(("anna", "berta", "clara")):
        one = found[name]
        assert isinstance(one, Shareable) and weight(one).tobytes() == weight(answer(number)).tobytes()


def test_the_first_answer_of_a_hospital_counts_until_it_is_asked_again(federation: Federation) -> None:
    fetcher, arrived = Fetcher(federation.context()), threading.Event()
    answers = Answers(fetcher, arrived.set, 60.0)
    client = federation.hospital("anna")
    answers.came(client, federation.submit(client, answer(1)))
    answers.came(client, federation.submit(client, answer(2)))
    found = all_of(answers, 1, arrived)["anna"]
    assert isinstance(found, Shareable) and weight(found).tobytes() == weight(answer(1)).tobytes()
    time.sleep(0.1)
    assert not list(answers.take())
    answers.again("anna")
    answers.came(client, federation.submit(client, answer(3)))
    found = all_of(answers, 1, arrived)["anna"]
    assert isinstance(found, Shareable) and weight(found).tobytes() == weight(answer(3)).tobytes()


def all_of(
    answers: Answers, count: int, arrived: threading.Event, read: Callable[[str], None] = lambda name: None
) -> dict[str, Shareable | MedPFLError]:
    """What a controller does: take answers until all are there."""
    found: dict[str, Shareable | MedPFLError] = {}
    until = time.monotonic() + 60
    while len(found) < count and time.monotonic() < until:
        for name, one in answers.take():
            found[name] = one
            read(name)
        arrived.wait(0.2)
        arrived.clear()
    return found
