# SPDX-License-Identifier: Apache-2.0
"""The comparison's methods, built: the references and the file's, each with a server component a slot."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from medpfl.compare.file import FEDAVG, LOCAL, POOLED, SHARED, Arguments, Comparison, Component, MethodEntry
from medpfl.compare.orders import Specs
from medpfl.compare.run_results import Initial
from medpfl.compare.unseen import SUPER
from medpfl.component import build, find_class, spec_of
from medpfl.core.codecs import Codec
from medpfl.core.digest import digest_of
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Mixer
from medpfl.data.samples import SiteData
from medpfl.job.codecs import Codecs
from medpfl.job.slots import default_mixer
from medpfl.methods import references
from medpfl.methods.contract import Build, Method
from medpfl.methods.returned import networks_of, slots_of
from medpfl.methods.start import Started
from medpfl.rounds.protocol.bounded import as_json
from medpfl.store import fingerprint
from medpfl.tasks.contract import Task


@dataclass(frozen=True)
class Entry:
    """A method of the comparison, built: what its runs share. ``values``: what a search or a sweep set, by argument."""

    name: str
    method: Method
    mixers: dict[str, Mixer]
    values: Arguments = field(default_factory=dict)
    codecs: Codecs | None = None

    def spec(self) -> Specs:
        slots = {slot: as_json(spec_of(mixer)) for slot, mixer in self.mixers.items()}
        codecs = as_json(spec_of(self.codecs)["args"]) if self.codecs else None
        return Specs.model_validate({"method": as_json(spec_of(self.method)), "slots": slots, "codecs": codecs})


def build_codecs(given: Mapping[str, object], where: str) -> Codecs:
    """Codecs by direction, of their configuration.

    Raises:
        ConfigError: with the place.
    """
    found = {
        way: build(spec, Codec, f"{where}.{way}") if (spec := given.get(way)) else None
        for way in ("to_site", "from_site")
    }
    try:
        return Codecs(**found)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def names_of(file: Comparison, task: Task) -> list[str]:
    """The methods' names in their order, references first. Hospitals with different networks have no FedAvg.

    Raises:
        ConfigError: 'pooled' is asked for, but hospitals have different networks.
    """
    if task.networks_differ and file.pooled:
        raise ConfigError("'pooled' trains one network on all data; this task has different ones at the hospitals")
    common = [] if task.networks_differ else [FEDAVG]
    return [LOCAL, *common, *([POOLED] if file.pooled else []), *file.compared]


def build_entry(file: Comparison, name: str, made: Build, values: Arguments) -> Entry:
    """A reference or a method of the file.

    Args:
        made: what networks are built from; its roster is that of the comparison.
        values: arguments in place of the file's: ``lr`` of the method, ``model.lam`` of slot "model"'s component.

    Raises:
        ConfigError: a class, argument or slot is wrong; with the method's name.
    """
    if name in file.compared:
        written, swept = file.compared[name]
        values = {**swept, **values}
        given, where = file.methods[written], f"methods.{written}"
        kind = find_class(given.path, where)
        if kind in references.REFERENCES.values():
            raise ConfigError(f"{where}: {kind.__name__} is in every comparison already")
    else:
        riding = references.REFERENCES
        kind, where = {LOCAL: riding["local"], FEDAVG: riding["fedavg"], POOLED: references.POOLED}[name], name
        given = MethodEntry(path=f"{kind.__module__}.{kind.__qualname__}")
    arguments = {key: value for key, value in values.items() if "." not in key}
    args = {**file.training, **given.args, **arguments}
    args.update({key: value for key in ("steps", "epochs") if (value := getattr(file, key)) is not None})
    if name == POOLED and file.steps is not None:
        args["steps"] = file.steps * len(made.roster)  # as many as all hospitals together
    method: Method = build({"path": given.path, "args": args}, Method, where)
    mixers = _mixers(method, given, made, values, where)
    if not mixers:
        raise ConfigError(f"{where}: {kind.__name__} has no slot, so there is nothing to federate")
    codecs = build_codecs(given.codecs.model_dump(), f"{where}.codecs") if given.codecs else None
    entry = Entry(name, method, mixers, dict(values), codecs)
    check_roster(entry, made.roster, where)
    _check_length(entry, file.rounds, where)
    return entry


def _mixers(method: Method, given: MethodEntry, made: Build, values: Arguments, where: str) -> dict[str, Mixer]:
    try:
        slots = list(slots_of(method, nn.ModuleDict(networks_of(method, made))))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    searched: dict[str, Arguments] = {}
    for key, value in values.items():
        slot, _, argument = key.rpartition(".")
        if slot:
            searched.setdefault(slot, {})[argument] = value
    for slot in (*given.slots, *searched):
        if slot not in slots:
            raise ConfigError(f"{where}: there is no slot '{slot}'; its slots are: {', '.join(slots) or 'none'}")
    mixers: dict[str, Mixer] = {}
    for slot in slots:
        named = given.slots.get(slot)
        if named is None:
            mixer = _default(method, slot, where)
            if slot not in searched:
                mixers[slot] = mixer
                continue
            named = Component.model_validate(spec_of(mixer))
        spec = {"path": named.path, "args": {**named.args, **searched.get(slot, {})}}
        mixers[slot] = build(spec, Mixer, f"{where}.slots.{slot}")
    return mixers


def _default(method: Method, slot: str, where: str) -> Mixer:
    try:
        return default_mixer(method, slot)
    except ConfigError as error:
        raise ConfigError(
            f"{where}: {error}; write it in the comparison file as {where}.slots.{slot}: {{path: ..., args: ...}}"
        ) from error


def check_roster(entry: Entry, roster: tuple[str, ...], where: str) -> None:
    """Refuse components whose parameters do not fit so many hospitals.

    Raises:
        ConfigError: with the method, the slot and what its component says.
    """
    for slot, mixer in entry.mixers.items():
        try:
            mixer.check(roster)
        except ConfigError as error:
            raise ConfigError(f"{where}.slots.{slot}: {error}") from error


def _check_length(entry: Entry, rounds: int, where: str) -> None:
    """Before the first run instead of in the method's own, which may come hours later."""
    parts: dict[str, Method | Mixer] = {where: entry.method}
    parts.update((f"{where}.slots.{slot}", mixer) for slot, mixer in entry.mixers.items())
    for place, part in parts.items():
        try:
            part.check_length(rounds)
        except ConfigError as error:
            raise ConfigError(f"{place}: {error}") from error


def check_equal_work(entries: list[Entry]) -> None:
    """Refuse methods that would see another number of batches, or other batches, a round. Pooled is not looked at: it
    takes as many as all hospitals together.

    Raises:
        ConfigError: naming the method, what differs, and the two values.
    """
    entries = [entry for entry in entries if entry.name != POOLED]
    first = entries[0].method
    counted = [key for key in SHARED if key != "epochs" or first.steps is None]  # steps, where given, count instead
    for entry in entries[1:]:
        for key in counted:
            mine, theirs = getattr(entry.method, key), getattr(first, key)
            if mine != theirs:
                raise ConfigError(
                    f"unfair: {entry.name} trains with {key} {mine}, {entries[0].name} with {theirs}; a comparison "
                    "gives every method the same local work"
                )


def check_names(entries: list[Entry], roster: tuple[str, ...]) -> None:
    """Refuse a method with the name of another one's row: their runs would be taken for those of one method.

    Raises:
        ConfigError: naming both.
    """
    rows = dict[str, str]()
    for entry in entries:
        _, *others = entry.method.deploys  # the first one's row has the method's name
        joint = [SUPER] if entry.method.joint(roster) is not None else []
        rows |= {f"{entry.name} ({model})": entry.name for model in (*others, *joint)}
    for entry in entries:
        if entry.name in rows:
            raise ConfigError(
                f"methods.{entry.name}: '{entry.name}' is the row of another model of {rows[entry.name]}; give your "
                "method another name"
            )


def initial_weights(entry: Entry, made: Build) -> Initial:
    """Digest of the task's network, and which of the method's networks start from it.

    Raises:
        ConfigError: networks of the same shapes are there and all start from other weights than every other method's.
    """
    reference = made.network().state_dict()
    digest, shapes = fingerprint(reference), _shapes(reference)
    same, own = list[str](), list[str]()
    differing = None
    for name, network in networks_of(entry.method, made).items():
        state = network.state_dict()
        equal = fingerprint(state) == digest
        (same if equal else own).append(name)
        if not equal and _shapes(state) == shapes:
            differing = name
    if differing and not same:  # some of several models may differ: IFCA's have to
        raise ConfigError(
            f"unfair: {entry.name} starts its network '{differing}' from other initial weights than the other methods "
            f"(seed {made.seed}); make it with build.network()"
        )
    return Initial(digest=digest, same=same, own=own)


def initial_everywhere(
    entry: Entry,
    task: Task,
    data: Mapping[str, SiteData],
    roster: tuple[str, ...],
    seed: int,
    start: Started | None = None,
) -> Initial:
    """``initial_weights`` at the first hospital, or at every one of ``data`` where their networks differ.

    Raises:
        ConfigError: as ``initial_weights``.
    """
    sites = sorted(data) if task.networks_differ else sorted(data)[:1]
    found = [
        initial_weights(entry, Build(task.at(site), data[site], roster, seed, site, start=start)) for site in sites
    ]
    digests = [each.digest for each in found]
    return found[0] if len(digests) == 1 else found[0].model_copy(update={"digest": digest_of(digests)})


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}
