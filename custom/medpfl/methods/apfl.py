# SPDX-License-Identifier: Apache-2.0
"""APFL: a personal model that predicts mixed with the common one, in a proportion that every hospital learns.

Deng, Kamani, Mahdavi, "Adaptive Personalized Federated Learning", arXiv:2003.13461, 2020, Algorithm 1. With the mixed
model  m = alpha v + (1 - alpha) w,  a batch moves the common w down f(w), the personal v down f(m) (its gradient is
alpha grad f(m)), and  alpha  <-  alpha - alpha_lr <grad f(m), v - w>,  kept in [0, 1]; all at the values before.
BatchNorm's running statistics of the mixed model are the personal network's, gathered while the mixture is trained.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import Mean, Mixer
from medpfl.core.tied import call_with, load_own_state, own_state
from medpfl.data.samples import Samples
from medpfl.methods.contract import Build, Method, Site
from medpfl.privacy.contract import Cover


class Share(nn.Module):
    """One number in [0, 1]."""

    def __init__(self, value: float):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))


@dataclass(frozen=True, kw_only=True)
class APFL(Method):
    """Slot "global" (mean): the common network, trained as in FedAvg. Private: the personal network, alpha, and
    their mixture, which predicts.

    Args:
        alpha: the personal network's share at the start, in [0, 1].
        alpha_lr: step size of alpha, >= 0. 0 keeps it as it is.
    """

    alpha: float = 0.5
    alpha_lr: float = 0.01

    deploys: ClassVar = {"personal": "mixed", "global": "global"}
    cover: ClassVar = Cover(at_home=("personal", "mixed", "alpha"))
    diagnoses: ClassVar = ("alpha",)

    excludes: ClassVar = {"fp16": "alpha steps down its gradient as it is, which fp16 scales; take bf16"}

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.alpha <= 1:
            raise ConfigError(f"APFL's alpha must be in [0, 1], got {self.alpha}")
        if self.alpha_lr < 0:
            raise ConfigError(f"APFL's alpha_lr must be at least 0, got {self.alpha_lr}")

    def models(self, build: Build) -> dict[str, nn.Module]:
        networks = {name: build.network() for name in ("global", "personal", "mixed")}
        return {**networks, "alpha": Share(self.alpha)}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"global": under(models, "global")}

    def components(self) -> dict[str, Mixer]:
        return {"global": Mean()}

    def local_round(self, site: Site) -> None:
        site.models.train()
        alpha: nn.Parameter = site.models["alpha"].get_parameter("value")
        alpha.grad = None
        loss = torch.tensor(float("nan"))
        for batch in site.training_batches():
            mixed = self._mixed(site.models)
            with site.autocast():
                outputs = call_with(site.models["personal"], mixed, batch.inputs)
                loss = site.task.loss(outputs, batch.targets)
                common = site.task.loss(site.models["global"](batch.inputs), batch.targets)
            if site.step("personal", loss) and alpha.grad is not None:  # its gradient reaches alpha too
                alpha.data.sub_(self.alpha_lr * alpha.grad).clamp_(0, 1)
                alpha.grad = None
            site.step("global", common)
        site.last_loss = loss  # the personal model's is the one that is reported

    def after_mixing(self, site: Site) -> None:
        """The mixture as a network of its own, so that it is evaluated and exported like any other."""
        state = {**own_state(site.models["personal"]), **self._mixed(site.models)}
        load_own_state(site.models["mixed"], state)

    def _mixed(self, models: nn.ModuleDict) -> dict[str, Tensor]:
        alpha = models["alpha"].get_parameter("value")
        common = dict(models["global"].named_parameters())
        personal = models["personal"].named_parameters()
        return {key: alpha * own + (1 - alpha) * common[key].detach() for key, own in personal if own.requires_grad}

    def diagnose(self, models: nn.ModuleDict, samples: Samples, index: int, device: torch.device) -> dict[str, float]:
        """The learned alpha."""
        return {"alpha": float(models["alpha"].get_parameter("value").detach())}
