# SPDX-License-Identifier: Apache-2.0
"""Messages as FLARE shareables: numpy arrays in a DXO, so that FLARE's own filters (privacy, encryption) can act."""

import json

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable

from medpfl.core.errors import CodecError, ConfigError
from medpfl.rounds.coding import CODED
from medpfl.rounds.messages import Message, flatten, unflatten

_HEADER = "medpfl"
REFUSED = "refused"
"""Header of a message in whose place a codec filter put the reason why there is none."""
LOST = "medpfl_lost"
"""Header of a failed reply: the hospital has no reference copy any more and asks for a whole message."""
ERROR = "medpfl_error"
"""Header of a failed reply: what may be said about the failure outside the hospital."""


def to_shareable(message: Message) -> Shareable:
    """The message in a shareable of its own."""
    return put(message, Shareable())


def put(message: Message, shareable: Shareable) -> Shareable:
    """Tensors travel as arrays under "slot::entry", the header as JSON text in the DXO's meta: what FLARE's serialiser
    does not know would end the hospital's process."""
    arrays = {}
    for name, tensor in flatten(message.slots).items():
        if tensor.dtype == torch.bfloat16:
            raise ConfigError(
                f"'{name}' is bfloat16, which FLARE's arrays cannot carry; use float32 or float16 weights"
            )
        arrays[name] = tensor.numpy()
    kind = DataKind.WEIGHTS if arrays else DataKind.APP_DEFINED
    filled: Shareable = DXO(kind, data=arrays, meta={_HEADER: json.dumps(message.header)}).update_shareable(shareable)
    return filled


def from_shareable_(shareable: Shareable) -> Message:
    """The inverse of ``to_shareable``; the tensors may be written to.

    Raises:
        CodecError: it is encoded still, or a codec filter refused it.
    """
    message = message_of(shareable)
    if REFUSED in message.header:
        raise CodecError(str(message.header[REFUSED]))
    if coded := message.header.get(CODED):
        raise CodecError(
            f"the message is encoded ({coded.get('codec')}) and was not decoded on its way in: the job's configuration "
            "at the receiver lacks the filter medpfl.flare.filters.DecodeUpdate"
        )
    return message


def message_of(shareable: Shareable) -> Message:
    """The same for filters: encoded messages as they are."""
    dxo = from_shareable(shareable)
    tensors = {}
    for name, array in dxo.data.items():
        whole = np.asarray(array)
        tensors[name] = torch.from_numpy(whole if whole.flags.writeable else whole.copy())
    return Message(json.loads(dxo.meta[_HEADER]), unflatten(tensors))
