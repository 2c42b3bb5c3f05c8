# SPDX-License-Identifier: Apache-2.0
"""Updates as differences to what a hospital was sent, for filters that are made for such: FLARE's privacy filters.

Apart from the differences travels what no such filter may touch: the statistics of normalisation layers, whose
variances a filter could make negative, and whole numbers. The server adds a difference to what it sent before anything
else sees the update; an entry that a filter took out is as it was sent.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from medpfl.core.errors import ProtocolError
from medpfl.rounds.messages import SEPARATOR, Slots


def statistics_of(models: nn.Module) -> set[str]:
    """State-dict keys of what normalisation layers keep of their inputs: means, variances, counters."""
    trained = dict(models.named_parameters())
    layers = tuple(f"{name}." for name, module in models.named_modules() if isinstance(module, _NormBase))
    return {key for key in models.state_dict() if key.startswith(layers) and key not in trained}


def neither(models: nn.Module, slots: Slots) -> str | None:
    """The name of an entry that is no parameter, no normalisation layer's statistic and no whole number: a difference
    of it means nothing (what a network says of public data, say); None: there is none."""
    known = {*dict(models.named_parameters()), *statistics_of(models)}
    for slot, state in slots.items():
        for key, tensor in state.items():
            if tensor.is_floating_point() and key not in known:
                return f"{slot}{SEPARATOR}{key}"
    return None


def apart(slots: Slots, received: Slots, kept: Collection[str], gradients: Collection[str]) -> tuple[Slots, Slots]:
    """What a hospital sends, as differences and as what stays whole.

    Args:
        slots: what it would send without a filter.
        received: what it was sent with this request.
        kept: entries that stay whole, beside whole numbers.
        gradients: slots that are differences themselves.

    Returns:
        float32 differences, those of single numbers with the shape (1,), for FLARE's filters pass by what has none;
        and the rest.

    Raises:
        ProtocolError: an entry was not received.
    """
    differences: Slots = {}
    whole: Slots = {}
    for slot, state in slots.items():
        for key, tensor in state.items():
            if key in kept or not tensor.is_floating_point():
                whole.setdefault(slot, {})[key] = tensor
                continue
            difference = tensor.double()
            if slot not in gradients:
                if key not in received.get(slot, {}):
                    raise ProtocolError(f"'{slot}{SEPARATOR}{key}' was not received, so there is no difference to it")
                difference = difference - received[slot][key].double()
            differences.setdefault(slot, {})[key] = difference.float().reshape(tensor.shape or (1,))
    return differences, whole


def together(
    differences: Slots, whole: Slots, names: Sequence[str], sent: Slots, gradients: Collection[str] = ()
) -> Slots:
    """The inverse of ``apart``, at the server; entries in the order in which they were sent.

    Args:
        names: the slots that the hospital answers with.
        sent: what it was sent; what it does not answer with, has these values, or 0 in a slot of gradients.

    Raises:
        ProtocolError: an entry is in both parts, was not sent, or has another number of values.
    """
    found: Slots = {}
    for slot in (*names, *differences, *whole):
        if slot not in names or slot not in sent:
            raise ProtocolError(f"slot '{slot[:200]}' is told as a difference, and the hospital was sent none")
        apart, rest = differences.get(slot, {}), whole.get(slot, {})
        for key in (*apart, *rest):
            if key not in sent[slot] or (key in apart and key in rest):
                what = "in both parts of the message" if key in sent[slot] else "told and was not sent"
                raise ProtocolError(f"entry '{slot}{SEPARATOR}{key[:200]}' is {what}")
        own = slot in gradients
        found[slot] = {
            key: rest[key] if key in rest else _moved(f"{slot}{SEPARATOR}{key}", tensor, apart.get(key), own)
            for key, tensor in sent[slot].items()
        }
    return found


def _moved(name: str, sent: Tensor, difference: Tensor | None, alone: bool) -> Tensor:
    base = torch.zeros_like(sent) if alone else sent
    if difference is None:
        return base.clone()
    if difference.numel() != sent.numel() or difference.shape != (sent.shape or (1,)):
        raise ProtocolError(
            f"entry '{name}': expected a difference of shape {list(sent.shape)}, got {list(difference.shape)}"
        )
    if not sent.is_floating_point() or not difference.is_floating_point():
        raise ProtocolError(f"entry '{name}': a difference of whole numbers")
    moved: Tensor = (base.double() + difference.double().reshape(sent.shape)).to(sent.dtype)
    return moved
