# SPDX-License-Identifier: Apache-2.0
"""The coders at the two ends of a hospital's connection (see ``rounds.coding``), and both in one process."""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from medpfl import store
from medpfl.component import class_paths, spec_of
from medpfl.core.codecs import Codec, Progress, encode_with_feedback
from medpfl.core.digest import digest_of
from medpfl.core.errors import CodecError, MedPFLError
from medpfl.core.mapped import move_to_file
from medpfl.core.sources import code_here
from medpfl.job.codecs import TASKS, Codecs
from medpfl.rounds.coding import PAYLOAD, Coder, Held, Tensors, without
from medpfl.rounds.hospital.private import KEPT
from medpfl.rounds.memory import budget
from medpfl.rounds.messages import SEPARATOR, Message, byte_count, flatten, unflatten
from medpfl.rounds.protocol.bounded import Component, as_json
from medpfl.rounds.protocol.replies import Reply
from medpfl.rounds.protocol.requests import InitRequest, Request, RunRequest, TrainRequest, ValidateRequest
from medpfl.rounds.protocol.text import Answered, Asked, Coded, parse


@dataclass(eq=False, repr=False)
class ServerCoder(Coder):
    """The server's end of one hospital's connection; its folder keeps the reference copies.

    Attributes:
        traffic: bytes of the last exchange's tensors as they travelled: to the hospital, and from it.
    """

    direction = "to_site"

    traffic: tuple[int, int] | None = field(init=False, default=None)
    _run: str | None = field(init=False, default=None)
    _held: Held | None = field(init=False, default=None)
    _pending: tuple[Held, RunRequest, int, Codec | None] | None = field(init=False, default=None)
    _count: int = field(init=False, default=0)
    _keep: int | None = field(init=False, default=None)
    _hospitals: int = field(init=False, default=1)
    _on_disk: bool = field(init=False, default=False)

    def send(self, message: Message[Request], codec: Codec | None) -> Message[Request]:
        """The message as it travels.

        Raises:
            CodecError: the models cannot be encoded.
        """
        header, slots = message.header, message.slots
        if isinstance(header, InitRequest):
            self._begin(header)
            self._hospitals = len(header.roster)
            return Message(header.model_copy(update={"codec": as_json(spec_of(codec)) if codec else None}), slots)
        if not isinstance(header, RunRequest):
            raise CodecError(f"{self.site}: a request to '{header.task}' does not pass a codec filter")
        self._enter(header)
        base = self._held
        self._count = max(self._count, base.number if base else 0) + 1
        target = self._codable(slots)
        reference = base.reference if base else {}
        payload: Tensors = {}
        if codec is None or base is None:
            new = {name: tensor.clone() for name, tensor in flatten(target).items()}
        else:
            updates = {
                slot: {key: t - reference[f"{slot}{SEPARATOR}{key}"] for key, t in state.items()}
                for slot, state in target.items()
            }
            new = {}
            for slot, update in sorted(updates.items()):
                with _of(slot):
                    data, sent = codec.encode_and_tell(update, self._seed_of(header, slot))
                payload[slot] = _bytes(data)
                new.update({name: reference[name] + t for name, t in flatten({slot: sent}).items()})
            slots = {**without(slots, target), PAYLOAD: payload}
        held = Held(self._count, {**reference, **new}, told=dict(base.told) if base else {})
        self._put_away(reference)
        self._put_away(held.reference)
        self._pending = (held, header, byte_count(slots), codec)
        number = base.number if base else None
        coded = Coded(number=self._count, base=number, keep=self._keep, codec=codec.tag if codec else None)
        return Message(header, slots, coded)

    def receive(self, reply: Message[Reply]) -> Message[Reply]:
        """What the hospital sent, decoded.

        Raises:
            CodecError: it is no answer to the last message, or cannot be decoded.
        """
        if not self._learned:
            self._learn(reply)
            # Of every hospital what it holds, and what it will hold once it has answered.
            self._on_disk = 2 * self._hospitals * byte_count({"": self._start}) > budget()
            self._put_away(self._start)
            return reply
        given = reply.coded
        if given is None:
            raise CodecError(f"{self.site}: its answer did not pass a codec filter there, as this job's must")
        if self._pending is None or given.number != self._pending[0].number:
            raise CodecError(f"{self.site} answered to another message than the last")
        held, header, sent, codec = self._pending
        told = held.told if given.base is not None else {}
        decoded = self._decode(reply.slots.get(PAYLOAD, {}), {**held.reference, **told}, self._gradients)
        anew = flatten({slot: state for slot, state in decoded.items() if slot in self._anew})
        held.told.update((name, tensor.clone()) for name, tensor in anew.items())  # answers are mixed in place
        self._held, self.traffic = held, (sent, byte_count(reply.slots))
        self._pending = None
        self._save(header, codec)
        self._put_away({**held.reference, **{f"told {name}": tensor for name, tensor in held.told.items()}})
        return Message(reply.header, self._merged(reply.slots, decoded), encoded=self.traffic)

    def _put_away(self, tensors: Tensors) -> None:
        """Let them lie in a file, where the references of all hospitals do not fit into memory."""
        if not self._on_disk:
            return
        path = self.root / f".reference-{os.getpid()}-{self.site}"
        try:
            move_to_file(tensors.values(), path)
        except OSError as error:
            raise MedPFLError(
                f"cannot keep {self.site}'s reference in {path}: {error.strerror}",
                f"a reference could not be kept: {error.strerror}",
            ) from error

    def forget(self) -> None:
        """The hospital has no reference any more: the next message goes whole."""
        self._held = None

    def _enter(self, header: RunRequest) -> None:
        done = header.round - isinstance(header, TrainRequest)
        if self._run != header.run:
            self._run = header.run
            folder = self._folder(header.run) / self.site
            store.discard(folder, "sent", range(1, done + 1))
            kept, damaged = store.newest(folder, "sent")
            if kept is not None and kept.meta.get("begun", "") != header.begun:  # of a run with the same key, before
                store.discard(folder, "sent")
                kept, damaged = None, []
            self._held = Held(0, dict(self._start)) if done == 0 else None
            if kept is not None:
                number = kept.meta["number"]
                assert isinstance(number, int)
                parts = _parted(kept.tensors)
                self._held = Held(number, parts["reference"], told=parts["told"])
            if damaged:
                store.discard(folder, "sent", [kept.number] if kept is not None else [])
                raise CodecError(
                    f"the server's copy of what {self.site} held after round {damaged[0]} is damaged; the next message "
                    f"goes {'from an older copy' if kept else 'whole'}, and what compression had left over is lost"
                )
        if self._held is not None and not self._held.number and done > 0:
            self._held = None  # it missed all rounds so far: a process that took up the run would know of nothing, too
        if isinstance(header, TrainRequest):
            self._keep = self._held.number if self._held else None

    def _save(self, header: RunRequest, codec: Codec | None) -> None:
        assert self._held is not None
        # The last validation is no part of its round: who is killed after it goes on from what the round ended with.
        folder, current = self._folder(header.run) / self.site, header.round + isinstance(header, ValidateRequest)
        tensors = (self._held.reference if codec else {}) | _named("told", self._held.told)
        about = {"number": self._held.number, "begun": header.begun}
        store.save(store.path_of(folder, "sent", current), tensors, about)
        store.prune(folder, "sent", current, KEPT)


@dataclass(eq=False, repr=False)
class SiteCoder(Coder):
    """The hospital's end; its folder keeps reference and residual.

    Attributes:
        lost: whether the last message named an exchange of which nothing is kept here.
    """

    direction = "from_site"

    lost: bool = field(init=False, default=False)
    _to_site: Component | None = field(init=False, default=None)
    _run: str = field(init=False, default="")
    _known: dict[int, Held] = field(init=False, default_factory=dict)
    _now: Held | None = field(init=False, default=None)
    _answered: RunRequest | None = field(init=False, default=None)
    _base: int | None = field(init=False, default=None)
    _progress: Progress = field(init=False, default_factory=Progress)
    _needed: set[int] = field(init=False, default_factory=set)
    _config: str = field(init=False, default="")

    def receive(self, message: Message[Request]) -> Message[Request]:
        """The server's message, decoded.

        Raises:
            CodecError: it cannot be decoded here.
        """
        header = message.header
        self.lost, self._now = False, None
        if isinstance(header, InitRequest):
            self._begin(header)
            self._asked, self._to_site = header, header.codec
            return Message(header, message.slots)
        if not isinstance(header, RunRequest):
            raise CodecError(f"{self.site}: a request to '{header.task}' does not pass a codec filter")
        if isinstance(header, TrainRequest) and header.progress is not None:
            self._progress = Progress(header.progress.losses, header.progress.scale)
        coded = message.coded
        if coded is None:
            raise CodecError(f"{self.site}: the server's job has no codec filters, but this hospital's has")
        if header.run != self._run:
            self._run, self._known = header.run, {0: Held(0, dict(self._start))}
        base = None if coded.base is None else self._recall(coded.base)
        payload = message.slots.get(PAYLOAD, {})
        if payload and base is None:
            raise CodecError(f"{self.site}: an encoded update without a reference cannot be decoded")
        reference = base.reference if base else {}
        decoded = self._decode(payload, reference, set())
        slots = self._merged(message.slots, decoded)
        new = {name: tensor.clone() for name, tensor in flatten(self._codable(slots)).items()}
        residual, told = (dict(base.residual), dict(base.told)) if base else ({}, {})
        self._now, self._answered = Held(coded.number, {**reference, **new}, residual, told, coded.keep), header
        self._base = coded.base
        self._needed = {n for n in (coded.base, coded.keep, coded.number) if n is not None}
        return Message(header, slots)

    def send(self, reply: Message[Reply], codec: Codec | None) -> Message[Reply]:
        """The hospital's answer as it travels.

        Raises:
            CodecError: the update cannot be encoded: it holds NaN, say.
        """
        if not self._learned:
            header = self._learn(reply)
            self._config = header.config
            specs = {"to_site": self._to_site, "from_site": as_json(spec_of(codec)) if codec else None}
            code = code_here(class_paths(specs))
            # A run goes on with the codecs it began with only.
            config = digest_of([header.config, specs, *([code] if code else ())])
            adapts = bool(codec and codec.adapts)
            about = {"config": config, "codecs": specs, "adapts": adapts}
            return Message(header.model_copy(update=about), reply.slots)
        now = self._now
        if now is None:
            raise CodecError(f"{self.site}: the server's message did not pass this hospital's codec filter")
        slots, base = reply.slots, None
        if codec is not None:
            codec = codec.at(self._progress)
            base = self._base if codec.contracts and now.told else None
            target = self._codable(slots)
            payload = {slot: self._encode(slot, target[slot], now, codec) for slot in sorted(target)}
            if payload:
                slots = {**without(slots, target), PAYLOAD: payload}
        self._save(now)
        return Message(reply.header, slots, Coded(number=now.number, base=base, codec=codec.tag if codec else None))

    def keep_start(self, file: Path, reply: Message[Reply]) -> None:
        """Keep the first exchange, for a process that is started after this one was killed (``start_again``)."""
        said = {"asked": Asked(content=self._asked), "answered": Answered(content=reply.header)}
        store.save(file, flatten(reply.slots), {name: text.model_dump_json() for name, text in said.items()})

    def start_again(self, file: Path) -> None:
        """Be where this end was after the first exchange.

        Raises:
            MedPFLError: the file is damaged.
        """
        tensors, meta = store.read(file)
        self.receive(Message(parse(Asked, meta["asked"]).content))
        self.send(Message(parse(Answered, meta["answered"]).content, unflatten(tensors)), None)

    def _encode(self, slot: str, state: Tensors, now: Held, codec: Codec) -> Tensor:
        names = {key: f"{slot}{SEPARATOR}{key}" for key in state}
        whole = slot in self._gradients
        before = {**now.reference, **now.told}
        update = {key: t if whole else t - before[names[key]] for key, t in state.items()}
        assert self._answered is not None
        seed = self._seed_of(self._answered, slot)
        with _of(slot):
            if not codec.contracts:
                return _bytes(codec.encode(update, seed))
            if slot in self._anew:
                data, sent = codec.encode_and_tell(update, seed)
                now.told.update({names[key]: before[names[key]] + t for key, t in sent.items()})
                return _bytes(data)
            residual = {key: now.residual[name] for key, name in names.items() if name in now.residual}
            data, lost = encode_with_feedback(codec, update, residual, seed)
        now.residual.update({names[key]: t for key, t in lost.items()})
        return _bytes(data)

    def _recall(self, number: int) -> Held:
        if number not in self._known:
            path = store.path_of(self._folder(self._run), "held", number)
            nothing = f"{self.site}: nothing is kept here of exchange {number}; the next message is asked for whole"
            if not path.is_file():
                self.lost = True
                raise CodecError(nothing)
            try:
                tensors, meta = store.read(path)
            except store.DamagedFile as error:
                self.lost = True
                raise CodecError(
                    f"{self.site}: what is kept here of exchange {number} is damaged; the next message is asked for "
                    "whole"
                ) from error
            if meta.get("config") != self._config:  # of a job with less noise, or none, whose residual would leave now
                self.lost = True
                raise CodecError(nothing)
            began = meta["began"]
            assert began is None or isinstance(began, int)
            self._known[number] = Held(number, **_parted(tensors), began=began)
        return self._known[number]

    def _save(self, now: Held) -> None:
        self._known = {number: held for number, held in self._known.items() if number in self._needed}
        self._known[now.number] = now
        folder = self._folder(self._run)
        tensors = _named("residual", now.residual) | _named("told", now.told)
        if self._to_site is not None:
            tensors.update(_named("reference", now.reference))
        store.save(
            store.path_of(folder, "held", now.number),
            tensors,
            {"number": now.number, "began": now.began, "config": self._config},
        )
        # The server may have to go back by two rounds (see ``private.KEPT``): what it then starts from stays on disk.
        older = self._known[now.began].began if now.began in self._known else None
        store.discard(folder, "held", {older, *self._needed})


@contextmanager
def _of(slot: str) -> Iterator[None]:
    try:
        yield
    except CodecError as error:
        raise CodecError(f"slot '{slot}': {error}") from error


def _named(kind: str, tensors: Tensors) -> Tensors:
    """For a file that holds several kinds."""
    return {f"{kind}/{name}": tensor for name, tensor in tensors.items()}


def _parted(tensors: Tensors) -> dict[str, Tensors]:
    """Kind to the tensors that ``_named`` gave their names; those without one are of the reference."""
    parts: dict[str, Tensors] = {"reference": {}, "residual": {}, "told": {}}
    for name, tensor in tensors.items():
        kind, _, key = name.partition("/")
        if kind in parts:
            parts[kind][key] = tensor
        else:
            parts["reference"][name] = tensor
    return parts


def _bytes(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


class Link:
    """Both ends in one process, for ``simulate``."""

    def __init__(self, codecs: Codecs, server: Path, hospital: Path, site: str):
        self._codecs = codecs
        self._server, self._site = ServerCoder(server, site), SiteCoder(hospital, site)

    def carry(self, message: Message[Request], handle: Callable[[Message[Request]], Message[Reply]]) -> Message[Reply]:
        """Give the message to the hospital and its answer back.

        Raises:
            CodecError: as the ends raise it; it is this hospital's failed round.
        """
        if message.header.task not in TASKS:
            return handle(message)
        try:
            reply = handle(self._site.receive(self._server.send(message, self._codecs.to_site)))
            return self._server.receive(self._site.send(reply, self._codecs.from_site))
        except CodecError:
            if self._site.lost:
                self._server.forget()
            raise


def links_of(codecs: Codecs | None, sites: Iterable[str], server: Path, hospitals: Path) -> dict[str, Link]:
    """Every hospital's link, where the job has codecs.

    Args:
        server: the server's folder; ``hospitals``: the folder that holds those of the hospitals.
    """
    return {site: Link(codecs, server, hospitals / site, site) for site in sites} if codecs else {}
