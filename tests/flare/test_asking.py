# SPDX-License-Identifier: Apache-2.0
"""Hospitals' questions for tasks are kept by the server until there is one, with real cells of FLARE."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from nvflare.apis.client import Client
from nvflare.apis.fl_constant import FLContextKey, ServerCommandNames
from nvflare.apis.shareable import Shareable
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.utils import new_cell_message
from nvflare.fuel.f3.message import Message
from nvflare.private.defs import CellMessageHeaderKeys
from nvflare.private.fed.client.communicator import Communicator
from nvflare.private.fed.server.server_runner import ServerRunnerConfig

from cells import Cells
from in_process import Harness
from medpfl.flare import asking as module
from medpfl.flare.asking import AGAIN, LOST, Asking, ask_again
from small_jobs import small_job, write_table_sites

WAIT = 0.5
"""Seconds in which a question that is not kept has long been answered here."""


class Server:
    """As much of FLARE's server as is asked for: its answers to questions, in the order of ``asked``."""

    def __init__(self, cells: Cells):
        self.cells = cells
        self.asked: list[str] = []
        self.takes = 0.0
        self.config = ServerRunnerConfig(600, 0.1, [], {}, {})
        clients = {name: Client(name, name) for name in ("anna", "berta")}
        server = SimpleNamespace(
            command_agent=SimpleNamespace(execute_command=self._answer), client_manager=SimpleNamespace(clients=clients)
        )
        engine = SimpleNamespace(get_cell=lambda: cells.server, server=server)
        runner = SimpleNamespace(config=self.config)
        self.context = SimpleNamespace(
            get_engine=lambda: engine, get_prop=lambda name: runner if name == FLContextKey.RUNNER else None
        )
        self.threads = ThreadPoolExecutor()

    def _answer(self, request: Message) -> Message:
        name = request.get_header(CellMessageHeaderKeys.TOKEN)
        self.asked.append(name)
        time.sleep(self.takes)
        if name == "nobody":
            raise ValueError("who is that?")
        reply = new_cell_message({}, Shareable({"answer": len(self.asked)}))
        reply.set_header(MessageHeaderKey.RETURN_CODE, ReturnCode.OK)
        return reply

    def ask(self, name: str, timeout: float = 20.0) -> Future[Message]:
        """A hospital asks, as FLARE's communicator does."""

        def asked() -> Message:
            reply: Message = self.cells.of(name).send_request(
                target="server",
                channel=CellChannel.SERVER_COMMAND,
                topic=ServerCommandNames.GET_TASK,
                request=new_cell_message({CellMessageHeaderKeys.TOKEN: name}, Shareable()),
                timeout=timeout,
            )
            return reply

        return self.threads.submit(asked)


@pytest.fixture
def server(cells: Cells) -> Iterator[Server]:
    made = Server(cells)
    yield made
    made.threads.shutdown()


@pytest.fixture
def asking(server: Server) -> Iterator[Asking]:
    made = Asking(server.context)
    yield made
    made.close()


def test_a_question_is_answered_when_there_is_a_task(server: Server, asking: Asking) -> None:
    anna, berta = server.ask("anna"), server.ask("berta")
    time.sleep(WAIT)
    assert not server.asked and not anna.done() and not berta.done()
    asking.task_for("berta")
    assert berta.result(WAIT).payload["answer"] == 1
    assert server.asked == ["berta"] and not anna.done()
    asking.task_for("anna")
    assert anna.result(WAIT).payload["answer"] == 2


def test_who_asks_when_there_is_a_task_is_answered_at_once(server: Server, asking: Asking) -> None:
    """And once more, for its process may have been killed; not when the task is done."""
    asking.task_for("anna")
    for _ in range(2):
        server.ask("anna").result(WAIT)
    asking.no_task_for("anna")
    late = server.ask("anna")
    time.sleep(WAIT)
    assert not late.done() and server.asked == ["anna", "anna"]


def test_a_question_is_not_kept_for_ever(server: Server, asking: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HOLD", 2 * WAIT)
    for name in ("anna", "berta"):  # the second after the watch has waited for the first
        asked, started = server.ask(name), time.monotonic()
        asked.result(10)
        assert WAIT < time.monotonic() - started < 4 * WAIT


def test_the_end_of_a_job_answers_all(server: Server) -> None:
    """Afterwards FLARE answers by itself, and hospitals ask as often as the job says."""
    asking = Asking(server.context)
    assert server.config.task_request_interval == AGAIN
    anna = server.ask("anna")
    time.sleep(WAIT)
    asking.close()
    anna.result(WAIT), server.ask("berta").result(WAIT)
    assert server.asked == ["anna", "berta"]
    assert server.config.task_request_interval == 0.1


def test_a_process_that_was_started_again_takes_the_others_place(server: Server, asking: Asking) -> None:
    server.ask("anna", timeout=2 * WAIT)
    time.sleep(WAIT)
    now = server.ask("anna")
    time.sleep(WAIT)
    assert not now.done() and not server.asked
    asking.task_for("anna")
    assert now.result(WAIT).payload["answer"] == 1


def test_an_answer_that_takes_long_is_made_once(server: Server, asking: Asking) -> None:
    """Of who took the question for lost and asks again; FLARE would encode the task for each."""
    server.takes = 4 * WAIT
    asking.task_for("anna")
    server.ask("anna", timeout=WAIT)
    time.sleep(2 * WAIT)
    assert server.ask("anna").result(4 * WAIT).payload["answer"] == 1
    assert server.asked == ["anna"]


def test_who_is_not_known_is_answered_by_flare(server: Server, asking: Asking) -> None:
    assert server.ask("clara").result(WAIT).payload["answer"] == 1


def test_an_error_in_an_answer_that_was_kept_is_told(
    server: Server, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked must not wait for it until it takes the server for lost."""
    monkeypatch.setattr(asking, "_clients", {"nobody": Client("nobody", "nobody")})
    asked = server.ask("nobody")
    time.sleep(WAIT)
    asking.task_for("nobody")
    assert asked.result(WAIT).get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.PROCESS_EXCEPTION


@pytest.mark.parametrize("said, patience, kept", [(None, 300.0, 60.0), (77.0, 300.0, 77.0), (None, 40.0, 40.0)])
def test_a_hospital_asks_again_when_its_question_is_lost(said: float | None, patience: float, kept: float) -> None:
    """And sends its result again when nothing tells it that it has come; the job or FLARE's file may say when."""
    communicator = Communicator({"client_name": "anna"}, timeout=patience)
    runner = SimpleNamespace(submit_task_result_timeout=said)
    engine = SimpleNamespace(client=SimpleNamespace(communicator=communicator))
    ask_again(SimpleNamespace(get_engine=lambda: engine, get_prop=lambda name: runner))
    assert communicator.timeout == LOST > module.HOLD
    assert runner.submit_task_result_timeout == kept


@pytest.mark.slow
def test_every_exchange_tells_of_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every hospital that is asked, and that its answer has come."""
    told: list[tuple[str, str]] = []
    lock = threading.Lock()

    def spy(kind: str, site: str) -> None:
        with lock:
            told.append((kind, site))

    monkeypatch.setattr(Asking, "task_for", lambda self, site: spy("task", site))
    monkeypatch.setattr(Asking, "no_task_for", lambda self, site: spy("none", site))
    rounds, sites = 2, ["anna", "berta"]
    Harness(small_job(rounds), write_table_sites(tmp_path / "sites", sites), tmp_path).run()
    exchanges = rounds + 3  # init, rounds, validate, finish
    for site in sites:
        mine = [kind for kind, other in told if other == site]
        # An answer ends it, and the exchange's end once more.
        assert mine == ["task", "none", "none"] * exchanges
