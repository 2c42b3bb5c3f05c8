# SPDX-License-Identifier: Apache-2.0
"""What a hospital does not do because somebody in the federation asks it.

FLARE 2.9 asks a hospital's policy about a command only where the message says that it should, takes whatever name of a
folder for a job's, and passes a message of one hospital on to another. Whoever writes messages past the console, at the
server or at any hospital, could so see every file that a hospital's account can read (by ``cat``), and delete its
folder of models and accounts as if it were a job's.
"""

import logging
import re

from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import RequestHeader, SysCommandTopic
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors

_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_LOG = logging.getLogger(__name__)


class OfJobs(RequestProcessor):
    """``then``, where what a message calls a job can be one: FLARE makes and deletes the folder of that name."""

    def __init__(self, then: RequestProcessor):
        self._then = then

    def get_topics(self) -> list[str]:
        topics: list[str] = self._then.get_topics()
        return topics

    def process(self, req: Message, app_ctx: object) -> Message:
        job_id = req.get_header(RequestHeader.JOB_ID)
        if job_id and not (isinstance(job_id, str) and _JOB_ID.fullmatch(job_id)):
            return error_reply("this is not the id of a job")
        return self._then.process(req, app_ctx)


def close_commands() -> None:
    """From now on this hospital's process shows no file, and takes no other folder for a job's; safe to repeat."""
    known = ClientRequestProcessors.request_processors
    known[:] = [
        one if isinstance(one, OfJobs) else OfJobs(one)
        for one in known
        if SysCommandTopic.SHELL not in one.get_topics()
    ]


def refuse_others(cell: object) -> None:
    """From now on ``cell``, by which one of a hospital's processes is reached, answers the server, the relay before it
    and the hospital's own processes. An honest server lets nobody take another's name."""
    if not isinstance(cell, Cell):  # of tests in one process
        return
    own: str = cell.core_cell.get_fqcn()

    def look(message: CellMessage) -> CellMessage | None:
        asks = message.get_header(MessageHeaderKey.MSG_TYPE) == MessageType.REQ
        if not asks or message.get_header(MessageHeaderKey.DESTINATION) != own or _may_ask(message, own):
            return None
        origin = message.get_header(MessageHeaderKey.ORIGIN)
        channel, topic = (message.get_header(key) for key in (MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC))
        _LOG.error("a request that %r sent to this hospital is refused (%r, %r)", origin, channel, topic)
        return make_reply(ReturnCode.UNAUTHENTICATED, "a hospital answers its server alone")

    cell.core_cell.add_incoming_filter("*", "*", look)


def _may_ask(message: CellMessage, own: str) -> bool:
    if message.get_header(MessageHeaderKey.CHANNEL) == CellChannel.CELLNET:  # that a neighbour is there, or goes
        return True
    origin = str(message.get_header(MessageHeaderKey.ORIGIN))
    server: bool = FQCN.get_root(origin) == FQCN.ROOT_SERVER
    return server or f"{own}.".startswith(f"{origin}.") or origin.startswith(f"{own}.")
