# SPDX-License-Identifier: Apache-2.0
"""What a hospital, or the server, does not do because somebody in the federation asks it, and in whose name.

FLARE 2.9 asks a hospital's policy about a command only where the message says that it should, takes whatever name of a
folder for a job's, and passes a message of one hospital on to another. Whoever writes messages past the console, at the
server or at any hospital, could so see every file that a hospital's account can read (by ``cat``), and delete its
folder of models and accounts as if it were a job's.
"""

import contextlib
import io
import logging
import re
import zipfile
from collections.abc import Callable
from pathlib import Path

from nvflare.apis.fl_context import FLContext
from nvflare.fuel.f3.cellnet.cell import Cell
from nvflare.fuel.f3.cellnet.defs import (
    CellChannel,
    CellChannelTopic,
    MessageHeaderKey,
    MessagePropKey,
    MessageType,
    ReturnCode,
)
from nvflare.fuel.f3.cellnet.fqcn import FQCN
from nvflare.fuel.f3.cellnet.net_agent import _CHANNEL as NETWORK
from nvflare.fuel.f3.cellnet.utils import make_reply
from nvflare.fuel.f3.message import Message as CellMessage
from nvflare.fuel.f3.streaming.stream_const import StreamHeaderKey
from nvflare.private.admin_defs import Message, error_reply
from nvflare.private.defs import RequestHeader, SysCommandTopic
from nvflare.private.fed.client.admin import RequestProcessor
from nvflare.private.fed.client.client_req_processors import ClientRequestProcessors
from nvflare.private.fed.server.fed_server import FederatedServer
from nvflare.private.fed.server.server_commands import ServerCommands
from nvflare.private.stream_runner import TOPIC_STREAM_REQUEST
from nvflare.widgets.fed_event import FED_EVENT_TOPIC

from medpfl.core.errors import DataError
from medpfl.data.untrusted import check_growth
from medpfl.flare.failures import CHANNEL
from medpfl.flare.flooding import Unfinished, bound_statistics, give_up_stalled, refuse_arrays
from medpfl.flare.outliving import outlive_streams

_JOB_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_INNER = "this is for the server's own processes to ask"
_EVENT = (CellChannel.AUX_COMMUNICATION, FED_EVENT_TOPIC)
_PIECE = (CellChannel.AUX_COMMUNICATION, TOPIC_STREAM_REQUEST)
_NO_EVENT = "nobody lets things happen here but this process itself"  # that the job is to end, for instance
_GOES = (CellChannel.CELLNET, CellChannelTopic.Bye)
_INNER_CHANNELS = (CellChannel.SERVER_PARENT_LISTENER, NETWORK, CHANNEL)
_LONGEST = 100  # characters of a name in the log
_LOG = logging.getLogger(__name__)


class OfJobs(RequestProcessor):
    """``then``, where what a message calls a job can be one: FLARE makes and deletes the folder of that name, and
    unpacks the job's files into it, and before that into the folder for temporary ones, however large they become."""

    def __init__(self, then: RequestProcessor):
        self._then = then

    def get_topics(self) -> list[str]:
        topics: list[str] = self._then.get_topics()
        return topics

    def process(self, req: Message, app_ctx: object) -> Message:
        job_id = req.get_header(RequestHeader.JOB_ID)
        if job_id and not (isinstance(job_id, str) and _JOB_ID.fullmatch(job_id)):
            return error_reply("this is not the id of a job")
        try:
            _check_files(req.body)
        except DataError as error:
            return error_reply(str(error))
        return self._then.process(req, app_ctx)


def _check_files(body: object) -> None:
    """Raises DataError: what a job is packed in grows out of all proportion."""
    if isinstance(body, bytes):
        with contextlib.suppress(zipfile.BadZipFile), zipfile.ZipFile(io.BytesIO(body)) as packed:  # FLARE says that
            size = sum(member.file_size for member in packed.infolist())
            check_growth(Path("a job"), "its packed files", len(body), size)


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
    and the hospital's own processes. Its server lets nobody take another's name (``refuse_commands``)."""
    own = cell.core_cell.get_fqcn() if isinstance(cell, Cell) else ""

    def wrong(message: CellMessage) -> str | None:
        origin, target, channel, topic = _way(message)
        if target != own or not _asks(message):
            return None
        related = f"{own}.".startswith(f"{origin}.") or origin.startswith(f"{own}.")
        if _EVENT in _names(message) and not related:
            return _NO_EVENT
        if _of_server(origin):
            return None
        goes = (channel, topic) == _GOES and message.get_prop(MessagePropKey.ENDPOINT).name == origin  # a neighbour
        return None if related or goes else "a hospital answers its server alone"

    _look_at(cell, wrong)


def refuse_commands(cell: object) -> None:
    """From now on the server's own process, reached by ``cell``, takes and passes on what is said in the speaker's own
    name, and of the network and to the server's processes nothing that comes from outside of them.

    FLARE asks for no more than a place in the federation. The token that it knows its own messages by stands in each of
    them that a hospital gets, so that each could speak as the server, to the server and to the others. The name of who
    is connected is that of its certificate.
    """

    def wrong(message: CellMessage) -> str | None:
        origin, target, *what = _way(message)
        speaker, certified = (message.get_prop(key) for key in (MessagePropKey.ENDPOINT, MessagePropKey.COMMON_NAME))
        if certified and (_of_server(origin) or not f"{origin}.".startswith(f"{speaker.name}.")):
            return f"it came from {speaker.name!r}"
        if tuple(what) == _GOES and target != FQCN.ROOT_SERVER and not _of_server(origin):
            return "who goes says so to its neighbours"  # another cell would take it for the server that goes
        return _inner(message)

    _look_at(cell, wrong)


def refuse_uploads(server: FederatedServer) -> None:
    """From now on the server's own process takes files from people who are logged in at a console, and from nobody
    else: FLARE writes them among the temporary files before it asks who sends them, and leaves them there."""

    def wrong(message: CellMessage) -> str | None:
        origin = _way(message)[0]
        if _PIECE not in _names(message) or not _asks(message) or _of_server(origin):
            return None
        consoles = getattr(server.admin_server, "sess_mgr", None)  # FLARE makes both after the site's components
        known = consoles is not None and any(person.origin_fqcn == origin for person in consoles.get_sessions())
        return None if known else "nobody is logged in there who could send files"

    _look_at(server.cell, wrong)


def refuse_floods(cell: object, unfinished: Unfinished | None = None) -> None:
    """From now on the server's own process, reached by ``cell``, takes and passes on no more of a hospital's messages
    that are not whole than ``unfinished`` says, and of arrays what says its size."""
    _look_at(cell, (unfinished or Unfinished()).too_much)
    give_up_stalled()
    refuse_arrays()
    bound_statistics()


def refuse_commands_to_job(fl_ctx: FLContext) -> None:
    """Likewise of a job's process at the server and what the server's own process says to it, where that process has
    not refused it (a kit without ``medpfl site allow``): each hospital could end the others' job, which was said to be
    complete. Nor does any event of FLARE's happen here because a hospital says so: that of a fatal error ends the job.
    """

    def wrong(message: CellMessage) -> str | None:
        event = _EVENT in _names(message) and _asks(message) and not _of_server(_way(message)[0])
        return _NO_EVENT if event else _inner(message)

    engine = fl_ctx.get_engine()
    if getattr(getattr(engine, "server", None), "command_agent", None) is not None:  # else all are one process
        _look_at(engine.get_cell(), wrong)
        outlive_streams()
        give_up_stalled()
        refuse_arrays()
        bound_statistics()


def _look_at(cell: object, wrong: Callable[[CellMessage], str | None]) -> None:
    """What comes to ``cell`` and of which ``wrong`` tells a reason is refused. FLARE's first kind of filter sees all
    but what comes in a bundle ("bulk"), which the second sees."""
    if not isinstance(cell, Cell):  # of tests in one process
        return

    def look(message: CellMessage) -> CellMessage | None:
        why = wrong(message)
        if why is None:
            return None
        way = (part[:_LONGEST] for part in _way(message))
        _LOG.error("a message that %r sent to %r is refused (%r, %r): %s", *way, why)
        return make_reply(ReturnCode.UNAUTHENTICATED, why)

    cell.core_cell.add_incoming_filter("*", "*", look)
    cell.core_cell.add_incoming_request_filter("*", "*", look)


def _way(message: CellMessage) -> tuple[str, str, str, str]:
    """Origin, destination, channel and topic."""
    keys = (MessageHeaderKey.ORIGIN, MessageHeaderKey.DESTINATION, MessageHeaderKey.CHANNEL, MessageHeaderKey.TOPIC)
    origin, target, channel, topic = (str(message.get_header(key)) for key in keys)
    return origin, target, channel, topic


def _names(message: CellMessage) -> list[tuple[str, str]]:
    """Channel and topic, its own and those of which it is a piece: each piece says what it is of."""
    keys = (StreamHeaderKey.CHANNEL, StreamHeaderKey.TOPIC)
    channel, topic = (str(message.get_header(key)) for key in keys)
    return [_way(message)[2:], (channel, topic)]


def _asks(message: CellMessage) -> bool:
    return bool(message.get_header(MessageHeaderKey.MSG_TYPE) == MessageType.REQ)


def _inner(message: CellMessage) -> str | None:
    """Why it is not for the server's processes, of what these say to each other and to the network's cells."""
    inner = any(
        channel in _INNER_CHANNELS
        or (channel == CellChannel.SERVER_COMMAND and topic not in ServerCommands.client_request_commands_names)
        for channel, topic in _names(message)
    )
    return _INNER if inner and not _of_server(_way(message)[0]) and _asks(message) else None


def _of_server(origin: str) -> bool:
    server: bool = FQCN.get_root(origin) == FQCN.ROOT_SERVER
    return server
