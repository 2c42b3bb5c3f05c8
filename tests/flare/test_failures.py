# SPDX-License-Identifier: Apache-2.0
"""What a server makes of a hospital's report that its process of a job failed. tests/poc/test_poc.py has it with every
process; here are those that take minutes there, or a hospital that means harm."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvflare.apis.fl_context import FLContext
from nvflare.apis.job_launcher_spec import JobReturnCode
from nvflare.fuel.common.exit_codes import ProcessExitCode
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, MessageHeaderKey, ReturnCode
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey, new_cell_message
from nvflare.private.fed.server.job_runner import JobRunner

from cells import JOB, Cells
from medpfl.flare import failures
from medpfl.flare.failures import Gone, contain_failures

TOKEN = "the token of hospital-a"


@pytest.fixture
def server(cells: Cells, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What of FLARE's server is used; its own way of dealing with a report only notes it."""
    monkeypatch.setattr(failures, "_PAUSE", 0.05)
    for folder in ("startup", "local"):
        (tmp_path / folder).mkdir()
    write(tmp_path, "medpfl.flare.controller.MixingController")
    runner = JobRunner(str(tmp_path))
    runner._pending_client_outcomes[JOB] = {"hospital-a", "hospital-b"}
    by_flare: list[str] = []

    def process(request: Any) -> Any:
        by_flare.append(request.payload[JobFailureMsgKey.JOB_ID])
        return new_cell_message({MessageHeaderKey.RETURN_CODE: ReturnCode.OK}, None)

    return SimpleNamespace(
        cell=cells.server,
        client_manager=SimpleNamespace(clients={TOKEN: SimpleNamespace(name="hospital-a")}),
        engine=SimpleNamespace(job_runner=runner, run_processes={JOB: {}}, args=SimpleNamespace(workspace=tmp_path)),
        process_job_failure=process,
        by_flare=by_flare,
    )


def write(workspace: Path, controller: str) -> None:
    """The server's part of the job, where FLARE has put it."""
    config = workspace / JOB / "app_server" / "config"
    config.mkdir(parents=True, exist_ok=True)
    (config / "config_fed_server.json").write_text(json.dumps({"workflows": [{"path": controller}]}))


def report(cells: Cells, code: int = ProcessExitCode.EXCEPTION, token: str = TOKEN) -> None:
    told = {JobFailureMsgKey.JOB_ID: JOB, JobFailureMsgKey.CODE: code}
    message = new_cell_message({CellMessageHeaderKeys.TOKEN: token}, told)
    channel, topic = CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE
    reply = cells.of("failing").core_cell.send_request(channel, topic, "server", message, timeout=5)
    assert reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK


def reached(what: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 20
    while not what() and time.monotonic() < deadline:
        time.sleep(0.05)
    return what()


def pending(server: Any) -> bool:
    return bool(server.engine.job_runner.is_client_outcome_pending(JOB, "hospital-a"))


def test_a_job_of_another_package_is_left_to_flare(cells: Cells, server: Any, tmp_path: Path) -> None:
    """Its process would never listen: what FLARE does is what its users know."""
    write(tmp_path, "nvflare.app_common.workflows.scatter_and_gather.ScatterAndGather")
    contain_failures(server)
    report(cells)
    assert server.by_flare == [JOB] and pending(server)


def test_what_is_no_hospitals_failure_is_left_to_flare(cells: Cells, server: Any) -> None:
    """FLARE notes a good end, and refuses a stranger."""
    contain_failures(server)
    report(cells, JobReturnCode.SUCCESS)
    report(cells, token="a stranger's")
    assert server.by_flare == [JOB, JOB]


def test_a_jobs_process_that_is_still_starting_is_told(cells: Cells, server: Any) -> None:
    job = cells.of("server")
    job.core_cell.req_reg.reg.pop(f"{failures.CHANNEL}:gone", None)  # another test's
    contain_failures(server)
    report(cells)
    time.sleep(0.3)
    assert pending(server)
    told: list[None] = []
    context = FLContext()
    engine = SimpleNamespace(get_cell=lambda: job)
    context.get_engine = lambda **_: engine  # type: ignore[method-assign]
    gone = Gone(context, lambda: told.append(None))
    assert reached(lambda: bool(told)) and reached(lambda: not pending(server))
    assert gone.sites == {"hospital-a"} and server.by_flare == []


def test_a_job_that_has_ended_well_does_not_fail_afterwards(cells: Cells, server: Any) -> None:
    """FLARE waits 15 minutes for the hospitals' own ends, and let each of them say until then that the job failed."""
    server.engine.run_processes.clear()
    contain_failures(server)
    report(cells)
    assert reached(lambda: not pending(server))
    assert server.by_flare == []
