# SPDX-License-Identifier: Apache-2.0
"""Messages as FLARE shareables: numpy arrays in a DXO, so that FLARE's own filters (privacy, encryption) can act."""

from collections.abc import Collection

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import ReservedHeaderKey, Shareable
from torch import Tensor

from medpfl.core.errors import CodecError, ConfigError, ProtocolError
from medpfl.flare.pieces import Travelling
from medpfl.rounds.differences import together
from medpfl.rounds.messages import Message, Slots, flatten, unflatten
from medpfl.rounds.protocol.bounded import Part
from medpfl.rounds.protocol.replies import InitReply, Reply
from medpfl.rounds.protocol.requests import Request
from medpfl.rounds.protocol.text import Answered, Asked, Envelope, parse

_HEADER = "medpfl"
REFUSED = "medpfl_refused"
"""Header of a shareable in whose message's place a codec filter put the reason why there is none."""
LOST = "medpfl_lost"
"""Header of a failed reply: the hospital has no reference copy any more and asks for a whole message."""
ERROR = "medpfl_error"
"""Header of a failed reply: what may be said about the failure outside the hospital."""
_SLOTS = "medpfl_slots"
"""Beside the header, where tensors are differences: the slots that are answered with, also one of which a filter left
nothing."""
_DIFFERENCES, _WHOLE = "differences", "whole"
_LONGEST_REASON = 1000
_LONGEST_NAME = 500


def to_shareable(message: Message[Request | Reply]) -> Shareable:
    """The message in a shareable of its own."""
    return put(message, Shareable())


def put(message: Message[Request | Reply], shareable: Shareable) -> Shareable:
    """Tensors travel as arrays under "slot::entry", the header as JSON text in the DXO's meta: what FLARE's serialiser
    does not know would end the hospital's process."""
    arrays = arrays_of(message.slots)
    kind = DataKind.WEIGHTS if arrays else DataKind.APP_DEFINED
    filled: Shareable = DXO(kind, data=arrays, meta={_HEADER: _text(message)}).update_shareable(shareable)
    return filled


def arrays_of(slots: Slots) -> dict[str, np.ndarray]:
    """Name on the wire to array.

    Raises:
        ConfigError: a tensor is of a type that FLARE's arrays do not have.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, tensor in flatten(slots).items():
        if tensor.dtype == torch.bfloat16:
            raise ConfigError(
                f"'{name}' is bfloat16, which FLARE's arrays cannot carry; use float32 or float16 weights"
            )
        arrays[name] = tensor.numpy().view(Travelling)
    return arrays


def _text(message: Message[Request | Reply]) -> str:
    content, coded = message.header, message.coded
    if isinstance(content, Request):
        return Asked(content=content, coded=coded).model_dump_json()
    return Answered(content=content, coded=coded).model_dump_json()


def put_parts(message: Message[Reply], differences: Slots, whole: Slots, shareable: Shareable) -> Shareable:
    """An answer in two parts: differences, on which FLARE's privacy filters act, and what they leave alone."""
    parts = {
        _DIFFERENCES: DXO(DataKind.WEIGHT_DIFF, data=arrays_of(differences)),
        _WHOLE: DXO(DataKind.APP_DEFINED, data=arrays_of(whole)),
    }
    meta = {_HEADER: _text(message), _SLOTS: list(message.slots)}
    filled: Shareable = DXO(DataKind.COLLECTION, data=parts, meta=meta).update_shareable(shareable)
    return filled


def read_request(shareable: Shareable) -> Message[Request]:
    """What the server asks, at a hospital; the tensors may be written to.

    Raises:
        CodecError: it is encoded still, or a codec filter refused it.
        ProtocolError: it is no request.
    """
    _check_decoded(shareable, message := request_of(shareable))
    return message


def read_reply(shareable: Shareable, sent: Slots | None = None, gradients: Collection[str] = ()) -> Message[Reply]:
    """What a hospital answers, at the server; as ``read_request``.

    Args:
        sent: the tensors that it was sent, to which differences are added; None: it was sent none.
        gradients: slots that are differences themselves.

    Raises:
        ProtocolError: it says that it failed, too.
    """
    if (failure := failure_of(shareable)) is not None:
        raise ProtocolError(failure)
    if (parts := _parts_of(shareable)) is not None:
        return _joined(parts, sent or {}, gradients)
    _check_decoded(shareable, message := reply_of(shareable))
    return message


def _parts_of(shareable: Shareable) -> DXO | None:
    """What holds an answer in two parts; None: it is none."""
    try:
        dxo = from_shareable(shareable)
    except Exception:  # what another machine sent may be anything; ``reply_of`` says so
        return None
    return dxo if dxo.data_kind == DataKind.COLLECTION else None


def _joined(dxo: DXO, sent: Slots, gradients: Collection[str]) -> Message[Reply]:
    parts = dxo.data
    if set(parts) != {_DIFFERENCES, _WHOLE} or not all(isinstance(part, DXO) for part in parts.values()):
        raise ProtocolError("the message has no readable content (its parts)")
    differences, whole = (_tensors(parts[name].data) for name in (_DIFFERENCES, _WHOLE))
    names = dxo.meta.get(_SLOTS)
    if not isinstance(names, list) or not all(isinstance(name, str) and name.isprintable() for name in names):
        raise ProtocolError("the message does not say which slots it answers with")
    read = parse(Answered, dxo.meta.get(_HEADER))
    if read.coded:
        raise ProtocolError("the message is encoded, and differences are not")
    if isinstance(read.content, InitReply):  # there is nothing yet to which there could be a difference
        if differences:
            raise ProtocolError("the first answer holds differences, and nothing was sent before it")
        return Message(read.content, whole)
    return Message(read.content, together(differences, whole, names, sent, gradients))


def _check_decoded(shareable: Shareable, message: Message[Part]) -> None:
    if (reason := shareable.get_header(REFUSED)) is not None:
        raise CodecError(reason_of(reason))
    if message.coded:
        raise CodecError(
            f"the message is encoded ({message.coded.codec}) and was not decoded on its way in: the job's "
            "configuration at the receiver lacks the filter medpfl.flare.filters.DecodeUpdate"
        )


def reason_of(told: object) -> str:
    """A reason that another machine gave, as one bounded sentence without control characters."""
    if not isinstance(told, str):
        return "without a reason"
    printable = "".join(letter if letter.isprintable() else " " for letter in told[: 2 * _LONGEST_REASON])
    return " ".join(printable.split())[:_LONGEST_REASON]


def failure_of(result: Shareable) -> str | None:
    """Why a hospital does not answer, as it says itself; None: it answers."""
    headers = result.get(ReservedHeaderKey.HEADERS) or {}
    if not isinstance(headers, dict):
        return reason_of(None)
    code = headers.get(ReservedHeaderKey.RC, ReturnCode.OK)
    if isinstance(code, str) and code == ReturnCode.OK:
        return None
    told = reason_of(headers.get(ERROR, code))
    if ERROR not in headers and told == ReturnCode.EXECUTION_EXCEPTION:  # FLARE could not write its audit.log, say
        return f"FLARE itself failed there ({told}), as it does where the disk of the kit is full"
    return told


def request_of(shareable: Shareable) -> Message[Request]:
    """As ``read_request``, for filters: encoded messages as they are.

    Raises:
        ProtocolError: it is no request, whatever it holds.
    """
    read, slots = _parsed(Asked, shareable)
    return Message(read.content, slots, read.coded)


def reply_of(shareable: Shareable) -> Message[Reply]:
    """As ``request_of``, of what a hospital answers."""
    read, slots = _parsed(Answered, shareable)
    return Message(read.content, slots, read.coded)


def _parsed(kind: type[Envelope], shareable: Shareable) -> tuple[Envelope, Slots]:
    try:
        dxo = from_shareable(shareable)
        arrays, text = dict(dxo.data), dxo.meta.get(_HEADER)
    except Exception as error:  # what another machine sent may be anything
        raise _unreadable(error) from error
    slots = _tensors(arrays)
    return parse(kind, text), slots


def _tensors(arrays: object) -> Slots:
    try:
        tensors = {str(name): _tensor(array) for name, array in dict(arrays).items()}  # type: ignore[call-overload]
    except Exception as error:  # as above
        raise _unreadable(error) from error
    if not all(len(name) <= _LONGEST_NAME and name.isprintable() for name in tensors):
        raise ProtocolError(f"a tensor's name is not printable text of at most {_LONGEST_NAME} characters")
    return unflatten(tensors)


def _unreadable(error: Exception) -> ProtocolError:
    return ProtocolError(f"the message has no readable content ({type(error).__name__})")


def _tensor(array: object) -> Tensor:
    """Row by row in memory, however the sender had it: of another order, mixing in place would write to a copy."""
    return torch.from_numpy(np.require(np.asarray(array), requirements=("C", "W")))
