# SPDX-License-Identifier: Apache-2.0
"""A study's method: Adam's moments travel with the weights and are mixed by the same matrix.

With the mean it is FedAvg, with ``SoftPull`` it is SoftPull, each with moments that fit the mixed weights. Three times
as much leaves a hospital. It is no method of the package: docs/results/optimizer-state.md says what came of it.
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.groups import under
from medpfl.methods.base import Build, Method, Site
from medpfl.methods.fedsm.selecting import Moments


@dataclass(frozen=True, kw_only=True)
class TravellingMoments(Method):
    """Slot "model": the network and its optimiser's moments. Nothing is private."""

    deploys: ClassVar = {"personal": "model"}

    def models(self, build: Build) -> dict[str, nn.Module]:
        network = build.network()
        return {"model": network, "moments": Moments(network)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"model": [*under(models, "model"), *under(models, "moments")]}

    def local_round(self, site: Site) -> None:
        network, moments, optimizer = site.models["model"], site.models["moments"], site._optimizer("model")
        kept = {"step": "step", "exp_avg": "mean", "exp_avg_sq": "square"}  # torch's names to ours
        if moments.get_buffer("step") > 0:
            for key, weight in network.named_parameters():
                optimizer.state[weight] = {
                    name: moments.get_buffer(ours if ours == "step" else Moments._name(ours, key)).clone()
                    for name, ours in kept.items()
                }
        site.fit("model")
        for key, weight in network.named_parameters():
            for name, ours in kept.items():
                buffer = moments.get_buffer(ours if ours == "step" else Moments._name(ours, key))
                buffer.copy_(optimizer.state[weight][name])
