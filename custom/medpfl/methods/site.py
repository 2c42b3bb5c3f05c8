# SPDX-License-Identifier: Apache-2.0
"""What of a hospital a method sees while it trains."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor, nn

from medpfl.core.errors import Stopped
from medpfl.core.seeding import derive_seed
from medpfl.data.rows import take
from medpfl.data.samples import SiteData
from medpfl.tasks.base import Task

Kept = TypeVar("Kept")


class Trainer(Protocol):
    """What of a method (``methods.base.Method``) decides which batches it is given, and how it steps."""

    @property
    def epochs(self) -> int: ...

    @property
    def steps(self) -> int | None: ...

    @property
    def batch_size(self) -> int: ...

    def new_optimizer(self, model: nn.Module, name: str) -> torch.optim.Optimizer:
        """The optimiser of the network called ``name``."""


@dataclass(frozen=True)
class Batch:
    """``inputs``: B x ...; ``targets``: B x ...; both on the training device."""

    inputs: Tensor
    targets: Tensor


def _never() -> bool:
    return False


@dataclass(frozen=True, kw_only=True)
class Hospital:
    """What a hospital holds in a run, whatever the round and the method.

    Attributes:
        models: all networks, on the ``device``.
        optimizers: by network; a missing one is made when it is first needed.
        roster: the hospitals' names; ``name`` is this one's.
        seed: the job's.
        stopped: whether the job was aborted.
        checkpoints: name to tensors, of the checkpoints that the method uses; the same at every hospital.
        public: name to inputs, N x ..., of the method's public datasets; the same at every hospital, not on the device.
        kept: what methods ``keep`` of the data in this process.
    """

    task: Task
    data: SiteData
    models: nn.ModuleDict
    device: torch.device
    roster: tuple[str, ...]
    name: str
    seed: int
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    stopped: Callable[[], bool] = _never
    checkpoints: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    public: Mapping[str, Tensor] = field(default_factory=dict)
    kept: dict[str, object] = field(default_factory=dict)


class Site:
    """A hospital during one local round, as a method sees it."""

    def __init__(self, hospital: Hospital, method: Trainer, round_number: int):
        self.method, self.round = method, round_number
        self.task, self.data, self.models, self.device = hospital.task, hospital.data, hospital.models, hospital.device
        self.roster, self.name, self.index = hospital.roster, hospital.name, hospital.roster.index(hospital.name)
        self.checkpoints, self.public = hospital.checkpoints, hospital.public
        self._seed, self._optimizers, self._stopped = hospital.seed, hospital.optimizers, hospital.stopped
        self._kept = hospital.kept
        self._prefix = ""
        self._half = self.device.type == "cuda" and torch.cuda.is_bf16_supported()
        self._loss: Tensor | float = float("nan")
        self.outbox: dict[str, dict[str, Tensor]] = {}
        """Slot to what is sent instead of its weights (gradients, say), with the same entries and shapes."""
        self.shown: dict[str, list[dict[str, Tensor]]] = {}
        """Slot that the method wants to be ``shown`` to all hospitals' models in the roster's order; in ``refine``."""
        self.drawn: list[int] = []
        """Different training samples that each phase of training has seen; the hospital's policy asks for a least."""

    def training_batches(
        self, epochs: int | None = None, steps: int | None = None, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """This round's batches: a function of (seed, site, round) alone, so every model of a round sees the same.

        Args:
            epochs, steps: how many, if not as many as the method's ``epochs`` and ``steps`` say (a phase of its own).
            purpose: another name gives another order (for another exchange of the round).

        Raises:
            Stopped: the job was aborted.
        """
        samples = self.data.splits["train"]
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self.name, self.round, purpose))
        size, done = self.method.batch_size, 0
        if epochs is None and steps is None:
            epochs, steps = self.method.epochs, self.method.steps
        phase = len(self.drawn)
        self.drawn.append(0)
        seen = torch.zeros(len(samples), dtype=torch.bool)
        for epoch in range(steps or epochs or 0):
            order = self.task.order(samples, generator)
            for start in range(0, len(order), size):
                chosen = order[start : start + size]
                if len(chosen) == 1 and start > 0:
                    continue
                if self._stopped():
                    raise Stopped(f"the job was aborted in round {self.round}, epoch {epoch + 1}")
                step = torch.Generator().manual_seed(derive_seed(self._seed, self.name, self.round, purpose, done))
                inputs, targets = self.task.present(samples, chosen, step)
                seen[chosen] = True
                self.drawn[phase] = int(seen.sum())
                yield Batch(inputs.to(self.device), targets.to(self.device))
                done += 1
                if done == steps:
                    return

    def public_batches(self, name: str, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This round's batches of a public dataset: row numbers and inputs, in one order at every hospital. A last
        batch of one sample is dropped when the epoch has others.

        Raises:
            Stopped: the job was aborted.
        """
        inputs = self.public[name]
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self.round, "public", name))
        size = self.method.batch_size
        for _ in range(epochs):
            order = torch.randperm(len(inputs), generator=generator)
            for start in range(0, len(inputs), size):
                rows = order[start : start + size]
                if len(rows) > 1 or start == 0:
                    self.go_on()
                    yield rows, take(inputs, rows).to(self.device)

    def go_on(self) -> None:
        """Raises Stopped if the job was aborted."""
        if self._stopped():
            raise Stopped(f"the job was aborted in round {self.round}")

    def training_inputs(self, size: int = 64) -> Iterator[Tensor]:
        """The inputs of the training split once, ``size`` at a time (of large patches fewer), in their own order; of
        whole cases that differ in shape their centres.

        Raises:
            Stopped: the job was aborted.
        """
        samples = self.data.splits["train"]
        size = samples.together(size)
        for start in range(0, len(samples), size):
            if self._stopped():
                raise Stopped(f"the job was aborted before round {self.round}")
            yield samples.inputs[start : start + size].to(self.device)

    def keep(self, name: str, make: Callable[[], Kept]) -> Kept:
        """What ``make`` returned the first time in this process: for what is computed of the data once."""
        if name not in self._kept:
            self._kept[name] = make()
        return cast(Kept, self._kept[name])

    def chosen(self, purpose: str, most: int) -> Tensor:
        """Indices, ascending, of at most ``most`` training samples; the same whenever the seed is."""
        count = len(self.data.splits["train"])
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self.name, purpose))
        return torch.randperm(count, generator=generator)[:most].sort().values

    def common_draw(self, purpose: str) -> float:
        """A number in [0, 1) that is the same at every hospital: a function of the seed, the round and ``purpose``."""
        return derive_seed(self._seed, self.round, purpose) / 2**63

    def autocast(self) -> AbstractContextManager[None]:
        """Mixed precision (bfloat16) where the device has it; nothing on a CPU, where results stay exact."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self._half else nullcontext()

    @property
    def last_loss(self) -> float:
        """The loss that is reported: the task's, of the last step, unless the method sets another one. NaN: no step."""
        return float(self._loss)

    @last_loss.setter
    def last_loss(self, loss: Tensor | float) -> None:
        # Not yet a number: that would make the processor wait for the GPU at every step.
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss

    def step(self, model: str, loss: Tensor, *others: str, term: Callable[[], None] | None = None) -> None:
        """One optimiser step of ``models[model]``, and of ``others`` if named, down a scalar loss.

        Args:
            term: adds the gradient of a further term (``Proximal``), whose value is not reported.
        """
        optimizers = [self._optimizer(name) for name in (model, *others)]
        for optimizer in optimizers:
            for group in optimizer.param_groups:  # zero_grad does the same and takes forty times as long
                for parameter in group["params"]:
                    parameter.grad = None
        torch.autograd.backward(loss)
        if term:
            term()
        for optimizer in optimizers:
            optimizer.step()
        self.last_loss = loss

    def descend(self, model: str, gradient: Mapping[str, Tensor], loss: float) -> None:
        """One optimiser step of ``models[model]`` with a given gradient, by parameter; ``loss`` is only reported."""
        for key, parameter in self.models[model].named_parameters():
            parameter.grad = gradient[key].clone()
        self._optimizer(model).step()
        self.last_loss = loss

    def _optimizer(self, model: str) -> torch.optim.Optimizer:
        name = f"{self._prefix}{model}"
        if name not in self._optimizers:
            self._optimizers[name] = self.method.new_optimizer(self.models[model], model)
        return self._optimizers[name]

    def view(self, method: Trainer, prefix: str) -> "Site":
        """This hospital as ``method`` sees it, whose networks are those of ours with ``prefix`` before their names."""
        models = {name.removeprefix(prefix): model for name, model in self.models.items() if name.startswith(prefix)}
        view = copy.copy(self)
        view.method, view.models, view._prefix = method, nn.ModuleDict(models), prefix
        view.outbox, view._loss = {}, float("nan")
        return view

    def fit(self, model: str, term: Callable[[], None] | None = None) -> None:
        """Training of ``models[model]`` over this round's batches on the task loss, plus a ``term`` as in ``step``."""
        self.models[model].train()
        for batch in self.training_batches():
            with self.autocast():
                loss = self.task.loss(self.models[model](batch.inputs), batch.targets)
            self.step(model, loss, term=term)
