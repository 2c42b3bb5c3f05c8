# SPDX-License-Identifier: Apache-2.0
"""What a hospital, or the server, does not do because somebody in the federation asks it.

FLARE 2.9 asks a hospital's policy about a command only where the message says that it should, takes whatever name of a
folder for a job's, and passes a message of one hospital on to another. Whoever writes messages past the console, at the
server or at any hospital, could so see every file that a hospital's account can read (by ``cat``), and delete its
folder of models and accounts as if it were a job's.
"""

import logging
import re
from collections.abc import Callable

from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import CellChannel, MessageHeaderKey, MessageType, ReturnCode
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import RequestHeader, SysCommandTopic
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.server.server_commands import ServerCommands

_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INNER = "this is for the server's own processes to ask"
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

    def may(origin: str, own: str, channel: str, topic: str) -> bool:
        related = f"{own}.".startswith(f"{origin}.") or origin.startswith(f"{own}.")
        # A neighbour says that it is there, or goes.
        return channel == CellChannel.CELLNET or _of_server(origin) or related

    _answer(cell, may, "a hospital answers its server alone")


def refuse_commands(cell: object) -> None:
    """From now on the server's own process, reached by ``cell``, takes what its jobs' processes say to it from these
    alone. FLARE asks for no more than a place in the federation: each hospital could be told the others' tokens."""

    def may(origin: str, own: str, channel: str, topic: str) -> bool:
        return channel != CellChannel.SERVER_PARENT_LISTENER or _of_server(origin)

    _answer(cell, may, _INNER)


def refuse_commands_to_job(fl_ctx: FLContext) -> None:
    """Likewise of a job's process at the server and what the server's own process says to it: each hospital could end
    the others' job, which was said to be complete. Such messages come in pieces, so that they are looked at when they
    are whole."""
    engine = fl_ctx.get_engine()
    cell, agent = engine.get_cell(), getattr(getattr(engine, "server", None), "command_agent", None)
    if cell is None or agent is None:  # hospitals are not apart from the server
        return

    def execute(message: CellMessage) -> CellMessage:
        topic, origin = (message.get_header(key) for key in (MessageHeaderKey.TOPIC, MessageHeaderKey.ORIGIN))
        if topic in ServerCommands.client_request_commands_names or _of_server(str(origin)):
            done: CellMessage = agent.execute_command(message)
            return done
        _LOG.error("a request that %r sent here is refused (%r)", origin, topic)
        return make_reply(ReturnCode.UNAUTHENTICATED, _INNER)

    # By keyword, for FLARE's cell looks at the channel's to tell whether its messages come in pieces.
    cell.register_request_cb(channel=CellChannel.SERVER_COMMAND, topic="*", cb=execute)


def _answer(cell: object, may: Callable[[str, str, str, str], bool], why: str) -> None:
    """Requests to ``cell`` for which ``may`` (of origin, own name, channel and topic) is not so are refused."""
    if not isinstance(cell, Cell):  # of tests in one process
        return
    own: str = cell.core_cell.get_fqcn()

    def look(message: CellMessage) -> CellMessage | None:
        keys = (MessageHeaderKey.ORIGIN, MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC)
        origin, channel, topic = (str(message.get_header(key)) for key in keys)
        asks = message.get_header(MessageHeaderKey.MSG_TYPE) == MessageType.REQ
        here = message.get_header(MessageHeaderKey.DESTINATION) == own
        if not (asks and here) or may(origin, own, channel, topic):
            return None
        _LOG.error("a request that %r sent here is refused (%r, %r)", origin, channel, topic)
        return make_reply(ReturnCode.UNAUTHENTICATED, why)

    cell.core_cell.add_incoming_filter("*", "*", look)


def _of_server(origin: str) -> bool:
    server: bool = FQCN.get_root(origin) == FQCN.ROOT_SERVER
    return server
