# SPDX-License-Identifier: Apache-2.0
"""What goes over the wire: a typed header (``rounds.protocol``) and tensors."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor, nn

from medpfl import store
from medpfl.core.errors import ConfigError, ProtocolError
from medpfl.rounds.protocol.bounded import Part
from medpfl.rounds.protocol.text import Coded

SEPARATOR = "::"
"""Between the slot and the entry in a tensor's name on the wire."""

Slots = dict[str, dict[str, Tensor]]


H = TypeVar("H", bound=Part, covariant=True)
K = TypeVar("K", bound=Part)


@dataclass(frozen=True)
class Message(Generic[H]):
    """``header``: what is asked or answered; ``slots``: slot name to entry to contiguous CPU tensor; ``coded``: what a
    codec's end says of the message; ``encoded``: of an answer that came through a codec, the bytes to the hospital and
    from it, as they travelled; ``own``: nobody but the receiver has the tensors, and the answer may lie in them."""

    header: H
    slots: Slots = field(default_factory=dict)
    coded: Coded | None = None
    encoded: tuple[int, int] | None = None
    own: bool = False

    def of(self, kind: type[K]) -> "Message[K]":
        """This message, known to be of one type.

        Raises:
            ProtocolError: it is of another.
        """
        if not isinstance(self.header, kind):
            raise ProtocolError(f"the message is no {kind.__name__} but a {type(self.header).__name__}")
        return cast("Message[K]", self)


def flatten(slots: Slots) -> dict[str, Tensor]:
    """{"slot::entry": tensor}"""
    return {f"{slot}{SEPARATOR}{key}": tensor for slot, state in slots.items() for key, tensor in state.items()}


def unflatten(tensors: Mapping[str, Tensor]) -> Slots:
    """The inverse of ``flatten``."""
    slots: Slots = {}
    for name, tensor in tensors.items():
        slot, _, key = name.partition(SEPARATOR)
        slots.setdefault(slot, {})[key] = tensor
    return slots


def gather(
    state: Mapping[str, Tensor], slots: Mapping[str, list[str]], wanted: Iterable[str], into: Slots | None = None
) -> Slots:
    """Copies of the wanted slots' entries of networks' ``state``, contiguous on the CPU.

    Args:
        into: tensors of these slots that nobody needs any more; copies are put there.
    """
    return {
        slot: {key: _copied(state[key], (into or {}).get(slot, {}).get(key)) for key in slots[slot]} for slot in wanted
    }


def _copied(tensor: Tensor, into: Tensor | None) -> Tensor:
    if into is None or into.shape != tensor.shape or into.dtype != tensor.dtype:
        return copy_out(tensor)
    return into.copy_(tensor.detach())


def copy_out(tensor: Tensor) -> Tensor:
    """A contiguous CPU copy that shares nothing with the model."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def load(models: nn.Module, slots: Slots) -> None:
    """Copy slots into the models in place; every entry must exist."""
    state = models.state_dict()
    with torch.no_grad():
        for entries in slots.values():
            for key, tensor in entries.items():
                state[key].copy_(tensor)


def table(slots: Slots) -> dict[str, dict[str, list[Any]]]:
    """Slot to entry to [shape, dtype], as JSON values."""
    return {slot: {k: [list(t.shape), str(t.dtype)] for k, t in state.items()} for slot, state in slots.items()}


def fingerprint(slots: Slots) -> str:
    """SHA-256 over all tensors, whatever their order."""
    return store.fingerprint(flatten(slots))


def byte_count(slots: Slots) -> int:
    """Bytes of all tensors."""
    return sum(t.numel() * t.element_size() for state in slots.values() for t in state.values())


def plain_name(name: str) -> str:
    """A name from elsewhere that becomes a folder here: one plain path component.

    Raises:
        ConfigError: it is not.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ConfigError(f"the server sent a name that cannot be a folder: {name!r}")
    return name
