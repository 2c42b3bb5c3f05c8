# SPDX-License-Identifier: Apache-2.0
"""Codecs as FLARE filters: the same pair at the server and at every hospital (see ``medpfl.rounds.coding``).

A job's server encodes its task data and decodes task results, a hospital the other way round; on its way out a site's
own privacy filters come before these. Errors do not leave a filter, where FLARE would ask for the task again for ever:
they become a header that the receiver's controller or executor answers for.
"""

import threading
from pathlib import Path

from nvflare.apis.filter import Filter, FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import FilterKey, FLContextKey, ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import ReservedHeaderKey, Shareable, make_reply

from medpfl.core.codecs import Codec
from medpfl.core.errors import MedPFLError
from medpfl.flare.home import home_of
from medpfl.flare.wire import ERROR, LOST, REFUSED, failure_of, put, reply_of, request_of
from medpfl.rounds.coders import ServerCoder, SiteCoder
from medpfl.rounds.messages import Message
from medpfl.rounds.protocol.replies import InitReply, Reply
from medpfl.rounds.protocol.requests import Request

_CODERS: dict[tuple[str, str, str], ServerCoder | SiteCoder] = {}
_LOCK = threading.Lock()


def _place(fl_ctx: FLContext) -> tuple[Path, str]:
    return home_of(fl_ctx), str(fl_ctx.get_job_id())


def server_coder(fl_ctx: FLContext, site: str) -> ServerCoder:
    """The server's end of a hospital's connection in this job; both filters share it, and a process runs one job."""
    root, job = _place(fl_ctx)
    with _LOCK:
        coder = _CODERS.setdefault((str(root), job, site), ServerCoder(root, site))
    assert isinstance(coder, ServerCoder)
    return coder


def traffic_of(fl_ctx: FLContext, site: str) -> tuple[int, int] | None:
    """Bytes of the last exchange with a hospital as they travelled; None without codec filters."""
    root, job = _place(fl_ctx)
    with _LOCK:
        coder = _CODERS.get((str(root), job, site))
    return coder.traffic if isinstance(coder, ServerCoder) else None


def take_decoding(fl_ctx: FLContext) -> frozenset[str]:
    """At the server, as a job begins: take ``DecodeUpdate`` off the results' way, for the controller decodes them
    itself (``decoded``). FLARE would fetch the tensors of all that answer at the same moment, whatever memory there
    is, and hold a lock while the filter acts, for which every heartbeat and request waits.

    Returns:
        The tasks whose results are to be decoded.
    """
    table = getattr(getattr(fl_ctx.get_prop(FLContextKey.RUNNER), "config", None), "task_result_filters", None) or {}
    # One list may stand at several places of FLARE's table.
    coded = {place for place, listed in table.items() if any(isinstance(one, DecodeUpdate) for one in listed)}
    for place in coded:
        table[place] = [one for one in table[place] if not isinstance(one, DecodeUpdate)]
    return frozenset(place.partition(FilterKey.DELIMITER)[0] for place in coded)


def decoded(result: Shareable, fl_ctx: FLContext, site: str) -> Shareable:
    """A hospital's answer to one of the tasks that ``take_decoding`` named, decoded.

    Raises:
        MedPFLError: it cannot be decoded, or what it leaves cannot be kept.
    """
    coder = server_coder(fl_ctx, site)
    if failure_of(result) is None:
        return _with(result, coder.receive(reply_of(result)))
    headers = result.get(ReservedHeaderKey.HEADERS)
    if isinstance(headers, dict) and headers.get(LOST) is True:
        coder.forget()
    return result


def _site_coder(fl_ctx: FLContext) -> SiteCoder:
    root, job = _place(fl_ctx)
    place = str(root), job, ""
    with _LOCK:
        if place not in _CODERS:
            new = SiteCoder(root, fl_ctx.get_identity_name())
            if (file := _start_of(fl_ctx)).is_file():  # this process was started after another one was killed
                new.start_again(file)
            _CODERS[place] = new
        coder = _CODERS[place]
    assert isinstance(coder, SiteCoder)
    return coder


def _start_of(fl_ctx: FLContext) -> Path:
    """Where a hospital keeps its first exchange of a job, in FLARE's folder of the job."""
    return Path(fl_ctx.get_workspace().get_run_dir(fl_ctx.get_job_id())) / "medpfl_start.safetensors"


def _peer(fl_ctx: FLContext) -> str:
    return str(fl_ctx.get_peer_context().get_identity_name())


def _copy(shareable: Shareable) -> Shareable:
    """The task's own data stay as they are, for FLARE may send them again."""
    copy = Shareable(dict(shareable))
    copy[ReservedHeaderKey.HEADERS] = dict(shareable[ReservedHeaderKey.HEADERS])
    return copy


def _with(shareable: Shareable, message: Message[Request | Reply]) -> Shareable:
    return put(message, _copy(shareable))


def _refused(shareable: Shareable, error: MedPFLError) -> Shareable:
    copy = _copy(shareable)
    copy.set_header(REFUSED, error.public)
    return copy


class MessageFilter(Filter):
    """A filter that was written for this package's messages: tensors under "slot::entry", whole or encoded, and the
    header as text beside them. A hospital's own filter derives from it; every other one is refused by name."""

    knows_medpfl = True


class EncodeUpdate(MessageFilter):
    """Encodes what leaves: the server's task data or a hospital's task result.

    Args:
        codec: None: this direction is not encoded, and the filter only keeps track of what the other one needs.
    """

    def __init__(self, codec: Codec | None = None):
        super().__init__()
        if codec is not None and not isinstance(codec, Codec):
            raise TypeError(f"EncodeUpdate's argument 'codec' must be a Codec, got {type(codec).__name__}")
        self.codec = codec

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
            try:
                return _with(shareable, server_coder(fl_ctx, _peer(fl_ctx)).send(request_of(shareable), self.codec))
            except MedPFLError as error:
                self.log_error(fl_ctx, str(error), fire_event=False)
                return _refused(shareable, error)
        try:
            coder = _site_coder(fl_ctx)
            if shareable.get_return_code() != ReturnCode.OK:
                shareable.set_header(LOST, coder.lost)
                return shareable
            answer = reply_of(shareable)
            if isinstance(answer.header, InitReply):
                coder.keep_start(_start_of(fl_ctx), answer)
            return _with(shareable, coder.send(answer, self.codec))
        except MedPFLError as error:
            self.log_error(fl_ctx, str(error), fire_event=False)
            reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
            reply.set_header(ERROR, error.public)
            return reply


class DecodeUpdate(MessageFilter):
    """Decodes what arrives: a hospital's task data. In the server's configuration it says that results are to be
    decoded, which the controller does in its place (``take_decoding``)."""

    def process(self, shareable: Shareable, fl_ctx: FLContext) -> Shareable:
        try:
            return _with(shareable, _site_coder(fl_ctx).receive(request_of(shareable)))
        except MedPFLError as error:
            self.log_error(fl_ctx, str(error), fire_event=False)
            return _refused(shareable, error)
