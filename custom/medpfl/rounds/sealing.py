# SPDX-License-Identifier: Apache-2.0
"""Slots whose floating-point entries are encrypted: what a hospital seals and opens, and what the server does with them
in between, without a key (``privacy.ckks``).

Of initial weights only names and shapes leave: they may be those of a checkpoint that is the hospitals' alone.
Of a slot all floating-point entries together are one row of numbers, in the order in which the hospital has them, cut
into ciphertexts; whole numbers (BatchNorm's counts of steps) travel as they are, for nothing mixes them. What a message
of the server does not hold, the hospital has itself: its initial weights, which are the same everywhere. So they are
never sent back to it, and a model in the clear is refused.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from medpfl.core.errors import CodecError, MedPFLError, RefusedUpdate
from medpfl.core.mixing import Matrix
from medpfl.data.site_file import SiteFile
from medpfl.privacy import ckks
from medpfl.privacy.keys import read_key
from medpfl.rounds.messages import SEPARATOR, Message, Slots, fingerprint
from medpfl.rounds.protocol.replies import InitReply, RefineReply, Reply, TrainReply
from medpfl.rounds.protocol.requests import InitRequest, RefineRequest, Request, TrainRequest, ValidateRequest
from medpfl.rounds.refining import OF
from medpfl.rounds.server.checks import Table, check_update, check_values

State = dict[str, Tensor]
_NAME = "ciphertext "
_ROUNDING = 1e-6
"""By so much CKKS can make a variance of zero negative."""


def _names(count: int) -> list[str]:
    return [f"{_NAME}{index}" for index in range(count)]


def _sealed(state: Mapping[str, Tensor]) -> list[bytes]:
    """The ciphertexts of a state, in their order."""
    count = sum(key.startswith(_NAME) for key in state)
    return [state[name].numpy().tobytes() for name in _names(count)]


def _as_tensors(blocks: Sequence[bytes]) -> State:
    return {
        name: torch.frombuffer(bytearray(block), dtype=torch.uint8)
        for name, block in zip(_names(len(blocks)), blocks, strict=True)
    }


def whole_numbers(state: Mapping[str, Tensor]) -> State:
    """The entries that are not encrypted."""
    return {key: t for key, t in state.items() if not t.is_floating_point() and not key.startswith(_NAME)}


# -- the server -------------------------------------------------------------------------------------------------------


def sealed_table(expected: Table) -> dict[str, dict[str, list[Any]]]:
    """Of a table of slots what travels when they are sealed: slot to names of ciphertexts, and entries of whole
    numbers."""
    found: dict[str, dict[str, list[Any]]] = {}
    for slot, entries in expected.items():
        size = sum(int(np.prod(shape)) for shape, dtype in entries.values() if _is_real(dtype))
        found[slot] = {key: entry for key, entry in entries.items() if not _is_real(entry[1])}
        found[slot].update({name: [None, "torch.uint8"] for name in _names(ckks.count_of(size))})
    return found


def _is_real(dtype: str) -> bool:
    return bool(getattr(torch, dtype.removeprefix("torch.")).is_floating_point)


def check_sealed(site: str, slots: Slots, expected: Table, buffers: Collection[str] = ()) -> None:
    """A sealed update must have exactly the ciphertexts and whole numbers that the job's slots make, each ciphertext of
    the right form. What is in them, only a hospital can check.

    Args:
        expected: of the slots before they are sealed.

    Raises:
        RefusedUpdate: naming the hospital and the entry.
    """
    wanted = sealed_table(expected)
    for slot, state in slots.items():
        for key in state:
            where = f"{site}: entry '{slot}{SEPARATOR}{key}'"
            if key.startswith(_NAME) and key not in wanted.get(slot, {}):
                raise RefusedUpdate(f"{where} was not asked for")
            if not key.startswith(_NAME) and state[key].is_floating_point():
                raise RefusedUpdate(f"{where} is not encrypted, and this job's are")
    for slot, names in wanted.items():
        for key in (name for name in names if name.startswith(_NAME)):
            where, tensor = f"{site}: entry '{slot}{SEPARATOR}{key}'", slots.get(slot, {}).get(key)
            if tensor is None:
                raise RefusedUpdate(f"{where} is missing")
            if tensor.dtype != torch.uint8 or tensor.dim() != 1 or tensor.numel() > ckks.LONGEST:
                raise RefusedUpdate(f"{where} is no row of at most {ckks.LONGEST} bytes")
            try:
                ckks.check_block(tensor.numpy().tobytes())
            except CodecError as error:
                raise RefusedUpdate(f"{where}: {error}") from error
    clear = {slot: {k: t for k, t in state.items() if not k.startswith(_NAME)} for slot, state in slots.items()}
    plain = {slot: {k: e for k, e in names.items() if not k.startswith(_NAME)} for slot, names in wanted.items()}
    check_update(site, clear, plain, buffers)


def mix_sealed(matrix: Matrix, states: Sequence[State]) -> list[State]:
    """As ``core.mixing.mix`` on what is in the ciphertexts; whole numbers stay as each hospital had them.

    Raises:
        MedPFLError: the ciphertexts cannot be summed up.
    """
    copies = [_sealed(state) or None for state in states]
    if not any(copies):
        return list(states)
    try:
        rows = ckks.weighted_rows(matrix, copies)
    except CodecError as error:
        raise MedPFLError(f"the hospitals' encrypted models cannot be mixed: {error}") from error
    tensors: dict[int, State] = {id(row): _as_tensors(row) for row in rows if row is not None}
    return [
        {**whole_numbers(state), **(tensors[id(row)] if row is not None else {})}
        for state, row in zip(states, rows, strict=True)
    ]


def _blank(state: Mapping[str, Tensor]) -> State:
    """Zeros in place of what would be encrypted."""
    return {key: torch.zeros_like(t) if t.is_floating_point() else t for key, t in state.items()}


# -- a hospital -------------------------------------------------------------------------------------------------------


class Seal:
    """A hospital's end.

    Args:
        site: its name.
        key: the hospitals'.
        start: its initial slots, which all hospitals have alike.
        buffers: entries that are not trained.
        roster: the hospitals' names.

    Raises:
        CodecError: a network has complex numbers, which would pass for whole numbers and leave as they are.
    """

    def __init__(self, site: str, key: ckks.Key, start: Slots, buffers: Collection[str], roster: Sequence[str]):
        for slot, state in start.items():
            for entry in (entry for entry, tensor in state.items() if tensor.is_complex()):
                raise CodecError(
                    f"{site}: entry '{slot}{SEPARATOR}{entry}' holds complex numbers, which cannot be encrypted"
                )
        self._site, self._key, self._start = site, key, start
        self._buffers, self._roster = frozenset(buffers), tuple(roster)

    @property
    def fingerprint(self) -> str:
        """Tells the hospitals' key from another one."""
        return self._key.fingerprint

    def mark(self) -> dict[str, str]:
        """By which the server sees that hospitals start from equal weights, and nothing of these."""
        return {"initial weights": self._key.mark(fingerprint(self._start))}

    def close(self, reply: Message[Reply]) -> Message[Reply]:
        """The answer as it leaves.

        Raises:
            CodecError: an entry holds what cannot be encrypted.
        """
        if isinstance(reply.header, InitReply):
            return Message(reply.header, {slot: _blank(state) for slot, state in reply.slots.items()})
        if not isinstance(reply.header, TrainReply | RefineReply):
            return reply
        return Message(reply.header, {slot: self._closed(slot, state) for slot, state in reply.slots.items()})

    def _closed(self, slot: str, state: Mapping[str, Tensor]) -> State:
        row = [state[key].double().reshape(-1).numpy() for key in self._reals(slot)]
        for key, values in zip(self._reals(slot), row, strict=True):
            if values.size and not np.abs(values).max() <= ckks.LARGEST:  # NaN is not
                raise CodecError(
                    f"{self._site}: entry '{slot}{SEPARATOR}{key}' holds NaN or values beyond {ckks.LARGEST:g}, which "
                    "cannot be encrypted"
                )
        return {**whole_numbers(state), **_as_tensors(self._key.encrypt(np.concatenate([np.empty(0), *row])))}

    def open(self, message: Message[Request]) -> Message[Request]:
        """The message as the hospital reads it.

        Raises:
            CodecError: it holds a model in the clear, or what does not decrypt to a model of this job's.
        """
        header, given = message.header, message.slots
        if isinstance(header, InitRequest):
            return message
        found = {name: self._opened(name, state) for name, state in given.items()}
        if isinstance(header, TrainRequest | ValidateRequest):
            found = {slot: found.get(slot) or self._copy(slot) for slot in self._start}
        if isinstance(header, RefineRequest):
            for slot in {name.partition(OF)[0] for name in given if OF in name and not name.endswith(f"{OF}*")}:
                found.update({name: self._copy(slot) for w in self._roster if (name := f"{slot}{OF}{w}") not in found})
        return Message(header, found)

    def _copy(self, slot: str) -> State:
        return {key: tensor.clone() for key, tensor in self._start[slot].items()}

    def _reals(self, slot: str) -> list[str]:
        return [key for key, tensor in self._start[slot].items() if tensor.is_floating_point()]

    def _opened(self, name: str, state: Mapping[str, Tensor]) -> State:
        slot = name.partition(OF)[0]
        if slot not in self._start:
            raise CodecError(f"{self._site} was sent slot '{slot}', which its networks do not have")
        clear = [key for key in state if not key.startswith(_NAME)]
        for key in clear:
            if state[key].is_floating_point() or key not in self._start[slot]:
                raise CodecError(f"{self._site} was sent '{slot}{SEPARATOR}{key}' in the clear, and this job encrypts")
        if len(clear) == len(state):  # nobody has mixed this copy yet
            return {**self._copy(slot), **state}
        sizes = [self._start[slot][key].numel() for key in self._reals(slot)]
        try:
            row = self._key.decrypt(_sealed(state), sum(sizes))
        except CodecError as error:
            raise CodecError(f"{self._site}: slot '{slot}' as the server sent it: {error}") from error
        return self._parted(slot, row, sizes, {key: state[key] for key in clear})

    def _parted(self, slot: str, row: NDArray[np.float64], sizes: Sequence[int], clear: State) -> State:
        found = self._copy(slot)
        found.update(clear)
        for key, values in zip(self._reals(slot), torch.split(torch.from_numpy(row), list(sizes)), strict=True):
            if key in self._buffers and key.rpartition(".")[2] == "running_var":
                values = torch.where((values < 0) & (values > -_ROUNDING), 0.0, values)
            found[key] = values.to(found[key].dtype).reshape(found[key].shape)
        try:  # what the server checks where it can see the tensors
            check_values(self._site, {slot: found}, self._buffers)
        except RefusedUpdate as error:
            raise CodecError(f"what the server sent to {error}") from error
        return found


def seal_of(
    header: InitRequest, site: SiteFile, name: str, start: Slots, buffers: Collection[str], roster: Sequence[str]
) -> Seal | None:
    """A hospital's end in a job that encrypts; None: it does not.

    Raises:
        MedPFLError: the site file names no key, or one that cannot be used, or a network has complex numbers.
    """
    if header.encryption is None:
        return None
    return Seal(name, read_key(site.key_file()), start, buffers, roster)
