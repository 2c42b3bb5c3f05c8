# SPDX-License-Identifier: Apache-2.0
"""FedRoD: a generic head learned with a class-balanced loss, and a personal head on the same features beside it.

Chen and Chao, "On Bridging Generic and Personalized Federated Learning for Image Classification", ICLR 2022: balanced
softmax for the generic head, a linear personal head. Its hypernetwork variant is not here.
"""

import copy
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from medpfl.core.copied import computed_of
from medpfl.core.errors import ConfigError
from medpfl.core.groups import head_of, name_of, under
from medpfl.core.mixers import Mean, Mixer
from medpfl.data.target import Target
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.divergence import largest
from medpfl.methods.features import DEFINE, check_head, with_features
from medpfl.models.outputs import check_outputs
from medpfl.privacy.contract import Cover


def balanced_loss(outputs: Tensor, targets: Tensor, prior: Tensor) -> Tensor:
    """Cross-entropy of softmax(outputs + log prior). A class that the hospital lacks (prior 0) is left out.

    One output is the difference of two classes' outputs, so that it stands for the pair (0, output).
    """
    logits = outputs.float()
    if logits.shape[1] == 1:
        logits = torch.cat([torch.zeros_like(logits), logits], dim=1)
    return nn.functional.cross_entropy(logits + prior.log(), targets)


@dataclass(frozen=True, kw_only=True)
class FedRoD(Method):
    """Slot "generic" (mean). Private: "head", zero at first, so that the personal model starts as the generic one.

    Args:
        gamma: exponent of the class prior of what training draws, >= 0; 1 is the balanced softmax, 0 plain
            cross-entropy.
    """

    gamma: float = 1.0

    deploys: ClassVar = {"personal": "head", "generic": "generic"}
    cover: ClassVar = Cover(record="its loss goes by the hospital's own numbers of cases of each class")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma < 0:
            raise ConfigError(f"FedRoD's gamma must be at least 0, got {self.gamma}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        build.only_for("FedRoD", Target.CLASS)
        network = build.network()
        last = network.get_submodule(head_of(network))
        if is_parametrized(last) or computed_of(last):
            raise ConfigError(
                "FedRoD begins a head beside the network's own with zero, which the weights of its last layer cannot be"
                ": they are normalised, or computed otherwise (torch.nn.utils)"
            )
        head = copy.deepcopy(last)
        if next(head.parameters(), None) is None:
            raise ConfigError("FedRoD trains a head beside the network's own, which start's frozen must leave to train")
        for weight in head.parameters():
            if weight.requires_grad:  # what the network holds fixed, a scale say, is no weight
                nn.init.zeros_(weight)
        return {"generic": network, "head": head}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"generic": under(models, "generic")}

    def components(self) -> dict[str, Mixer]:
        return {"generic": Mean()}

    def local_round(self, site: Site) -> None:
        check_head(site, site.models["generic"], None, DEFINE)
        generic, head = site.models["generic"].train(), site.models["head"].train()
        train = site.data.splits["train"]
        targets = train.targets[:].long()
        # Of what training draws: where it draws all classes alike, there is nothing left to balance.
        drawn = [targets[rows] for rows in site.task.strata(train)]
        shares = torch.stack([torch.bincount(one, minlength=train.classes) / len(one) for one in drawn]).mean(dim=0)
        prior = torch.where(shares > 0, shares**self.gamma, 0.0).to(site.device)
        for batch in site.training_batches():
            with site.autocast():
                found, features = with_features(generic, batch.inputs)
                outputs = largest(found)
                # Nothing of the personal loss reaches the generic network.
                together = _together(generic, outputs.detach(), head(features.detach()))
                personal_loss = site.task.loss(together, batch.targets)
            site.step("generic", balanced_loss(outputs, batch.targets, prior))
            site.step("head", personal_loss)

    def predict(self, name: str, models: nn.ModuleDict, inputs: Tensor) -> Tensor:
        outputs, features = with_features(models["generic"], inputs)
        return outputs if name == "generic" else _together(models["generic"], outputs, models["head"](features))


def _together(network: nn.Module, outputs: Tensor, own: Tensor) -> Tensor:
    """The personal model's outputs: the sum of both heads'.

    Raises:
        ConfigError: the network makes something else of what its head gives, a mean over a map say.
    """
    check_outputs(outputs)
    if outputs.shape != own.shape:
        raise ConfigError(
            f"FedRoD adds what a second head gives to what the network gives, and the head of the network "
            f"{name_of(network)}, '{head_of(network)}', gives {list(own.shape[1:])} of a case where the network gives "
            f"{list(outputs.shape[1:])}: its last layer must give its outputs (of a map, average the features before)"
        )
    return outputs + own
