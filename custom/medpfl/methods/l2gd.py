# SPDX-License-Identifier: Apache-2.0
"""L2GD: by the toss of a coin, either all hospitals train or all move towards their mean.

Hanzely and Richtarik, "Federated Learning of a Mixture of Global and Local Models", 2020, Algorithm 1, with one local
round in place of one gradient step (``steps=1`` is the paper's, with a mini-batch).
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import NoDefault
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.optimizers import Optimizer
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class L2GD(Method):
    """Slot "mixed" (``SoftPull``): the model up, the model moved towards the mean down. Private: the model itself.

    The server mixes in every round and the hospitals take the result up in rounds of heads only, so that the coin and
    p are needed in one place. The move (1 - c) w + c mean is ``SoftPull`` with lam = 1 - c (K - 1) / K. The paper's c
    is lr lambda / p, with lr its alpha / n.

    Args:
        p: probability of moving instead of training, in [0, 1); 0 is local training.
    """

    p: float = 0.1
    optimizer: Literal["adam", "sgd"] | Optimizer = "sgd"

    deploys: ClassVar = {"personal": "model"}
    cover: ClassVar = Cover(record="its gradients are scaled by 1 / (1 - p), which clipping each case's would undo")
    after_steps: ClassVar = ("personal",)
    excludes: ClassVar = {
        "adam": "its gradients are scaled by 1 / (1 - p), which Adam would undo; take 'sgd'",
        "clip_gradient": "its gradients are scaled by 1 / (1 - p), which a limit of their length would undo",
        "schedule": "its c is lr lambda / p, so that a falling lr beside the same c would change lambda",
        "weight_decay": "the decay would not be scaled by 1 / (1 - p) as the gradients are",
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.p < 1:
            raise ConfigError(f"L2GD's p must be in [0, 1), got {self.p}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"model": build.network(), "mixed": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"mixed": under(models, "mixed")}

    def components(self) -> dict[str, NoDefault]:
        return {"mixed": NoDefault("name SoftPull with lam = 1 - c (K - 1) / K")}

    @property
    def anew(self) -> tuple[str, ...]:
        return ("mixed",)

    def local_round(self, site: Site) -> None:
        network = site.models["model"].train()
        if site.common_draw("l2gd") < self.p:
            network.load_state_dict(site.models["mixed"].state_dict())
        else:
            for batch in site.training_batches():
                with site.autocast():
                    loss = site.task.loss(network(batch.inputs), batch.targets)
                site.step("model", loss / (1 - self.p))
                site.last_loss = loss  # comparable with other methods'
        site.outbox["mixed"] = {f"mixed.{key}": tensor for key, tensor in network.state_dict().items()}
