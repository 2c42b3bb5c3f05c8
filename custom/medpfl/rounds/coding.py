# SPDX-License-Identifier: Apache-2.0
"""Codecs in the exchange, without a transport: what both ends of one hospital's connection do to its messages.

To the hospital goes  C(model - reference),  the reference being what the hospital holds since the last exchange, of
which the server keeps a copy: what was lost is part of the next difference. Back comes  C(model - received + residual),
the residual being what earlier updates of this hospital lost; it stays there. Where a hospital answers with what it
holds itself, whatever it was sent (``Method.anew``), comes  C(model - told),  told being its last answer as the server
decoded it, of which both ends keep a copy: a residual would add what the next difference has in it anyway, and grow
without end. An exchange whose answer did not reach the server has not happened: both ends go on from the last one that
did, which the message names by its number.

Every slot is a vector of its own, so a reference model that is switched on or off changes no other slot. Codecs take
parameters. BatchNorm's statistics, counters and what is shown travel as they are: a variance that is moved by another
entry's magnitude can become negative. Gradients are encoded without a reference.

FLARE's filters (``medpfl.flare.filters``) and ``simulate`` call the same two classes, which are in ``rounds.coders``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from medpfl.core.codecs import decode
from medpfl.core.errors import CodecError
from medpfl.core.seeding import derive_seed
from medpfl.rounds.messages import SEPARATOR, Message, Slots, plain_name
from medpfl.rounds.protocol.replies import InitReply, Reply
from medpfl.rounds.protocol.requests import InitRequest, RefineRequest, RunRequest, ValidateRequest

PAYLOAD = "encoded update"
"""Slot of a message: slot to its encoded update, as bytes."""
Tensors = dict[str, Tensor]


@dataclass
class Held:
    """What an end has after exchange ``number``; tensors by "slot::entry".

    ``told``: the hospital's last answer of the slots that it answers ``anew``, as the server decoded it.
    ``began``: at a hospital, the exchange that ended the round before.
    """

    number: int
    reference: Tensors
    residual: Tensors = field(default_factory=dict)
    told: Tensors = field(default_factory=dict)
    began: int | None = None


@dataclass(eq=False, repr=False)
class Coder:
    """What both ends know: the job's name and seed, and, from the hospital's first message, what can be encoded.

    Args:
        root: this end's folder for MedPFL; <root>/<job>/state/<run>/codec keeps what it needs after a restart.
        site: the hospital whose connection it is.
    """

    direction: ClassVar[str]

    root: Path
    site: str
    _learned: bool = field(init=False, default=False)
    _anew: frozenset[str] = field(init=False, default=frozenset())
    _start: Tensors = field(init=False, default_factory=dict)
    _order: dict[str, list[str]] = field(init=False, default_factory=dict)

    def _begin(self, header: InitRequest) -> None:
        self._job, self._learned = plain_name(header.job), False
        self._seed, self._gradients = header.seed, set(header.gradients)

    def _learn(self, reply: Message[Reply]) -> InitReply:
        if not isinstance(reply.header, InitReply):
            raise CodecError(f"{self.site} answered to '{reply.header.task}' before it was ready")
        self._learned = True
        self._anew = frozenset(reply.header.plan.anew)
        kept = set(reply.header.buffers)
        self._order = {slot: list(state) for slot, state in reply.slots.items()}
        self._start = {
            f"{slot}{SEPARATOR}{key}": tensor.clone()
            for slot, state in reply.slots.items()
            for key, tensor in state.items()
            if key not in kept and tensor.is_floating_point() and tensor.numel()
        }
        if reply.slots and not self._start:
            raise CodecError(
                f"{self.site}: nothing that this job's hospitals send can be encoded: statistics of BatchNorm, and "
                "what networks say of public data, travel as they are. Leave the codecs out"
            )
        return reply.header

    def _folder(self, run: str) -> Path:
        return self.root / self._job / "state" / plain_name(run) / "codec"

    def _codable(self, slots: Slots) -> Slots:
        found = {
            slot: {key: t for key, t in state.items() if f"{slot}{SEPARATOR}{key}" in self._start}
            for slot, state in slots.items()
        }
        return {slot: state for slot, state in found.items() if state}

    def _seed_of(self, header: RunRequest, slot: str) -> int:
        """By the round, and not by the exchange's number: after a restart an exchange that was missed has none."""
        last = isinstance(header, ValidateRequest)  # no part of its round
        steps = (header.step,) if isinstance(header, RefineRequest) else ()
        return derive_seed(self._seed, self.site, header.round + last, *steps, self.direction, slot)

    def _decode(self, payload: Mapping[str, Tensor], reference: Tensors, gradients: set[str]) -> Slots:
        """The encoded slots' tensors.

        Raises:
            CodecError: a slot is not known, its bytes are none of a codec's, or what they say is beyond the tensors'
                type (float16 ends at 65504).
        """
        found: Slots = {}
        for slot, data in payload.items():
            prefix = f"{slot}{SEPARATOR}"
            like = {name.removeprefix(prefix): t for name, t in reference.items() if name.startswith(prefix)}
            if not like or data.dtype != torch.uint8:
                raise CodecError(f"{self.site}: an encoded update of slot '{slot}' was not expected")
            try:
                update = decode(data.numpy().tobytes(), like)
            except CodecError as error:
                raise CodecError(f"{self.site}: slot '{slot}': {error}") from error
            whole = slot in gradients
            found[slot] = {key: tensor if whole else like[key] + tensor for key, tensor in update.items()}
            for key, tensor in found[slot].items():
                if not torch.isfinite(tensor).all():
                    raise CodecError(f"{self.site}: '{prefix}{key}' decodes to values beyond {tensor.dtype}")
        return found

    def _merged(self, slots: Slots, decoded: Slots) -> Slots:
        """All slots, with their entries in the order in which the hospital has them."""
        found: Slots = {}
        for slot in dict.fromkeys((*self._order, *slots)):
            if slot == PAYLOAD or (slot not in slots and slot not in decoded):
                continue
            state = {**slots.get(slot, {}), **decoded.get(slot, {})}
            order = [key for key in self._order.get(slot, []) if key in state]
            found[slot] = {key: state[key] for key in dict.fromkeys((*order, *state))}
        return found


def without(slots: Slots, encoded: Slots) -> Slots:
    """What travels as it is."""
    rest = {slot: {k: t for k, t in state.items() if k not in encoded.get(slot, {})} for slot, state in slots.items()}
    return {slot: state for slot, state in rest.items() if state}
