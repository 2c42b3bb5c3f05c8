# SPDX-License-Identifier: Apache-2.0
"""FedAvg: one common model, the mean of what the hospitals trained.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from Decentralized
Data", AISTATS 2017, Algorithm 1, with every hospital in every round (C = 1).
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.methods.contract import Build, Method, Site
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class FedAvg(Method):
    """Slot "fedavg" (mean): the whole network. Private: the optimiser's state, and the network as it was sent.

    The latter is the common model after a hospital's own steps of the round: fine-tuning that costs nothing more.

    The paper's E is ``epochs``, its B ``batch_size``, its eta ``lr``; its ClientUpdate is "sgd".
    """

    deploys: ClassVar = {"fedavg": "fedavg", "fedavg_before_mean": "fedavg_before_mean"}
    cover: ClassVar = Cover()
    after_steps: ClassVar = ("fedavg_before_mean",)
    fine_tuned: ClassVar = "fedavg"

    def models(self, build: Build) -> dict[str, nn.Module]:
        """Trained: the task's network, which starts as the same w_0 everywhere."""
        return {"fedavg": build.network(), "fedavg_before_mean": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        """Sent: all its tensors, BatchNorm's running statistics included."""
        return {"fedavg": under(models, "fedavg")}

    def components(self) -> dict[str, Mixer]:
        """Averaged: w_{t+1} = sum_k n_k / n w_k, with n_k the training samples of hospital k."""
        return {"fedavg": Mean()}

    def local_round(self, site: Site) -> None:
        """ClientUpdate(k, w): E epochs of gradient steps on the local batches, from the w that the server sent."""
        site.fit("fedavg")
        site.models["fedavg_before_mean"].load_state_dict(site.models["fedavg"].state_dict())
