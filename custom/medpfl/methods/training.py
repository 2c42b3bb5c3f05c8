# SPDX-License-Identifier: Apache-2.0
"""How a hospital trains in a round, whatever the method: how long, and what a step is made of."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal, Self

import torch
from torch import nn

from medpfl.core.checked import Checked
from medpfl.core.errors import ConfigError
from medpfl.methods.optimizers import OPTIMIZERS, Optimizer
from medpfl.methods.schedules import Constant, Schedule, schedule_of
from medpfl.methods.start import Start
from medpfl.privacy.contract import Privacy

_TOLD = {
    "adam": "Adam",
    "momentum": "momentum",
    "weight_decay": "weight decay",
    "schedule": "a schedule",
    "clip_gradient": "clip_gradient",
    "accumulate": "accumulate",
    "fp16": "the precision fp16",
}
_NOTHING = 1e-9
"""By so much a factor may miss its range, as a rounding error does."""


@dataclass(frozen=True, kw_only=True)
class Training(Checked):
    """Arguments of every method.

    Args:
        epochs: passes over the local training data a round, >= 1.
        steps: batches a round instead of whole epochs (the same number at every hospital); None: ``epochs``.
        lr: learning rate, > 0.
        batch_size: samples a batch, >= 1. A last batch of a single sample is dropped when the epoch has others:
            BatchNorm cannot train on it.
        optimizer: "adam" (betas 0.9, 0.999), "sgd" (no momentum), or a component of ``medpfl.methods.optimizers``. Its
            state never leaves the hospital.
        schedule: the learning rate over the job: "constant", "polynomial" ((1 - t / T)^0.9), "cosine", or a component
            of ``medpfl.methods.schedules``. It moves ``lr`` and what takes its place in a method (``rate``), and no
            other step size.
        clip_gradient: a step's gradient is shortened to this length (over all parameters that the step moves), > 0;
            None: it is taken as it is.
        accumulate: batches whose mean gradient makes one step, >= 1; the last step of a pass takes what is left.
        optimizer_state: "keep": the optimiser's state (Adam's moments, the momentum) stays at the hospital from round
            to round, whatever happened to the weights; "reset": every round's training begins without one.
        precision: "auto": bfloat16 where a GPU has it, and never on a CPU; "fp32": never; "bf16": everywhere; "fp16":
            float16 everywhere, for GPUs without bfloat16, with scaled losses; a step whose gradients are too large for
            it is left out. Weights, gradients and what is sent are float32 in any case, and so is every evaluation.
        start: the weights that the task's networks start with; None: random ones.
        privacy: differential privacy of what leaves, a component of ``medpfl.privacy``; None: there is none. The
            references that ride along have the same.
    """

    epochs: int = 1
    steps: int | None = None
    lr: float = 1e-3
    batch_size: int = 8
    optimizer: Literal["adam", "sgd"] | Optimizer = "adam"
    schedule: Literal["constant", "polynomial", "cosine"] | Schedule = "constant"
    clip_gradient: float | None = None
    accumulate: int = 1
    optimizer_state: Literal["keep", "reset"] = "keep"
    precision: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    start: Start | None = None
    privacy: Privacy | None = None

    excludes: ClassVar[Mapping[str, str]] = {}
    """What the method's own rule makes impossible, to why: "adam", "momentum", "weight_decay", "schedule",
    "clip_gradient", "accumulate", "fp16"."""

    def __post_init__(self) -> None:
        kind = type(self).__name__
        for name, least in (("epochs", 1), ("batch_size", 1), ("steps", 1), ("accumulate", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{kind}'s {name} must be at least {least}, got {value}")
        if self.lr <= 0:
            raise ConfigError(f"{kind}'s lr must be above 0, got {self.lr}")
        if self.clip_gradient is not None and self.clip_gradient <= 0:
            raise ConfigError(f"{kind}'s clip_gradient must be above 0, or null, got {self.clip_gradient}")
        if self.privacy and self.privacy.level == "record" and self.accumulate > 1:
            raise ConfigError(f"{kind} cannot accumulate with DPSGD, whose lots make a step each; raise batch_size")
        if self.privacy and self.privacy.level == "record" and self.precision == "fp16":
            raise ConfigError(f"{kind} cannot train in fp16 with DPSGD, which clips gradients as they are; take bf16")
        for trait, why in self.excludes.items():
            if trait in self._traits():
                raise ConfigError(f"{kind} cannot train with {_TOLD[trait]}: {why}")

    def _traits(self) -> set[str]:
        own = {
            "schedule": schedule_of(self.schedule) != Constant(),
            "clip_gradient": self.clip_gradient is not None,
            "accumulate": self.accumulate > 1,
            "fp16": self.precision == "fp16",
        }
        return {*self._optimizer.traits, *(name for name, used in own.items() if used)}

    @property
    def _optimizer(self) -> Optimizer:
        return OPTIMIZERS[self.optimizer] if isinstance(self.optimizer, str) else self.optimizer

    def trained_like(self, other: "Training") -> Self:
        """The same with the arguments of every method as ``other`` has them."""
        return replace(self, **{each.name: getattr(other, each.name) for each in fields(Training)})

    def batches(self, samples: int, public: int = 0) -> int:
        """Steps of a round's longest pass, of which a hospital's policy allows so many: over so many training samples,
        or samples of the public dataset, where there is one."""
        return self.steps or self.epochs * math.ceil(samples / self.batch_size)

    def rate(self, name: str) -> float:
        """Learning rate of the network called ``name``, before the schedule."""
        return self.lr

    def factor(self, passed: float, rounds: int) -> float:
        """What the schedule multiplies every learning rate by after so many of the ``rounds``.

        Raises:
            ConfigError: it is not in [0, 1]; below, steps would go uphill.
        """
        schedule = schedule_of(self.schedule)
        found = schedule.factor(passed, rounds)
        if not -_NOTHING <= found <= 1 + _NOTHING:
            raise ConfigError(
                f"'factor' of {type(schedule).__name__} must give a number from 0 to 1, after round {passed:g} of "
                f"{rounds:g}, got {found:g}"
            )
        return found

    def takes_back(self, rate: float, pull: float) -> float:
        """What part of a network's change until then a step undoes; see ``Optimizer.takes_back``."""
        return self._optimizer.takes_back(rate, pull)

    def new_optimizer(self, model: nn.Module, name: str) -> torch.optim.Optimizer:
        """The optimiser of the network called ``name``."""
        return self._optimizer.build(model.parameters(), self.rate(name))
