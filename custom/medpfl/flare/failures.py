# SPDX-License-Identifier: Apache-2.0
"""A hospital's process of a job that ends before the job does ends the hospital's part, and not the others' job.

FLARE 2.9 ends the whole job when one hospital reports so: where its MedPFL is an older one and cannot build what the
job says, or where it says so to do harm. Here the server's own process passes the report on to the job's process, which
goes on without this hospital, or ends with a sentence where too few are left.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from nvflare.apis.fl_constant import SiteType
from nvflare.apis.fl_context import FLContext
from nvflare.apis.workspace import Workspace
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, CellChannelTopic, MessageHeaderKey, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message
from nvflare.private.defs import CellMessageHeaderKeys, JobFailureMsgKey, new_cell_message
from nvflare.private.fed.server.fed_server import FederatedServer

CHANNEL = "medpfl_job"
GONE = "its process of the job has ended; the reason is in that hospital's own log"
_TOPIC = "gone"
_PAUSE = 1.0
_LOG = logging.getLogger(__name__)


def contain_failures(server: FederatedServer) -> None:
    """From now on a hospital's report that its process of a job of MedPFL failed goes to that job's process at the
    server. What that process has ended stays as it ended it. Other jobs are left to FLARE."""
    cell: Cell = server.cell
    telling: set[tuple[str, str]] = set()

    def reported(request: Message) -> Message:
        failed = _failed(server, request)
        if failed is None:
            reply: Message = server.process_job_failure(request)
            return reply
        if failed not in telling:
            telling.add(failed)  # FLARE's cells call this in several threads, and a second one does no harm
            threading.Thread(target=tell, args=failed, name="telling", daemon=True).start()
        return make_reply(ReturnCode.OK)

    def tell(job_id: str, site: str) -> None:
        _LOG.warning("%s's process of the job %s has failed, which does not end the job", site, job_id)
        try:
            _tell(server, job_id, site)
        finally:
            server.engine.job_runner.resolve_client_outcome(job_id, site)
            telling.discard((job_id, site))

    cell.core_cell.register_request_cb(CellChannel.SERVER_MAIN, CellChannelTopic.REPORT_JOB_FAILURE, reported)


def _failed(server: FederatedServer, request: Message) -> tuple[str, str] | None:
    """The job, and the hospital whose process of it has failed before anything else was heard of it; or None."""
    client = server.client_manager.clients.get(request.get_header(CellMessageHeaderKeys.TOKEN))
    said = request.payload
    if client is None or not isinstance(said, dict):
        return None
    job_id, code = said.get(JobFailureMsgKey.JOB_ID), said.get(JobFailureMsgKey.CODE)
    if not isinstance(job_id, str) or code == 0:
        return None
    if not server.engine.job_runner.is_client_outcome_pending(job_id, client.name):
        return None
    return (job_id, client.name) if _is_ours(server, job_id) else None


def _is_ours(server: FederatedServer, job_id: str) -> bool:
    """Whether MedPFL's controller runs the job, which listens in ``Gone``."""
    workspace = Workspace(server.engine.args.workspace, SiteType.SERVER)
    try:
        return f'"{__package__}.' in Path(workspace.get_server_app_config_file_path(job_id)).read_text(encoding="utf-8")
    except OSError:  # FLARE takes other names for it, too; MedPFL's jobs do not
        return False


def _tell(server: FederatedServer, job_id: str, site: str) -> None:
    """Until the job's process knows it, or has ended itself. A hospital's can fail before the server's is there."""
    while job_id in server.engine.run_processes:
        reply = server.cell.core_cell.send_request(  # a whole message: by a ``Cell`` it would go in pieces
            target=FQCN.join([FQCN.ROOT_SERVER, job_id]),
            channel=CHANNEL,
            topic=_TOPIC,
            request=new_cell_message({}, site),
            timeout=5.0,
            optional=True,
        )
        if reply.get_header(MessageHeaderKey.RETURN_CODE) == ReturnCode.OK:
            return
        time.sleep(_PAUSE)


class Gone:
    """At a job's process: the hospitals whose process of this job has ended, as the server's own process tells.

    Args:
        told: called when there is one more.

    Attributes:
        sites: their names.
    """

    def __init__(self, fl_ctx: FLContext, told: Callable[[], None]):
        self.sites: set[str] = set()
        self._told = told
        cell = fl_ctx.get_engine().get_cell()
        if isinstance(cell, Cell):  # in tests in one process it is none
            cell.core_cell.register_request_cb(CHANNEL, _TOPIC, self._note)

    def _note(self, message: Message) -> Message:
        # Only the server's own processes say this (``commands``).
        self.sites.add(str(message.payload))  # at once: FLARE's cells call this in several threads
        self._told()
        return make_reply(ReturnCode.OK)
