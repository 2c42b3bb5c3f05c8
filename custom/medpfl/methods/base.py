# SPDX-License-Identifier: Apache-2.0
"""What a method is, and what of a hospital it sees while it trains."""

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

import torch
from torch import Tensor, nn

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError, Stopped
from medpfl.core.groups import under
from medpfl.core.mixers import Mixer
from medpfl.core.seeding import derive_seed, seed_torch
from medpfl.data.samples import Samples, SiteData, take
from medpfl.tasks.base import Task

Kept = TypeVar("Kept")


@dataclass(frozen=True)
class Batch:
    """``inputs``: B x ...; ``targets``: B x ...; both on the training device."""

    inputs: Tensor
    targets: Tensor


@dataclass(frozen=True)
class Build:
    """What a method builds its networks from. All but ``site``, the hospital's own name, is equal at every hospital,
    so that all start from the same weights. ``public``: name to inputs, of the method's public datasets; empty where
    no hospital is at work (a deployed model is read)."""

    task: Task
    data: SiteData
    roster: tuple[str, ...]
    seed: int
    site: str = ""
    public: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input: (C, H, W) for slices, (F,) for rows."""
        return tuple(self.data.splits["train"].inputs.shape[1:])

    def network(self) -> nn.Module:
        """The task's network, each time with the same initial weights."""
        return self.seeded(lambda: self.task.network(self.data))

    def seeded(self, make: Callable[[], nn.Module]) -> nn.Module:
        """A network of the method's own, with initial weights that depend on the job's seed only."""
        seed_torch(self.seed, "initial weights")
        return make()


@dataclass(frozen=True, kw_only=True)
class Method(Checked):
    """A personalised federated learning method, as a frozen dataclass whose fields are the job's arguments.

    A subclass says which networks a hospital holds (``models``), which of their tensors form which slot (``slots``;
    by default every network is a slot of the same name), how one local round trains them, and which models it deploys.

    Args:
        epochs: passes over the local training data a round, >= 1.
        steps: batches a round instead of whole epochs (the same number at every hospital); None: ``epochs``.
        lr: learning rate, > 0.
        batch_size: samples a step, >= 1. A last batch of a single sample is dropped when the epoch has others:
            BatchNorm cannot train on it.
        optimizer: "adam" (betas 0.9, 0.999) or "sgd" (no momentum). Its state stays at the hospital across rounds.
    """

    epochs: int = 1
    steps: int | None = None
    lr: float = 1e-3
    batch_size: int = 8
    optimizer: Literal["adam", "sgd"] = "adam"

    deploys: ClassVar[Mapping[str, str]]
    """Deployed model's name to the network that predicts; the first is the one a hospital would use."""

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("steps", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{type(self).__name__}'s {name} must be at least {least}, got {value}")
        if not self.lr > 0:
            raise ConfigError(f"{type(self).__name__}'s lr must be above 0, got {self.lr}")

    def at(self, site: str) -> "Method":
        """The method as this hospital follows it; the same everywhere, unless the job says otherwise."""
        return self

    @abstractmethod
    def models(self, build: Build) -> dict[str, nn.Module]:
        """The networks a hospital holds; ``build.network()`` makes the task's."""

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        """Slot name to keys of ``models.state_dict()``; what is in no slot is private."""
        return {name: under(models, name) for name in models}

    def components(self) -> dict[str, Mixer]:
        """Slot to the server component a comparison takes where its file names none; a slot left out gets the mean."""
        return {}

    def checkpoints(self) -> list[str]:
        """Names of the checkpoints it uses, which every hospital's site file must declare; none by default."""
        return []

    def public_datasets(self) -> list[str]:
        """Names of the datasets that every hospital's site file must declare, with the same data; none by default."""
        return []

    @abstractmethod
    def local_round(self, site: "Site") -> None:
        """Train ``site.models`` for one round."""

    def statistics(self, name: str, site: "Site") -> dict[str, Tensor]:
        """What this hospital tells of its data when a server component wants the statistics ``name``: float64 tensors,
        of the same shapes everywhere. They leave the hospital: say so in the method's documentation.

        Raises:
            ConfigError: the method has no such statistics.
        """
        raise ConfigError(f"the server wants the statistics '{name}', which {type(self).__name__} does not have")

    refined: ClassVar[Sequence[str]] = ()
    """Slots that are exchanged again within a round, ``refinements`` times after its training."""

    shown: ClassVar[Sequence[str]] = ()
    """Slots of which every hospital is sent all hospitals' mixed models with the first of these exchanges. A hospital
    then holds the others' models: say so in the method's documentation."""

    def refinements(self, round_number: int, rounds: int) -> int:
        """How many further exchanges of the ``refined`` slots follow the training of this round of ``rounds``."""
        return 0

    def refine(self, site: "Site", step: int) -> None:
        """This hospital's part in such an exchange, ``step`` counted from 1: change the refined slots' networks, or put
        into ``site.outbox`` what is to be sent instead of them. Optimisers kept across rounds must not be touched."""

    def after_mixing(self, site: "Site") -> None:
        """Make of what the server sent the networks that predict; before they are evaluated. Nothing by default."""

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        """Outputs of the deployed model ``name``; the models are in evaluation mode."""
        outputs: Tensor = models[self.deploys[name]](inputs)
        return outputs

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """Further numbers about the models on a non-empty validation split, by name; none by default."""
        return {}

    def new_optimizer(self, model: nn.Module, name: str) -> torch.optim.Optimizer:
        """The optimiser of the network called ``name``.

        Fused: one pass over each tensor instead of ten, a sixth of the time on networks of many small ones.
        """
        if self.optimizer == "sgd":
            return torch.optim.SGD(model.parameters(), lr=self.lr, fused=True)
        return torch.optim.Adam(model.parameters(), lr=self.lr, fused=True)


class Site:
    """A hospital during one local round, as a method sees it."""

    def __init__(
        self,
        method: Method,
        task: Task,
        data: SiteData,
        models: nn.ModuleDict,
        optimizers: dict[str, torch.optim.Optimizer],
        device: torch.device,
        roster: tuple[str, ...],
        name: str,
        seed: int,
        round_number: int,
        stopped: Callable[[], bool],
        checkpoints: Mapping[str, Mapping[str, Tensor]] | None = None,
        kept: dict[str, Any] | None = None,
        public: Mapping[str, Tensor] | None = None,
    ):
        self.method, self.task, self.data, self.models, self.device = method, task, data, models, device
        self.roster, self.name, self.index = roster, name, roster.index(name)
        self.round = round_number
        self._seed, self._optimizers, self._stopped = seed, optimizers, stopped
        self.checkpoints = checkpoints or {}
        """Name to tensors, of the checkpoints that the method uses; the same at every hospital."""
        self.public = public or {}
        """Name to inputs, N x ..., of the method's public datasets; the same at every hospital, not on the device."""
        self._kept = {} if kept is None else kept
        self._prefix = ""
        self._half = device.type == "cuda" and torch.cuda.is_bf16_supported()
        self._loss: Tensor | float = float("nan")
        self.outbox: dict[str, dict[str, Tensor]] = {}
        """Slot to what is sent instead of its weights (gradients, say), with the same entries and shapes."""
        self.shown: dict[str, list[dict[str, Tensor]]] = {}
        """Slot that the method wants to be ``shown`` to all hospitals' models in the roster's order; in ``refine``."""

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
        for epoch in range(steps or epochs or 0):
            order = torch.randperm(len(samples), generator=generator)
            for start in range(0, len(samples), size):
                chosen = order[start : start + size]
                if len(chosen) == 1 and start > 0:
                    continue
                if self._stopped():
                    raise Stopped(f"the job was aborted in round {self.round}, epoch {epoch + 1}")
                inputs, targets = take(samples.inputs, chosen), take(samples.targets, chosen)
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
        """The inputs of the training split once, ``size`` at a time, in their own order.

        Raises:
            Stopped: the job was aborted.
        """
        samples = self.data.splits["train"]
        for start in range(0, len(samples), size):
            if self._stopped():
                raise Stopped(f"the job was aborted before round {self.round}")
            yield samples.inputs[start : start + size].to(self.device)

    def keep(self, name: str, make: Callable[[], Kept]) -> Kept:
        """What ``make`` returned the first time in this process: for what is computed of the data once."""
        if name not in self._kept:
            self._kept[name] = make()
        kept: Kept = self._kept[name]
        return kept

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

    def view(self, method: Method, prefix: str) -> "Site":
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
