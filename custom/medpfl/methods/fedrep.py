# SPDX-License-Identifier: Apache-2.0
"""FedRep: FedPer whose hospital first fits its head to the shared base, then the base to its head.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, Algorithm 1. What is frozen is in evaluation mode, so that its BatchNorm statistics do not move either.
Deviation: the base may take many steps a round; the paper's algorithm takes one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.core.frozen import training_only
from medpfl.core.groups import base_and_head, head_of
from medpfl.methods.contract import Batch, Build, Method, Site
from medpfl.methods.features import not_run
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FedRep(Method):
    """Slot "model" (mean): the base, its BatchNorm statistics included. Private: the head.

    Args:
        epochs, steps: of the base.
        head_epochs: passes over the local training data for the head, before those for the base, >= 1.
        head_steps: batches for the head instead of whole epochs, >= 1; None: ``head_epochs``.
        head: module path of the head inside the network, or paths of its parts; None: its last layer.
    """

    head_epochs: int = 1
    head_steps: int | None = None
    head: str | tuple[str, ...] | None = None

    deploys: ClassVar = {"personal": "model"}
    cover: ClassVar = Cover()
    passes: ClassVar = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_epochs < 1:
            raise ConfigError(f"FedRep's head_epochs must be at least 1, got {self.head_epochs}")
        if self.head_steps is not None and self.head_steps < 1:
            raise ConfigError(f"FedRep's head_steps must be at least 1, got {self.head_steps}")

    def batches(self, samples: int, public: int = 0) -> int:
        head = self.head_steps or self.head_epochs * math.ceil(samples / self.batch_size)
        return max(head, super().batches(samples))

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        base, head = base_and_head(models, "model", self.head)
        if not {key for key, _ in models.named_parameters(remove_duplicate=False)}.intersection(head):
            raise ConfigError("FedRep trains the head by itself, and start's frozen leaves nothing of it to train")
        return {"model": base}

    def local_round(self, site: Site) -> None:
        self._train(site, True, site.training_batches(self.head_epochs, self.head_steps))
        self._train(site, False, site.training_batches())

    def _train(self, site: Site, train_head: bool, batches: Iterator[Batch]) -> None:
        network = site.models["model"]
        head = self.head or head_of(network)
        paths = [head] if isinstance(head, str) else head
        network.train(not train_head)
        for path in paths:
            network.get_submodule(path).train(train_head)
        inside = tuple(f"{path}." for path in paths)
        names = {name for name, _ in network.named_parameters() if name.startswith(inside) == train_head}
        with training_only(network, names):  # the optimiser passes over what has no gradient
            for batch in batches:
                with site.autocast():
                    loss = site.task.loss(network(batch.inputs), batch.targets)
                if train_head and not loss.requires_grad:
                    raise not_run(network, head, "name another one in FedRep's 'head'")
                site.step("model", loss)
