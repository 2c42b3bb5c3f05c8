# SPDX-License-Identifier: Apache-2.0
"""The comparison file, and the runs that follow from it: every method with every seed under the same conditions."""

import copy
import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import yaml
from pydantic import BaseModel, ConfigDict, Field, PositiveFloat, PositiveInt, ValidationError
from torch import Tensor, nn

import medpfl
from medpfl.bundle import DEMOS
from medpfl.component import build, check_args, find_class, spec_of
from medpfl.core.errors import ConfigError
from medpfl.core.mixers import Identity, Mean, Mixer
from medpfl.job import Job
from medpfl.methods.base import Build, Method
from medpfl.methods.references import REFERENCES, FedAvg, Local
from medpfl.rounds.messages import digest_of
from medpfl.rounds.settings import Settings
from medpfl.sites.samples import SiteData
from medpfl.sites.site_file import load_site_file
from medpfl.store import fingerprint
from medpfl.tasks.base import Task

LOCAL, FEDAVG, FINE_TUNED = "Local", "FedAvg", "FedAvg + fine-tuning"
_SHARED = ("epochs", "steps", "batch_size")

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9 .+_()-]{0,39}$")]
Seed = Annotated[int, Field(ge=0, lt=2**31)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Component(_Strict):
    """A class by its full name, with its arguments."""

    path: str
    args: dict[str, Any] = {}


class MethodEntry(Component):
    """A method; ``slots`` names server components for slots that shall not have the method's own (else the mean)."""

    slots: dict[str, Component] = {}


class Comparison(_Strict):
    """What a comparison file says.

    Attributes:
        rounds, finetune: as a job's controller takes them.
        seeds: one run a method and seed; a seed changes the initial weights and the order of the batches.
        steps, epochs: local training a round, of every method; ``steps`` or ``epochs``, not both.
        lr, batch_size, optimizer: of every method; a method may have another lr or optimizer in its ``args``.
        target: the validation score whose round and bytes are reported; default: what Local reaches at its best.
        demo: the demo data to use where no site files are given.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,59}$")]
    task: Component
    rounds: PositiveInt
    seeds: Annotated[list[Seed], Field(min_length=1)]
    methods: dict[Name, MethodEntry]
    steps: PositiveInt | None = None
    epochs: PositiveInt | None = None
    lr: PositiveFloat = 1e-3
    batch_size: PositiveInt = 8
    optimizer: Literal["adam", "sgd"] = "adam"
    finetune: Annotated[int, Field(ge=1)] = 5
    target: float | None = None
    demo: str | None = None


@dataclass(frozen=True)
class Entry:
    """A method of the comparison, built: what its runs share."""

    name: str
    method: Method
    mixers: dict[str, Mixer]

    def spec(self) -> dict[str, Any]:
        slots = {slot: spec_of(mixer) for slot, mixer in self.mixers.items()}
        return {"method": spec_of(self.method), "slots": slots}


@dataclass(frozen=True)
class Run:
    """One method with one seed. ``digest`` is over everything that its result depends on."""

    name: str
    seed: int
    digest: str
    order: dict[str, Any]
    """What the worker process is told, as JSON values."""


@dataclass(frozen=True)
class Plan:
    """All runs of a comparison."""

    file: Comparison
    site_files: dict[str, Path]
    entries: list[Entry]
    runs: list[Run]
    sizes: dict[str, dict[str, int]]
    splits: dict[str, str]
    labels: dict[str, dict[str, int]]
    """Hospital to class to its number of samples in all splits; empty where a sample has no single class."""


def load_comparison(path: Path) -> Comparison:
    """Read a comparison file (YAML, or JSON, which is YAML too).

    Raises:
        ConfigError: one sentence with the file, the key, expected and got.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected a mapping with 'name', 'task', 'rounds', 'seeds' and 'methods'")
    try:
        found = Comparison.model_validate(content, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            raise ConfigError(f"{path}: unknown key '{place}'") from error
        if problem["type"] == "missing":
            raise ConfigError(f"{path}: '{place}' is missing") from error
        text = problem["msg"][0].lower() + problem["msg"][1:]
        raise ConfigError(f"{path}: '{place}': {text}, got {problem['input']!r}") from error
    _check(found, path)
    return found


class _UniqueKeys(yaml.SafeLoader):
    """YAML would silently take the last of two equal keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key '{key}' is there twice", node.start_mark)
        return super().construct_mapping(node, deep)


def _check(file: Comparison, path: Path) -> None:
    if len(set(file.seeds)) < len(file.seeds):
        raise ConfigError(f"{path}: 'seeds' names a seed twice: {file.seeds}")
    if file.steps is not None and file.epochs is not None:
        raise ConfigError(f"{path}: give 'steps' or 'epochs', not both: it is the local training of every method")
    if file.demo is not None and file.demo not in DEMOS:
        raise ConfigError(f"{path}: 'demo' must be one of {', '.join(DEMOS)}; got '{file.demo}'")
    if file.target is not None and not np.isfinite(file.target):
        raise ConfigError(f"{path}: 'target' must be a finite score, got {file.target}")
    for name, entry in file.methods.items():
        if name in (LOCAL, FEDAVG, FINE_TUNED):
            raise ConfigError(f"{path}: '{name}' is in every comparison already; give your method another name")
        for key in _SHARED:
            if key in entry.args:
                raise ConfigError(
                    f"{path}: methods.{name}.args may not set '{key}': it is the same for every method of a comparison"
                )


def build_entries(file: Comparison, data: SiteData, task: Task, roster: tuple[str, ...]) -> list[Entry]:
    """The references and the file's methods, each with a server component a slot.

    Raises:
        ConfigError: a class, argument or slot is wrong; with the method's name.
    """
    entries = []
    for name, entry in file.methods.items():
        where = f"methods.{name}"
        kind = find_class(entry.path, where)
        if kind in REFERENCES.values():
            raise ConfigError(f"{where}: {kind.__name__} is in every comparison already")
        args = {"batch_size": file.batch_size, "lr": file.lr, "optimizer": file.optimizer, **entry.args}
        args.update({key: value for key in ("steps", "epochs") if (value := getattr(file, key)) is not None})
        method: Method = build({"path": entry.path, "args": args}, Method, where)
        slots = _slots_of(method, Build(task, data, roster, file.seeds[0]), where)
        for slot in entry.slots:
            if slot not in slots:
                raise ConfigError(f"{where}: there is no slot '{slot}'; its slots are: {', '.join(slots) or 'none'}")
        mixers = {
            slot: build(given.model_dump(), Mixer, f"{where}.slots.{slot}")
            if (given := entry.slots.get(slot))
            else copy.deepcopy(method.components().get(slot, Mean()))
            for slot in slots
        }
        if not mixers:
            raise ConfigError(f"{where}: {kind.__name__} has no slot, so there is nothing to federate")
        for mixer in mixers.values():
            mixer.check(roster)
        entries.append(Entry(name, method, mixers))
    common = {"lr": file.lr, "batch_size": file.batch_size, "optimizer": file.optimizer, "steps": file.steps}
    common["epochs"] = file.epochs or 1
    references = [
        Entry(LOCAL, Local(**check_args(Local, common, LOCAL)), {"local": Identity()}),
        Entry(FEDAVG, FedAvg(**check_args(FedAvg, common, FEDAVG)), {"fedavg": Mean()}),
    ]
    entries = [*references, *entries]
    check_equal_work(entries)
    return entries


def _slots_of(method: Method, made: Build, where: str) -> list[str]:
    try:
        return list(method.slots(nn.ModuleDict(method.models(made))))
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def check_equal_work(entries: list[Entry]) -> None:
    """Refuse methods that would see another number of batches, or other batches, a round.

    Raises:
        ConfigError: naming the method, what differs, and the two values.
    """
    first = entries[0].method
    for entry in entries[1:]:
        for key in _SHARED:
            mine, theirs = getattr(entry.method, key), getattr(first, key)
            if mine != theirs:
                raise ConfigError(
                    f"unfair: {entry.name} trains with {key} {mine}, {entries[0].name} with {theirs}; a comparison "
                    "gives every method the same local work"
                )


def initial_weights(entry: Entry, made: Build) -> dict[str, Any]:
    """Digest of the task's network, and which of the method's networks start from it.

    Raises:
        ConfigError: networks of the same shapes are there and all start from other weights than every other method's.
    """
    reference = made.network().state_dict()
    digest, shapes = fingerprint(reference), _shapes(reference)
    same, own = [], []
    differing = None
    for name, network in entry.method.models(made).items():
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
    return {"digest": digest, "same": same, "own": own}


def _shapes(state: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in state.items()}


def make_plan(file: Comparison, site_files: dict[str, Path]) -> Plan:
    """Read the hospitals' data once, build every method, and list the runs.

    Raises:
        MedPFLError: the file, a site file or the data are wrong, or the comparison would not be fair.
    """
    if len(site_files) < 2:
        raise ConfigError(f"a comparison needs at least 2 hospitals, got {len(site_files)}: {', '.join(site_files)}")
    task: Task = build(file.task.model_dump(), Task, "task")
    roster = tuple(sorted(site_files))
    sizes, splits, labels = {}, {}, {}
    first: SiteData | None = None
    for site in roster:
        data = task.load(load_site_file(site_files[site], site))
        sizes[site] = {split: len(samples) for split, samples in data.splits.items()}
        for split in ("train", "validation", "test"):
            if not sizes[site][split]:
                raise ConfigError(
                    f"{site} has no {split} samples; a comparison chooses rounds on validation, reads test"
                )
        splits[site] = split_digest(data)
        targets = [samples.targets[:] for samples in data.splits.values()]
        if all(values.ndim == 1 for values in targets):
            counts = torch.bincount(torch.cat(targets).long(), minlength=len(data.class_names))
            labels[site] = dict(zip(data.class_names, counts.tolist(), strict=True))
        first = first or data
    assert first is not None
    entries = build_entries(file, first, task, roster)
    for entry in entries:
        for seed in file.seeds:
            initial_weights(entry, Build(task, first, roster, seed))
    runs = [_run(file, entry, task, seed, splits) for seed in file.seeds for entry in entries]
    return Plan(file, dict(site_files), entries, runs, sizes, splits, labels)


def split_digest(data: SiteData) -> str:
    """Over every sample's split, case, label and (up to a million values a split) inputs."""
    parts: list[Any] = []
    for split, samples in sorted(data.splits.items()):
        rows = 1_000_000 // max(1, samples.inputs[:1].numel())
        tensors = {"inputs": samples.inputs[:rows], "targets": samples.targets[:rows]}
        parts.append([split, samples.names, samples.case.tolist(), fingerprint(tensors)])
    return digest_of([*parts, data.class_names])


def job_of(entry: Entry, task: Task, rounds: int, seed: int, finetune: int, sites: int) -> Job:
    """The job of one run: every hospital must answer."""
    settings = Settings(
        rounds=rounds, slots=list(entry.mixers), seed=seed, finetune=finetune if entry.name == FEDAVG else 0
    )
    return Job("compared", sites, settings, entry.mixers, entry.method, task)


def _run(file: Comparison, entry: Entry, task: Task, seed: int, splits: dict[str, str]) -> Run:
    order = {
        "name": entry.name,
        "seed": seed,
        "rounds": file.rounds,
        "finetune": file.finetune,
        "task": spec_of(task),
        **entry.spec(),
        "splits": splits,
    }
    versions = {"medpfl": medpfl.__version__, "torch": str(torch.__version__)}
    # The name is left out: calling a method otherwise does not change what it computes.
    content = {key: value for key, value in order.items() if key != "name"}
    if entry.name != FEDAVG:
        del content["finetune"]
    digest = digest_of([content, versions, _sources(entry, task)])
    return Run(entry.name, seed, digest, order)


def _sources(entry: Entry, task: Task) -> dict[str, str]:
    """Digest of the file that defines each component: a changed method is another method."""
    found = {}
    for kind in {type(entry.method), type(task), *(type(mixer) for mixer in entry.mixers.values())}:
        module = sys.modules[kind.__module__]
        found[kind.__module__] = digest_of(inspect.getsource(module))
    return found


def rebuild(order: dict[str, Any]) -> tuple[Entry, Task]:
    """A run's components from what the worker is told."""
    method = build(order["method"], Method, "method")
    mixers = {slot: build(spec, Mixer, f"slot '{slot}'") for slot, spec in order["slots"].items()}
    return Entry(order["name"], method, mixers), build(order["task"], Task, "task")
