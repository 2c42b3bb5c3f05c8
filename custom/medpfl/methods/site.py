# SPDX-License-Identifier: Apache-2.0
"""What of a hospital a method sees while it trains."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from medpfl.core.devices import moved
from medpfl.core.errors import ConfigError, Stopped
from medpfl.core.layout import laid_out_like
from medpfl.core.seeding import derive_seed
from medpfl.data.resident import OnDevice, Resident
from medpfl.data.rows import take
from medpfl.methods.batches import Batch, Place, Span, planned_batches, shuffled, starts_of
from medpfl.methods.effective_samples import EffectiveSamples
from medpfl.methods.hospital import Hospital
from medpfl.methods.precision import cast as cast_to
from medpfl.methods.precision import half_of, left_out, parameters, step_scaled, unscale
from medpfl.methods.proximal import Proximal
from medpfl.methods.training import Training

Kept = TypeVar("Kept")


class Site:
    """A hospital during one local round, as a method sees it.

    Args:
        span: the rounds over which the learning rate's schedule runs; None: this round alone.

    Raises:
        ConfigError: the method asks for bfloat16, and this GPU has none.
    """

    def __init__(self, hospital: Hospital, method: Training, round_number: int, span: Span | None = None):
        self.method, self.round = method, round_number
        self._span = span or Span(round_number, 1)
        self.task, self.data, self.models, self.device = hospital.task, hospital.data, hospital.models, hospital.device
        self.roster, self.name, self.index = hospital.roster, hospital.name, hospital.roster.index(hospital.name)
        self.checkpoints, self.public = hospital.checkpoints, hospital.public
        self.least_count = hospital.least_count
        self._seed, self._optimizers, self._stopped = hospital.seed, hospital.optimizers, hospital.stopped
        self._kept, self._presented, self._noise = hospital.kept, hospital.presented, hospital.noise
        self._resident = hospital.resident or Resident(hospital.device)
        self._prefix, self._apart = "", ""
        self._half, self._scalers = half_of(method, self.device), hospital.scalers
        self._loss: Tensor | float = float("nan")
        self._place = Place(0, 1)
        self.outbox: dict[str, dict[str, Tensor]] = {}
        """Slot to what is sent instead of its weights (gradients, say), with the same entries and shapes. A method that
        sends what a hospital holds itself names the slot in ``anew``, too."""
        self.shown: dict[str, list[dict[str, Tensor]]] = {}
        """Slot that the method wants to be ``shown`` to all hospitals' models in the roster's order; in ``refine``."""
        self._seen: list[list[Tensor]] = []
        self.behind: dict[tuple[str, int], EffectiveSamples] = {}
        """Network to whose samples are behind its change, likewise. Under 0 are those of its steps' batches; of a given
        gradient there are more, of the batches that it was taken ``through``."""

    def training_batches(
        self, epochs: int | None = None, steps: int | None = None, purpose: str = "batches"
    ) -> Iterator[Batch]:
        """This round's batches: a function of (seed, site, round) alone, so every model of a round sees the same. With
        record-level privacy they are a secret of the hospital, another one for every pass: see ``privacy.lots``.

        Args:
            epochs, steps: how many, if not as many as the method's ``epochs`` and ``steps`` say (a phase of its own).
            purpose: another name gives another order (for another exchange of the round).

        Raises:
            Stopped: the job was aborted.
        """
        samples = self.data.splits["train"]
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self.name, self.round, purpose))
        size = self.method.batch_size
        if epochs is None and steps is None:
            epochs, steps = self.method.epochs, self.method.steps
        seen: list[Tensor] = []
        self._seen.append(seen)
        if self._noise is not None:
            cases = len(samples.names)
            lots = steps or (epochs or 0) * math.ceil(cases / size)
            rows = [torch.from_numpy(np.flatnonzero(samples.case == case)) for case in range(cases)]
            for lot, case in self._noise.lots(cases, size, lots):
                self.go_on()
                step = lot.index * cases + case
                mine = shuffled(rows[case], self._seed, self.name, self.round, purpose, step, "order")
                inputs, targets = self._present(mine, purpose, step)
                taken = mine[: 0 if lot.blank else None]
                seen.append(taken)
                weights = torch.full((len(taken),), 1 / (size * max(1, len(taken))))  # the loss is their mean
                self._place = Place(lot.index, lots, lot, taken, weights)
                yield Batch(moved(inputs, self.device), moved(targets, self.device), self._place)
            return
        planned = planned_batches(lambda: self.task.order(samples, generator), size, epochs, steps)

        def shown(one: tuple[int, int, Tensor]) -> tuple[int, int, Tensor, OnDevice]:
            return *one, self._on_device(one[2], purpose, one[0])

        batches = self._presented.in_turn(shown, planned) if self.task.augments else map(shown, planned)
        for done, of, chosen, (inputs, targets, counts) in batches:
            self.go_on()
            seen.append(chosen)
            self._place = Place(done, of, None, chosen, None if counts is None else counts / len(chosen))
            yield Batch(inputs, targets, self._place)

    @property
    def in_lots(self) -> bool:
        """Whether which samples training has seen is a secret of the hospital."""
        return self._noise is not None

    @property
    def drawn(self) -> list[int]:
        """Different training samples that each phase of training has seen; the hospital's policy asks for a least."""
        return [len(np.unique(torch.cat(rows).numpy())) if rows else 0 for rows in self._seen]

    def _on_device(self, chosen: Tensor, purpose: str, step: int) -> OnDevice:
        """The same on the training device, where what lies there already is not copied again."""
        samples, task = self.data.splits["train"], self.task
        rows = task.shows_as_they_are and isinstance(samples.inputs, Tensor)  # of whole cases a step shows patches
        if rows and not self._resident.keeps:  # the rest takes a tenth of a small network's step
            targets = take(samples.targets, chosen)
            inputs = moved(take(samples.inputs, chosen), self.device)
            return inputs, moved(targets, self.device), task.importance(targets)
        held = self._resident.whole(samples) if task.shows_as_they_are else None
        if held is not None:
            numbers = moved(chosen, self.device)
            inputs, targets = (part.index_select(0, numbers) for part in held)
            return inputs, targets, task.importance(take(samples.targets, chosen))

        def make() -> OnDevice:
            inputs, targets = self._present(chosen, purpose, step)
            return moved(inputs, self.device), moved(targets, self.device), task.importance(targets)

        return self._resident.batch(self.round, (purpose, step, chosen.numpy().tobytes()), make)

    def _present(self, chosen: Tensor, purpose: str, step: int) -> tuple[Tensor, Tensor]:
        """What the networks see in a step of these training samples, on the CPU."""

        def make() -> tuple[Tensor, Tensor]:
            seed = derive_seed(self._seed, self.name, self.round, purpose, step)
            return self.task.present(self.data.splits["train"], chosen, torch.Generator().manual_seed(seed))

        if not self.task.augments:
            return make()
        return self._presented.batch(self.round, (purpose, step, chosen.numpy().tobytes()), make)

    def public_batches(self, name: str, epochs: int) -> Iterator[tuple[Tensor, Tensor]]:
        """This round's batches of a public dataset: row numbers and inputs, in one order at every hospital. A last
        batch of one sample is dropped when the epoch has others.

        Raises:
            Stopped: the job was aborted.
        """
        inputs = self.public[name]
        generator = torch.Generator().manual_seed(derive_seed(self._seed, self.round, "public", name))
        size = self.method.batch_size
        starts = starts_of(len(inputs), size)
        for epoch in range(epochs):
            order = torch.randperm(len(inputs), generator=generator)
            for number, start in enumerate(starts, epoch * len(starts)):
                rows = order[start : start + size]
                self.go_on()
                self._place = Place(number, epochs * len(starts), public=True)
                yield rows, moved(take(inputs, rows), self.device)
        self._place = Place(0, 1)  # a step after them is of none of these

    def turn_to(self, batch: Batch) -> None:
        """The next steps are of this batch; for a method that has read others ahead."""
        self._place = batch.place

    def go_on(self) -> None:
        """Raises Stopped if the job was aborted."""
        if self._stopped():
            raise Stopped(f"the job was aborted in round {self.round}")

    def training_inputs(self, size: int = 64, device: torch.device | None = None) -> Iterator[Tensor]:
        """The inputs of the training split once, ``size`` at a time (of large patches fewer), in their own order; of
        whole cases that differ in shape their centres.

        Args:
            device: where they are wanted; None: where networks are trained.

        Raises:
            Stopped: the job was aborted.
        """
        samples, device = self.data.splits["train"], device or self.device
        size = samples.together(size)
        lies = self.task.shows_as_they_are and device == self.device
        held = self._resident.whole(samples) if lies else None
        for start in range(0, len(samples), size):
            if self._stopped():
                raise Stopped(f"the job was aborted before round {self.round}")
            rows = samples.inputs if held is None else held[0]
            yield moved(rows[start : start + size], device)

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
        """Mixed precision, as far as the method's ``precision`` and the device say so."""
        return cast_to(self._half, self.device)

    @property
    def last_loss(self) -> Tensor | float:
        """The loss that is reported: the task's, of the last step, unless the method sets another one. NaN: no step.

        A scalar that may lie on the GPU: to read it at every step would make the processor wait for the GPU."""
        return self._loss

    @last_loss.setter
    def last_loss(self, loss: Tensor | float) -> None:
        self._loss = loss.detach() if isinstance(loss, Tensor) else loss

    @property
    def loss_of(self) -> int | None:
        """Patients behind the loss that is reported: the last batch's; None: it was not of training samples."""
        samples, rows = self.data.splits["train"], self._place.rows
        return None if rows is None else samples.patients_behind(rows.numpy())

    def step(self, model: str, loss: Tensor, *others: str, term: Callable[[], None] | None = None) -> bool:
        """One optimiser step of ``models[model]``, and of ``others`` if named, down a scalar loss.

        Of several batches that are accumulated, the last makes the step, down the mean of their losses.

        Args:
            term: adds the gradient of a further term (``Proximal``), whose value is not reported; once a step.

        Returns:
            Whether the step was made.
        """
        lot, names = self._place.lot, (model, *others)
        optimizers = [self._optimizer(name) for name in names]
        self._take_down(names)
        if lot is not None and self._noise is not None and self._noise.covers(names):
            weights = [weight for optimizer in optimizers for weight in parameters(optimizer)]
            for weight in weights:
                weight.grad = None
            self.last_loss = loss
            made = self._noise.add(lot, names, [weight for weight in weights if weight.requires_grad], loss)
            return self._moved(names, term) if made else False
        if self._noise is not None and not self._place.public:
            self._noise.refuse(names, type(self.method).__name__)
        if lot is not None and lot.blank:
            return False
        number, batches = self._place.in_step(self.method.accumulate)
        if number == 0:
            for optimizer in optimizers:
                for parameter in parameters(optimizer):  # zero_grad does the same and takes forty times as long
                    parameter.grad = None
        mean, scaler = loss if batches == 1 else loss / batches, self._scaler(names)
        torch.autograd.backward(scaler.scale(mean) if scaler else mean)
        self.last_loss = loss
        return self._moved(names, term) if number + 1 == batches else False

    def _moved(self, models: Sequence[str], term: Callable[[], None] | None) -> bool:
        if scaler := self._scaler(models):
            unscale(scaler, [self._optimizer(name) for name in models])
        if term:
            term()
        self._move(models, term.strength if isinstance(term, Proximal) else 0.0)
        return True

    def learnt_from(self, model: str, rows: Tensor, weights: Tensor | None = None) -> None:
        """Of these training samples a gradient leaves without a step; ``weights``: of each in it, None: all alike."""
        if self._noise is not None:
            self._noise.refuse((model,), type(self.method).__name__)
        self._seen.append([rows])
        self._count(model, 0, Place(0, 1, None, rows, weights))
        self.behind[f"{self._prefix}{model}", 0].moved(1.0, 0.0)

    def _take_down(self, models: Sequence[str]) -> None:
        """The batch is part of the next step of these networks."""
        for name in models:
            self._count(name, 0, self._place)

    def _count(self, model: str, number: int, place: Place) -> None:
        if place.rows is not None:
            key = f"{self._prefix}{model}", number
            if key not in self.behind:
                self.behind[key] = EffectiveSamples(len(self.data.splits["train"]))
            self.behind[key].batch(place.rows, place.weights)

    def descend(self, model: str, gradient: Mapping[str, Tensor], loss: Tensor, through: Sequence[Batch] = ()) -> None:
        """The same with a given gradient, by parameter that is trained; ``loss`` is only reported.

        Args:
            through: further batches that decide where the gradient was taken. One patient's can show in it as much as
                those of the batch itself, so each is counted for itself.

        Raises:
            ConfigError: every step must have noise, which this one would not have.
        """
        if self._noise is not None:
            self._noise.refuse((model,), type(self.method).__name__)
        if self._half == torch.float16:
            raise ConfigError(f"{type(self.method).__name__} makes gradients of its own, which fp16 would lose")
        self._take_down((model,))
        for number, batch in enumerate(through, 1):
            self._count(model, number, batch.place)
        done, batches = self._place.in_step(self.method.accumulate)
        for key, parameter in self.models[model].named_parameters():
            if not parameter.requires_grad:  # the network holds it fixed
                continue
            found = laid_out_like(parameter, gradient[key].clone() if batches == 1 else gradient[key] / batches)
            parameter.grad = found if done == 0 or parameter.grad is None else parameter.grad + found
        self.last_loss = loss
        if done + 1 == batches:
            self._move((model,))

    @property
    def factor(self) -> float:
        """What the schedule multiplies the learning rates by in the step that is under way."""
        part = self._place.number / self._place.of
        return self.method.factor(self._span.passed(self.round, part), self._span.rounds)

    def _move(self, models: Sequence[str], pull: float = 0.0) -> None:
        """Take the step that the gradients say, in which there is a ``pull`` back to where the network started."""
        optimizers, factor, scaler = [self._optimizer(name) for name in models], self.factor, self._scaler(models)
        for name, optimizer in zip(models, optimizers, strict=True):
            rate = self.method.rate(name) * factor
            for group in optimizer.param_groups:
                group["lr"] = rate
            for (model, _), behind in self.behind.items():
                if model == f"{self._prefix}{name}":
                    behind.moved(rate, self.method.takes_back(rate, pull), left_out(scaler, optimizer))
        if self.method.clip_gradient is not None:
            every = [parameter for optimizer in optimizers for parameter in parameters(optimizer)]
            nn.utils.clip_grad_norm_(every, self.method.clip_gradient)
        if scaler:
            return step_scaled(scaler, optimizers)
        for optimizer in optimizers:
            optimizer.step()

    def _scaler(self, models: Sequence[str]) -> torch.amp.GradScaler | None:
        """What scales the loss of a step of these networks; None: they are not trained in float16."""
        if self._half != torch.float16:
            return None
        name = f"{self._prefix}{models[0]}{self._apart}"
        if name not in self._scalers:
            self._scalers[name] = torch.amp.GradScaler(self.device.type)
        return self._scalers[name]

    def _optimizer(self, model: str) -> torch.optim.Optimizer:
        name = f"{self._prefix}{model}"
        if name not in self._optimizers:
            self._optimizers[name] = self.method.new_optimizer(self.models[model], model)
        return self._optimizers[name]

    def apart(self) -> "Site":
        """This hospital with optimisers that nothing keeps, and scales of its own: for an exchange within a round."""
        other = copy.copy(self)
        other._optimizers, other._apart = {}, ".apart"
        return other

    def view(self, method: Training, prefix: str) -> "Site":
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
