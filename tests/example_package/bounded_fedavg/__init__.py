# SPDX-License-Identifier: Apache-2.0
"""A method from somebody else's package: FedAvg whose hospitals move at most a given distance a round."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.methods.contract import Build, Method, Site


@dataclass(frozen=True, kw_only=True)
class BoundedFedAvg(Method):
    """Args: bound: largest Euclidean length of a hospital's change of the weights in a round, > 0."""

    bound: float = 1.0

    deploys: ClassVar = {"common": "model"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.bound > 0:
            raise ConfigError(f"BoundedFedAvg's bound must be above 0, got {self.bound}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network()}

    def local_round(self, site: Site) -> None:
        weights = list(site.models["model"].parameters())
        before = [weight.detach().clone() for weight in weights]
        site.fit("model")
        with torch.no_grad():
            length = torch.cat([(w - b).flatten() for w, b in zip(weights, before, strict=True)]).norm()
            for weight, start in zip(weights, before, strict=True):
                weight.copy_(start + (weight - start) * min(1.0, self.bound / float(length)))


@dataclass(frozen=True, kw_only=True)
class OtherStart(BoundedFedAvg):
    """Starts from weights of its own: a comparison with it would not be fair."""

    def models(self, build: Build) -> dict[str, nn.Module]:
        network = build.network()
        with torch.no_grad():
            next(network.parameters()).add_(0.1)
        return {"model": network}


@dataclass(frozen=True, kw_only=True)
class Broken(BoundedFedAvg):
    """Has a mistake in its code, as a method under development may."""

    def local_round(self, site: Site) -> None:
        site.models["modle"].train()
