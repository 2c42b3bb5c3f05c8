# SPDX-License-Identifier: Apache-2.0
"""What others in a federation may ask of a hospital's process past the console: FLARE's own agent is asked as the
server asks it, but without the header by which FLARE would look at the hospital's policy."""

import json
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.event_type import EventType
from nvflare.apis.fl_constant import FLContextKey, ServerCommandNames
from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.core_cell import TargetMessage
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, ReturnCode
from nvflare.fuel.hci.server.sess import SessionManager
from nvflare.fuel.sec.audit import Auditor, AuditService
from nvflare.private.admin_defs import Message
from nvflare.private.defs import RequestHeader, SysCommandTopic, TrainingTopic, new_cell_message
from nvflare.private.fed.client import training_cmds
from nvflare.private.fed.client.admin import FedAdminAgent
from nvflare.private.fed.client.client_engine import ClientEngine
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.stream_runner import TOPIC_STREAM_REQUEST

from cells import Cells
from medpfl.flare import commands, executor, starting
from medpfl.flare.allow import allow
from medpfl.flare.commands import refuse_commands, refuse_commands_to_job, refuse_others, refuse_uploads
from medpfl.flare.provision import provision
from medpfl.methods.softpull import SoftPull
from medpfl.tasks.tabular import Tabular

ROOT = Path(__file__).resolve().parents[2]
JOB = "b9ec50aa-307c-4f3c-b447-45e8cfed5904"


class Engine(ClientEngine):
    """What FLARE's processors use of a hospital's engine."""

    def __init__(self, kit: Path):
        self.args = SimpleNamespace(workspace=str(kit))

    @contextmanager
    def new_context(self) -> Any:
        yield SimpleNamespace()

    def get_client_name(self) -> str:
        return "hospital-a"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kit = provision(ROOT / "poc" / "project.yml", tmp_path_factory.mktemp("kits")).folder / "hospital-a"
    allow(kit)
    return kit


@pytest.fixture
def kit(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hospital's kit after ``site allow``, with what outlives its jobs."""
    shutil.copytree(made, tmp_path / "kit")
    for folder in ("medpfl/ours", JOB):
        (tmp_path / "kit" / folder).mkdir(parents=True)
        (tmp_path / "kit" / folder / "patients.txt").write_text("Erna Muster")
    monkeypatch.chdir(tmp_path / "kit")  # as FLARE does
    return tmp_path / "kit"


@pytest.fixture
def agent(kit: Path, monkeypatch: pytest.MonkeyPatch) -> FedAdminAgent:
    """The agent of the hospital's own process, made as FLARE makes it once a site's components are built."""
    monkeypatch.setattr(starting, "configure_logging", lambda _: None)
    monkeypatch.setattr(AuditService, "the_auditor", Auditor(str(kit / "audit.txt")))
    known = ClientRequestProcessors.request_processors
    monkeypatch.setattr(ClientRequestProcessors, "request_processors", list(known))
    starting.Start()
    starting.close_commands()  # a second time
    cell = SimpleNamespace(register_request_cb=lambda **_: None)
    agent = FedAdminAgent("admin_agent", cell, Engine(kit))
    for processor in ClientRequestProcessors.request_processors:
        agent.register_processor(processor)
    return agent


@pytest.fixture
def hospital(cells: Cells) -> Cell:
    """One of a hospital's processes."""
    return cells.of("asked")


def asked(agent: FedAdminAgent, topic: str, body: str | bytes = "", job: str | None = None) -> str:
    message = Message(topic, body)
    if job is not None:
        message.set_header(RequestHeader.JOB_ID, job)
        message.set_header(RequestHeader.JOB_META, {"name": "a job"})
    return str(agent._dispatch_request(new_cell_message({}, message)).payload.body)


@pytest.mark.parametrize("command", ["cat medpfl/ours/patients.txt", "grep Erna ./medpfl/ours/patients.txt", "ls"])
def test_a_server_sees_no_file_of_a_hospital(agent: FedAdminAgent, command: str) -> None:
    said = asked(agent, SysCommandTopic.SHELL, command)
    assert "Erna" not in said and "medpfl" not in said


@pytest.mark.parametrize("topic", [TrainingTopic.DELETE_RUN, TrainingTopic.DEPLOY, TrainingTopic.START_JOB])
@pytest.mark.parametrize("folder", ["medpfl", "local", "startup"])
def test_a_server_deletes_nothing_but_a_jobs_folder(agent: FedAdminAgent, kit: Path, topic: str, folder: str) -> None:
    before = sorted(kit.rglob("*"))
    assert "not the id of a job" in asked(agent, topic, job=folder)
    assert sorted(kit.rglob("*")) == before


def test_a_job_that_explodes_is_not_unpacked(
    agent: FedAdminAgent, kit: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """FLARE unpacks it twice: where temporary files are, and into the job's folder."""
    unpacked: list[int] = []

    def unpack(packed: bytes, folder: str) -> None:
        unpacked.append(len(packed))
        raise OSError

    monkeypatch.setattr(training_cmds, "unzip_all_from_bytes", unpack)
    before = sorted(kit.rglob("*"))
    job = tmp_path / "job.zip"
    for size, words in (
        (2**20, "failed to stage app"),
        (2**28 + 1, "would become 268435457; more than 250 times as many are not read"),
    ):
        with zipfile.ZipFile(job, "w", zipfile.ZIP_DEFLATED) as into:
            into.writestr("config/config_fed_client.json", bytes(size))
        assert words in asked(agent, TrainingTopic.DEPLOY, job.read_bytes(), job=JOB)
    assert "failed to stage app" in asked(agent, TrainingTopic.DEPLOY, b"no zip at all", job=JOB)
    assert len(unpacked) == 2 and max(unpacked) < 2000
    assert sorted(kit.rglob("*")) == before


def test_a_job_that_the_lead_deletes_is_deleted(agent: FedAdminAgent, kit: Path) -> None:
    assert "Delete run folder" in asked(agent, TrainingTopic.DELETE_RUN, job=JOB)
    assert not (kit / JOB).exists() and (kit / "medpfl" / "ours" / "patients.txt").exists()


@contextmanager
def as_flare_has_it(cell: Cell) -> Iterator[None]:
    """Without filters before, and without those of the test afterwards."""
    kinds = (cell.core_cell.in_filter_reg, cell.core_cell.in_req_filter_reg)
    before = [kind.reg for kind in kinds]
    for kind in kinds:
        kind.reg = {}
    try:
        yield
    finally:
        for kind, reg in zip(kinds, before, strict=True):
            kind.reg = reg


def told(cell: Cell, target: Cell, channel: str, topic: str) -> bool:
    own = target.core_cell.get_fqcn()
    return bool(cell.send_request(channel, topic, own, new_cell_message({}, "?"), timeout=3).payload == "told")


def answer(_: Any) -> Any:
    return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, "told")


def send_bundle(cell: Cell, target: Cell, channel: str, topic: str) -> None:
    """FLARE takes a bundle's messages one by one, past its first kind of filter."""
    own = target.core_cell.get_fqcn()
    inside = TargetMessage(own, channel, topic, new_cell_message({}, "?")).to_dict()
    cell.core_cell.fire_and_forget(CellChannel.CELLNET, "bulk", own, new_cell_message({}, [inside]))


def noting(came: list[str]) -> Callable[[Any], Any]:
    def note(message: Any) -> Any:
        came.append(message.get_header(MessageHeaderKey.ORIGIN))
        return answer(message)

    return note


def wait_for(came: list[str], count: int) -> None:
    deadline = time.monotonic() + 20
    while len(came) < count and time.monotonic() < deadline:
        time.sleep(0.1)
    assert len(came) == count


@pytest.mark.parametrize(
    "channel", [CellChannel.CLIENT_MAIN, CellChannel.CLIENT_COMMAND, CellChannel.AUX_COMMUNICATION]
)
def test_a_hospital_answers_its_server_alone(cells: Cells, hospital: Cell, channel: str) -> None:
    """FLARE's server passes a message of one hospital on to another."""
    came: list[str] = []
    hospital.register_request_cb(channel=channel, topic="tell", cb=noting(came))
    other = cells.of("prying")
    with as_flare_has_it(hospital):
        assert told(cells.server, hospital, channel, "tell") and told(other, hospital, channel, "tell")
        refuse_others(hospital)
        assert told(cells.server, hospital, channel, "tell") and not told(other, hospital, channel, "tell")
        assert told(cells.server, hospital, channel, "tell")
        assert came.count(other.core_cell.get_fqcn()) == 1


def test_nobody_lets_events_happen_at_a_hospital(cells: Cells, hospital: Cell) -> None:
    """FLARE lets any event of its own happen at a job's processes whose name comes in such a message."""
    came: list[str] = []
    channel = CellChannel.AUX_COMMUNICATION
    for topic in ("fed.event", "end_run"):
        hospital.register_request_cb(channel=channel, topic=topic, cb=noting(came))
    with as_flare_has_it(hospital):
        assert told(cells.server, hospital, channel, "fed.event")
        refuse_others(hospital)
        assert not told(cells.server, hospital, channel, "fed.event")
        assert told(cells.server, hospital, channel, "end_run")


def test_a_hospital_answers_its_server_alone_in_bundles_too(cells: Cells, hospital: Cell) -> None:
    came: list[str] = []
    channel, other = CellChannel.CLIENT_MAIN, cells.of("prying")
    hospital.register_request_cb(channel=channel, topic="bundled", cb=noting(came))
    with as_flare_has_it(hospital):
        send_bundle(other, hospital, channel, "bundled")
        wait_for(came, 1)
        refuse_others(hospital)
        send_bundle(other, hospital, channel, "bundled")
        send_bundle(cells.server, hospital, channel, "bundled")
        wait_for(came, 2)
    assert came == [other.core_cell.get_fqcn(), "server"]


def test_both_processes_of_a_hospital_do(
    kit: Path, monkeypatch: pytest.MonkeyPatch, cells: Cells, hospital: Cell
) -> None:
    closed: list[object] = []
    for module in (starting, executor):
        monkeypatch.setattr(module, "refuse_others", closed.append)
    monkeypatch.setattr(starting, "configure_logging", lambda _: None)
    monkeypatch.setattr(starting, "close_commands", lambda: None)
    context = FLContext()
    context.set_prop(FLContextKey.SITE_OBJ, SimpleNamespace(cell=hospital), private=True)
    starting.Start().handle_event(EventType.BEFORE_CLIENT_REGISTER, context)
    monkeypatch.setattr(context, "get_engine", lambda: SimpleNamespace(get_cell=lambda: "the job's"))
    executor.SiteExecutor(SoftPull(), Tabular(dataset="blood")).handle_event(EventType.ABOUT_TO_START_RUN, context)
    assert closed == [hospital, "the job's"]


INNER = [(CellChannel.SERVER_PARENT_LISTENER, ServerCommandNames.GET_CLIENTS), ("_net_manager", "process_info")]


@pytest.mark.parametrize(("channel", "topic"), INNER)
def test_the_server_tells_its_own_processes_alone_what_is_for_them(cells: Cells, channel: str, topic: str) -> None:
    """Each hospital was told the tokens of all, and could ask the server, and by it each other, to stop connections."""
    job, other, came = cells.of("server"), cells.of("prying"), list[str]()
    cells.server.register_request_cb(channel=channel, topic=topic, cb=noting(came))
    with as_flare_has_it(cells.server):
        assert told(job, cells.server, channel, topic) and told(other, cells.server, channel, topic)
        refuse_commands(cells.server)
        assert told(job, cells.server, channel, topic) and not told(other, cells.server, channel, topic)
        came.clear()
        send_bundle(other, cells.server, channel, topic)
        send_bundle(job, cells.server, channel, topic)
        wait_for(came, 1)
    assert came == [job.core_cell.get_fqcn()]


def test_the_server_takes_files_from_who_is_logged_in_alone(cells: Cells) -> None:
    """FLARE wrote what any hospital sent among the server's temporary files, of any size, and left it there."""
    console, prying, came = cells.of("console"), cells.of("prying"), list[str]()
    channel, people = CellChannel.AUX_COMMUNICATION, SessionManager(cells.server)
    for topic in (TOPIC_STREAM_REQUEST, "sync_runner"):
        cells.server.register_request_cb(channel=channel, topic=topic, cb=noting(came))
    own = console.core_cell.get_fqcn()
    people.create_session("lead@hospital-a", "hospital_a", "lead", own, cert_exp=time.time() + 3600)
    try:
        with as_flare_has_it(cells.server):
            assert told(prying, cells.server, channel, TOPIC_STREAM_REQUEST)
            server = SimpleNamespace(cell=cells.server, admin_server=None)  # as it is when a site's components begin
            refuse_uploads(server)
            assert not told(console, cells.server, channel, TOPIC_STREAM_REQUEST)
            server.admin_server = SimpleNamespace(sess_mgr=people)
            came.clear()
            assert not told(prying, cells.server, channel, TOPIC_STREAM_REQUEST)
            assert told(console, cells.server, channel, TOPIC_STREAM_REQUEST)
            assert told(prying, cells.server, channel, "sync_runner")
            send_bundle(prying, cells.server, channel, TOPIC_STREAM_REQUEST)
            send_bundle(console, cells.server, channel, TOPIC_STREAM_REQUEST)
            wait_for(came, 3)
    finally:
        people.shutdown()
    assert came == [own, prying.core_cell.get_fqcn(), own]


def test_the_server_lets_nobody_take_anothers_name(made: Path) -> None:
    """Each message of the server holds the token by which FLARE knows its own: with it, or with one of before it was
    registered anew, a hospital spoke as the server, to the server and to the others. Nor is anything passed on that is
    for the network's cells; one that is told that a neighbour goes closes its way to the server. These cells have not
    FLARE's own filter, which asks for that token."""
    script = ROOT / "tests" / "support" / "certified_cells.py"
    ran = subprocess.run([sys.executable, str(script), str(made.parent)], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    others, own, goes = found["others"], found["own"], found["goes"]
    assert found["before"] == {"server": [*others, *goes], "hospital-a": [*others, *goes]}
    assert found["to one that answers the server alone"] == {"server": goes, "hospital-a": []}
    assert found["after"] == {"server": [*own, *goes], "hospital-a": []}


def test_a_job_is_ended_by_the_server_and_not_by_a_hospital(cells: Cells, monkeypatch: pytest.MonkeyPatch) -> None:
    """FLARE's server asked nobody who says so; the job was COMPLETED, after as many rounds as there had been."""
    for whole_process in ("outlive_streams", "give_up_stalled", "refuse_arrays", "bound_statistics"):
        monkeypatch.setattr(commands, whole_process, lambda: None)
    job, channel, came = cells.of("server"), CellChannel.SERVER_COMMAND, []
    aux, event = CellChannel.AUX_COMMUNICATION, "fed.event"

    def execute(message: Any) -> Any:
        came.append((message.get_header(MessageHeaderKey.ORIGIN), message.get_header(MessageHeaderKey.TOPIC)))
        return answer(message)

    for one in (channel, aux):
        job.register_request_cb(channel=one, topic="*", cb=execute)
    context, prying = FLContext(), cells.of("prying")
    engine = SimpleNamespace(get_cell=lambda: job, server=SimpleNamespace(command_agent="there"))
    context.get_engine = lambda **_: engine  # type: ignore[method-assign]
    with as_flare_has_it(job):
        assert told(prying, job, channel, "abort") and told(prying, job, aux, event)  # as FLARE has it
        refuse_commands_to_job(context)
        came.clear()
        assert not told(prying, job, channel, "abort")
        assert not told(prying, job, channel, ServerCommandNames.GET_RUN_INFO)
        assert not told(prying, job, aux, event)  # of a fatal error, for instance
        assert told(prying, job, aux, "sync_runner")
        assert told(cells.server, job, channel, "abort")
        assert told(prying, job, channel, ServerCommandNames.GET_TASK)
    own = prying.core_cell.get_fqcn()
    assert came == [(own, "sync_runner"), ("server", "abort"), (own, ServerCommandNames.GET_TASK)]
