# SPDX-License-Identifier: Apache-2.0
"""One run of a comparison: what its worker is told, and the digest that names it."""

from dataclasses import dataclass

import torch

import medpfl
from medpfl.compare.data import Split
from medpfl.compare.entries import Entry, build_codecs
from medpfl.compare.file import FEDAVG, POOLED, Arguments, Comparison
from medpfl.compare.orders import Handed, Order
from medpfl.component import build, class_paths, import_named, spec_of
from medpfl.core.digest import digest_of
from medpfl.core.mixers import Mixer
from medpfl.core.sources import source_digest
from medpfl.job import Job
from medpfl.job.settings import Settings
from medpfl.methods.contract import Method
from medpfl.rounds.protocol.bounded import as_json
from medpfl.tasks.contract import Task

FORMAT = 3
"""Of run.json: another format makes other runs."""


@dataclass(frozen=True)
class Run:
    """One method with one split and seed.

    Attributes:
        split: the seed of the split; None: as the site files cut.
        without: the hospital that takes no part and is tested, if any.
        searching: the run judges arguments on validation; it reads no test set.
        digest: over everything that its result depends on.
        order: what the worker process is told.
    """

    entry: Entry
    seed: int
    split: int | None
    without: str | None
    searching: bool
    digest: str
    order: Order

    @property
    def name(self) -> str:
        """The method's name in the comparison."""
        return self.entry.name

    @property
    def title(self) -> str:
        """For messages."""
        parts = [self.name, f"seed {self.seed}"]
        if self.split is not None:
            parts.insert(1, f"split {self.split}")
        if self.without:
            parts.append(f"without {self.without}")
        if self.searching:
            parts.append(f"candidate {values_text(self.entry.values)}")
        return ", ".join(parts)


def values_text(values: Arguments) -> str:
    """ "lr 0.01, model.lam 0.5" """
    return ", ".join(f"{key} {value}" for key, value in values.items())


def run_of(
    file: Comparison,
    task: Task,
    entry: Entry,
    split: Split,
    seed: int,
    held: dict[str, dict[str, str]],
    without: str | None = None,
    searching: bool = False,
) -> Run:
    """``held``: as the order has it."""
    order = Order(
        **dict(entry.spec()),
        name=entry.name,
        pooled=entry.name == POOLED,
        seed=seed,
        split=split.seed,
        without=without,
        searching=searching,
        rounds=file.rounds,
        finetune=file.finetune if entry.name == FEDAVG and not searching else 0,
        task=as_json(spec_of(task)),
        splits=split.digests,
        held=held,
    )
    # The name is left out: calling a method otherwise does not change what it computes. So is the split's seed: what
    # counts is how the data are cut.
    content = order.model_dump(mode="json", exclude={"name", "split", *Handed.model_fields})
    versions = {"medpfl": medpfl.__version__, "torch": str(torch.__version__), "format": FORMAT}
    code = code_of(order, entry.method)
    digest = digest_of([content, versions, code])
    return Run(entry, seed, split.seed, without, searching, digest, order.model_copy(update={"code": code}))


def code_of(order: Order, method: Method) -> str:
    """Digest of the code that the run's result depends on."""
    named = class_paths(order.configurations())
    roots = {"medpfl.rounds.simulate", *(path.rpartition(".")[0] for path in named)}
    if order.without or method.joint(tuple(order.splits)) is not None:
        roots.add("medpfl.compare.unseen")
    return source_digest(roots)


def rebuild(order: Order) -> tuple[Entry, Task]:
    """A run's components from what the worker is told, which is what the user's own file names."""
    import_named(order.configurations())
    method = build(order.method, Method, "method")
    mixers = {slot: build(spec, Mixer, f"slot '{slot}'") for slot, spec in order.slots.items()}
    codecs = build_codecs(order.codecs, "codecs") if order.codecs else None
    return Entry(order.name, method, mixers, codecs=codecs), build(order.task, Task, "task")


def job_of(entry: Entry, task: Task, order: Order, sites: int) -> Job:
    """The job of a run: every hospital must answer."""
    settings = Settings(rounds=order.rounds, references=(), seed=order.seed, finetune=order.finetune)
    return Job("compared", sites, settings, entry.mixers, entry.method, task, entry.codecs)
