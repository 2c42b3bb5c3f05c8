# SPDX-License-Identifier: Apache-2.0
"""IFCA: several common models; every hospital trains the one that fits its data best.

Ghosh et al., "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, Algorithm 1, model averaging.
"""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.devices import moved
from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import ClusterMean, Mixer
from medpfl.core.mixers.cluster_mean import CHOSEN
from medpfl.methods.contract import Build, Method, Site
from medpfl.privacy.contract import Cover


class Flags(nn.Module):
    """1 for the model that was chosen, 0 for the others. They are integers: codecs and limits of updates, which would
    make other numbers of them, leave those as they are."""

    def __init__(self, clusters: int):
        super().__init__()
        for index in range(clusters):
            self.register_buffer(str(index), torch.zeros((), dtype=torch.int64))


@dataclass(frozen=True, kw_only=True)
class IFCA(Method):
    """Slots "cluster0", "cluster1", ... (``ClusterMean``), each a model and one value, 1 from those who chose it.
    Models not chosen go back as they came. Private: the hospital's last choice, with which it predicts; before it has
    trained, the first model.

    Args:
        clusters: number of models, >= 1; 1 is FedAvg. Their initial weights differ, else all would choose the first.
    """

    clusters: int = 2

    deploys: ClassVar = {"personal": "choice"}
    cover: ClassVar = Cover(
        record="which model a hospital trains goes by their losses on its cases, and is told without noise",
        update="it tells which model it has trained, which cannot be told with noise",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.clusters < 1:
            raise ConfigError(f"IFCA's clusters must be at least 1, got {self.clusters}")
        if self.start:
            raise ConfigError(
                "IFCA takes no start weights: its models must begin differently, else all choose the first"
            )

    def models(self, build: Build) -> dict[str, nn.Module]:
        networks = build.seeded(lambda: nn.ModuleList(build.task.network(build.data) for _ in range(self.clusters)))
        found: dict[str, nn.Module] = {f"cluster{index}": network for index, network in enumerate(networks.children())}
        return {**found, CHOSEN: Flags(self.clusters), "choice": Flags(self.clusters)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {f"cluster{i}": [*under(models, f"cluster{i}"), f"{CHOSEN}.{i}"] for i in range(self.clusters)}

    def components(self) -> dict[str, Mixer]:
        return {f"cluster{i}": ClusterMean() for i in range(self.clusters)}

    def local_round(self, site: Site) -> None:
        losses = [_training_loss(site, site.models[f"cluster{index}"]) for index in range(self.clusters)]
        # A model that diverged has no number for a loss, and nothing is smaller than that.
        best = min(range(self.clusters), key=lambda index: (math.isnan(losses[index]), losses[index]))
        for name in (CHOSEN, "choice"):
            for index, flag in enumerate(site.models[name].buffers()):
                flag.fill_(index == best)
        site.fit(f"cluster{best}")

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        best = int(torch.stack(list(models["choice"].buffers())).argmax())
        outputs: Tensor = models[f"cluster{best}"](inputs)
        return outputs


def _training_loss(site: Site, network: nn.Module) -> float:
    """Mean task loss over the training split, in evaluation mode."""
    samples, losses, sizes = site.data.splits["train"], [], []
    size = samples.together(64)
    network.eval()
    with torch.no_grad(), site.autocast():
        for start in range(0, len(samples), size):
            inputs, targets = samples.inputs[start : start + size], samples.targets[start : start + size]
            losses.append(site.task.loss(network(moved(inputs, site.device)), moved(targets, site.device)))
            sizes.append(len(inputs))
    found: list[float] = torch.stack(losses).tolist()  # read once: the processor waits for the GPU here
    return sum(loss * count for loss, count in zip(found, sizes, strict=True)) / len(samples)
