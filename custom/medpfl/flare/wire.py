# SPDX-License-Identifier: Apache-2.0
"""Messages as FLARE shareables: numpy arrays in a DXO, so that FLARE's own filters (privacy, encryption) can act."""

import json

import numpy as np
import torch
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.shareable import Shareable

from medpfl.core.errors import ConfigError
from medpfl.rounds.messages import Message, flatten, unflatten

_HEADER = "medpfl"
ERROR = "medpfl_error"
"""Header of a failed reply: what may be said about the failure outside the hospital."""


def to_shareable(message: Message) -> Shareable:
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
    shareable: Shareable = DXO(kind, data=arrays, meta={_HEADER: json.dumps(message.header)}).to_shareable()
    return shareable


def from_shareable_(shareable: Shareable) -> Message:
    """The inverse of ``to_shareable``; the tensors may be written to."""
    dxo = from_shareable(shareable)
    tensors = {}
    for name, array in dxo.data.items():
        whole = np.asarray(array)
        tensors[name] = torch.from_numpy(whole if whole.flags.writeable else whole.copy())
    return Message(json.loads(dxo.meta[_HEADER]), unflatten(tensors))
