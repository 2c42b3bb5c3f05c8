# SPDX-License-Identifier: Apache-2.0
"""MH-pFLID: hospitals with different networks learn from one another through a light messenger.

Xie et al., "MH-pFLID: Model Heterogeneous Personalized Federated Learning via Injection and Distillation for Medical
Data Analysis", ICML 2024. A round: knowledge injection (Eq. 2: the local model and the receiver learn, the messenger is
frozen), knowledge distillation (Eq. 5: the messenger and the transmitter learn, the local model is frozen); the server
averages the messengers. Deviations: Eq. (15) is not the KL divergence that the text names, its gradient does not even
depend on the local model; here it is KL(local || messenger). Attention runs over the positions of one sample's map.
"""

import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.frozen import training_only
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.data.samples import Samples
from medpfl.data.target import Target
from medpfl.methods.contract import Batch, Build, Method, Site
from medpfl.methods.divergence import class_logits, divergence
from medpfl.models.messenger import Messenger
from medpfl.models.split import body_shape, find_body, output_shape, watched
from medpfl.models.token_attention import Addition, TokenAttention
from medpfl.privacy.contract import Cover

DEFAULT = "default"
"""In place of a hospital's name: all that are not named."""


@dataclass(frozen=True, kw_only=True)
class MHpFLID(Method):
    """Slot "messenger" (mean). Private: the local network, the receiver and the transmitter; the local network alone
    predicts. Networks may differ from hospital to hospital (``medpfl.models.by_hospital.ByHospital``).

    Args:
        epochs: of the injection; local models train as long as in local training with the same ``epochs``.
        lr: learning rate of the injection, > 0.
        distill_epochs: passes over the data in the distillation, >= 1.
        distill_lr: learning rate of the distillation, > 0.
        inject_messenger: weight of the messenger's loss in Eq. (2), in [0, 1]; the local loss has the rest.
        distill_local: weight of the KL term in Eq. (5), in [0, 1]; the labels' loss has the rest.
        warm_up: rounds in which the messenger learns, but no hospital listens (weight 0 in Eq. 2). A variant of ours.
        shared: what of the messenger is averaged; the rest stays home (Table 6).
        receiver: attention, or plain addition (Table 6).
        transmitter: attention, or plain addition (Table 6).
        bodies: hospital (or "default") to the path of the module that ends its network's body; others are found by a
            trial run.
    """

    epochs: int = 4
    lr: float = 1e-4
    distill_epochs: int = 1
    distill_lr: float = 1e-5
    inject_messenger: float = 0.1
    distill_local: float = 0.1
    warm_up: int = 0
    shared: Literal["all", "body", "head"] = "all"
    receiver: Literal["attention", "add"] = "attention"
    transmitter: Literal["attention", "add"] = "attention"
    bodies: dict[str, str] = field(default_factory=dict)

    deploys: ClassVar = {"personal": "local_network"}
    cover: ClassVar = Cover(
        record="its messenger has BatchNorm, which mixes the cases of a batch",
        update="its messenger has BatchNorm, whose statistics it sends",
    )
    after_steps: ClassVar = ("personal",)
    diagnoses: ClassVar = ("receiver_correlation", "transmitter_correlation")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill_epochs < 1:
            raise ConfigError(f"MHpFLID's distill_epochs must be at least 1, got {self.distill_epochs}")
        if self.warm_up < 0:
            raise ConfigError(f"MHpFLID's warm_up must be at least 0, got {self.warm_up}")
        if self.distill_lr <= 0:
            raise ConfigError(f"MHpFLID's distill_lr must be above 0, got {self.distill_lr}")
        for name in ("inject_messenger", "distill_local"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"MHpFLID's {name} must be in [0, 1], got {getattr(self, name)}")

    @property
    def named_hospitals(self) -> Collection[str]:
        return self.bodies.keys() - {DEFAULT}

    def models(self, build: Build) -> dict[str, nn.Module]:
        build.only_for("MHpFLID", Target.CLASS, Target.MASK)
        network, shape = build.network(), build.input_shape
        local = body_shape(network, self._body_of(network, build.site, shape), shape)
        outputs = output_shape(network, shape)
        # Only the messenger must start alike everywhere; its seed is its own, whatever the local network draws.
        messenger = build.seeded(lambda: Messenger(shape, outputs[0], dense=len(outputs) > 1))
        grid = output_shape(messenger.get_submodule("body"), shape)
        if math.prod(grid[1:]) == 1:  # attention over one position is a constant: the receiver would hear nothing
            raise ConfigError(f"MHpFLID's messenger needs larger inputs: of {shape} its map keeps a single position")
        parts = {
            "receiver": build.seeded(lambda: _exchange(self.receiver, local[0], grid[0], "messenger")),
            "transmitter": build.seeded(lambda: _exchange(self.transmitter, local[0], grid[0], "local")),
        }
        return {"local_network": network, "messenger": messenger, **parts}

    def _body_of(self, network: nn.Module, site: str, shape: tuple[int, ...]) -> str:
        return self.bodies.get(site, self.bodies.get(DEFAULT)) or find_body(network, shape)

    def at(self, site: str) -> Method:
        """With this hospital's body alone: what it deploys does not name the others."""
        mine = self.bodies.get(site, self.bodies.get(DEFAULT))
        return replace(self, bodies={DEFAULT: mine} if mine else {})

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        path = "messenger" if self.shared == "all" else f"messenger.{self.shared}"
        return {"messenger": under(models, path)}

    def components(self) -> dict[str, Mixer]:
        return {"messenger": Mean()}

    def rate(self, name: str) -> float:
        return self.distill_lr if name in ("messenger", "transmitter") else self.lr

    @property
    def _distill_steps(self) -> int | None:
        if self.steps is None:
            return None
        return max(1, round(Fraction(self.steps * self.distill_epochs, self.epochs)))  # of any size

    def batches(self, samples: int, public: int = 0) -> int:
        distilled = self._distill_steps or self.distill_epochs * math.ceil(samples / self.batch_size)
        return max(distilled, super().batches(samples))

    def local_round(self, site: Site) -> None:
        for batch in site.training_batches():
            self._inject(site, batch)
            injected = batch
        loss = site.last_loss
        steps = self._distill_steps
        for batch in site.training_batches(None if steps else self.distill_epochs, steps):
            self._distill(site, batch)
        site.turn_to(injected)
        site.last_loss = loss  # the local model's is the one that is reported, and of so many cases

    def _inject(self, site: Site, batch: Batch) -> None:
        """Eq. (2)."""
        local, messenger = self._networks(site)
        receiver = site.models["receiver"]
        local.network.train()
        receiver.train()
        weight = 0.0 if site.round <= self.warm_up else self.inject_messenger
        with _frozen(messenger):
            with site.autocast():
                outputs, mine = local.with_features(batch.inputs)
                own = site.task.loss(outputs, batch.targets)
                with torch.no_grad():
                    theirs = messenger.body(batch.inputs)
                guided = site.task.loss(messenger.head(receiver(mine, theirs)), batch.targets)
            site.step("local_network", (1 - weight) * own + weight * guided, "receiver")
        site.last_loss = own

    def _distill(self, site: Site, batch: Batch) -> None:
        """Eq. (5), with KL(local || messenger) for its second term."""
        local, messenger = self._networks(site)
        transmitter = site.models["transmitter"]
        messenger.train()
        transmitter.train()
        weight = self.distill_local
        with _frozen(local.network):
            with site.autocast():
                with torch.no_grad():
                    teacher, mine = local.with_features(batch.inputs)
                outputs = messenger.head(transmitter(mine, messenger.body(batch.inputs)))
                learnt = site.task.loss(outputs, batch.targets)
            loss = (1 - weight) * learnt + weight * divergence(
                class_logits(teacher).softmax(dim=1), class_logits(outputs)
            )
            site.step("messenger", loss, "transmitter")

    def _networks(self, site: Site) -> "tuple[Watched, Messenger]":
        network, messenger = site.models["local_network"], site.models["messenger"]
        assert isinstance(messenger, Messenger)
        shape = site.data.input_shape
        body = site.keep("where the body ends", lambda: self._body_of(network, site.name, shape))
        return Watched(network, body), messenger

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """How far the receiver's and the transmitter's bases are from orthogonal (Table 8, our definition)."""
        parts = {name: models[name] for name in ("receiver", "transmitter")}
        return {f"{n}_correlation": part.correlation() for n, part in parts.items() if isinstance(part, TokenAttention)}


@dataclass(frozen=True)
class Watched:
    """The hospital's own network, and the path of the module that ends its body."""

    network: nn.Module
    body: str

    def with_features(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """L_h(L_b(x)) and L_b(x), from one pass."""
        with watched(self.network, self.body, torch.clone) as seen:
            outputs: Tensor = self.network(inputs)
        return outputs, seen[-1]


def _exchange(kind: str, local: int, width: int, queries: str) -> nn.Module:
    return TokenAttention(local, width, queries) if kind == "attention" else Addition(local, width)


@contextmanager
def _frozen(network: nn.Module) -> Iterator[None]:
    """Evaluation mode (running statistics stand still) and no gradients of its own; they still flow through it."""
    network.eval()
    with training_only(network):
        yield
