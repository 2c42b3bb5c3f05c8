# SPDX-License-Identifier: Apache-2.0
"""What every method is compared with: local training and FedAvg, on the same batches, seeds and initial weights.

They ride along in any job whose server lists the slots "local" and "fedavg" (leave them out to switch them off).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.mixers import Identity, Mixer
from medpfl.methods.base import Build, Method, Site


@dataclass(frozen=True, kw_only=True)
class Local(Method):
    """Training alone: nothing is exchanged (its server component is the identity, and the slot stays home)."""

    deploys: ClassVar = {"local": "local"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"local": build.network()}

    def components(self) -> dict[str, Mixer]:
        return {"local": Identity()}

    def local_round(self, site: Site) -> None:
        site.fit("local")


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """McMahan et al., 2017: train the common model, send it, receive the mean. Fine-tuning is a final phase."""

    deploys: ClassVar = {"fedavg": "fedavg"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"fedavg": build.network()}

    def local_round(self, site: Site) -> None:
        site.fit("fedavg")


REFERENCES: dict[str, type[Method]] = {"local": Local, "fedavg": FedAvg}


def like(name: str, method: Method) -> Method:
    """The reference ``name`` with the training settings (epochs, steps, lr, batch size, optimiser) of ``method``."""
    return REFERENCES[name](
        epochs=method.epochs,
        steps=method.steps,
        lr=method.lr,
        batch_size=method.batch_size,
        optimizer=method.optimizer,
    )
