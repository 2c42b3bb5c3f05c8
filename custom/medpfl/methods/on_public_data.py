# SPDX-License-Identifier: Apache-2.0
"""What FedMD, DS-FL, FedDF and KT-pFL share: hospitals tell one another what their networks say about public data.

Networks may differ from hospital to hospital. Every hospital holds the same public data, declared in its site file
under one name; no label of them is used. What travels is the network's outputs on them, row by row.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.devices import moved
from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.data.target import Target
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.divergence import class_logits
from medpfl.models.split import output_shape
from medpfl.privacy.contract import Cover

PUBLIC = "public"
"""The slot."""


class PublicOutputs(nn.Module):
    """``values``: N x C x ..., of each public sample; a buffer, which no optimiser moves."""

    values: Tensor

    def __init__(self, *shape: int):
        super().__init__()
        self.register_buffer("values", torch.zeros(shape))


@dataclass(frozen=True, kw_only=True)
class OnPublicData(Method):
    """Slot "public": the outputs. Private, all of it: the network.

    Args:
        public: name of the dataset that every hospital declares alike.
        distill_epochs: passes over it a round, >= 1; with the optimiser of the local training.
    """

    public: str
    distill_epochs: int = 1

    deploys: ClassVar = {"personal": "model"}
    cover: ClassVar = Cover(
        update="what it sends is no change of weights, but what a network says of public data", derived=(PUBLIC,)
    )
    after_steps: ClassVar = ("personal",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill_epochs < 1:
            raise ConfigError(f"{type(self).__name__}'s distill_epochs must be at least 1, got {self.distill_epochs}")

    def batches(self, samples: int, public: int = 0) -> int:
        return max(self.distill_epochs * math.ceil(public / self.batch_size), super().batches(samples))

    def public_datasets(self) -> list[str]:
        return [self.public]

    def models(self, build: Build) -> dict[str, nn.Module]:
        build.only_for(type(self).__name__, Target.CLASS, Target.MASK)
        network = build.network()
        classes, *grid = output_shape(network, build.input_shape)
        rows = len(build.public.get(self.public, ()))  # none where a network is only looked at
        return {"model": network, PUBLIC: PublicOutputs(rows, max(2, classes), *grid)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {PUBLIC: under(models, PUBLIC)}

    def components(self) -> dict[str, Mixer]:
        return {PUBLIC: Mean(uniform=True)}

    @abstractmethod
    def told(self, logits: Tensor) -> Tensor:
        """What is sent of the logits, B x C x ..."""

    @abstractmethod
    def lesson(self, heard: Tensor, logits: Tensor) -> Tensor:
        """Scalar loss of the network's logits, B x C x ..., given what the server sent, B x C x ..."""

    def local_round(self, site: Site) -> None:
        site.fit("model")
        self.tell(site)

    def after_mixing(self, site: Site) -> None:
        self.learn(site)

    def tell(self, site: Site) -> None:
        """Put into the slot what this hospital's network says, in evaluation mode."""
        network, slot = site.models["model"].eval(), site.models[PUBLIC]
        assert isinstance(slot, PublicOutputs)
        with torch.no_grad():
            for rows, inputs in _chunks(site, self.public):
                slot.values[rows] = self.told(class_logits(network(inputs)))

    def learn(self, site: Site) -> None:
        """Train the network on what the slot holds."""
        network, slot = site.models["model"].train(), site.models[PUBLIC]
        assert isinstance(slot, PublicOutputs)
        heard = slot.values.clone()
        loss = site.last_loss
        for rows, inputs in site.public_batches(self.public, self.distill_epochs):
            with site.autocast():
                logits = class_logits(network(inputs))
            site.step("model", self.lesson(heard[moved(rows, heard.device)], logits))
        site.last_loss = loss  # what is reported is the local training's


def _chunks(site: Site, name: str, size: int = 64) -> Iterator[tuple[slice, Tensor]]:
    inputs = site.public[name]
    for start in range(0, len(inputs), size):
        site.go_on()
        yield slice(start, start + size), moved(inputs[start : start + size], site.device)
