# SPDX-License-Identifier: Apache-2.0
"""pFedMe: personal models near the common one, which moves towards them (the gradient of a Moreau envelope).

T. Dinh, Tran, Nguyen, "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020, Algorithm 1. For every
batch, ``inner_steps`` steps lower  f(theta) + lam/2 ||theta - w||^2,  then  w  <-  w - outer_lr lam (w - theta).
The server's step with beta is its component ``medpfl.core.mixers.RelaxedMean``. theta starts every round at the w
received. w itself is never run in training: its BatchNorm statistics are theta's.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from medpfl.core.errors import ConfigError
from medpfl.core.groups import under
from medpfl.core.mixers import Mixer, RelaxedMean
from medpfl.methods.contract import Build, Method, Site
from medpfl.methods.proximal import Proximal
from medpfl.privacy.contract import Cover


@dataclass(frozen=True, kw_only=True)
class PFedMe(Method):
    """Slot "global" (RelaxedMean): the common network w. Private: the personal network theta.

    Args:
        lr: of the inner steps.
        lam: strength of the pull between theta and w, > 0.
        inner_steps: steps of theta a batch, >= 1: a round takes so many times the steps of FedAvg.
        outer_lr: step size of w, > 0, with outer_lr lam at most 1 (where w becomes theta).
    """

    lam: float = 15.0
    inner_steps: int = 5
    outer_lr: float = 0.01

    deploys: ClassVar = {"personal": "personal", "global": "global"}
    cover: ClassVar = Cover(record="it takes several steps on every batch")
    after_steps: ClassVar = ("personal",)
    excludes: ClassVar = {
        "accumulate": "its inner steps solve the problem of one batch, and w moves after each; take a larger batch_size"
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam <= 0:
            raise ConfigError(f"PFedMe's lam must be above 0, got {self.lam}")
        if self.inner_steps < 1:
            raise ConfigError(f"PFedMe's inner_steps must be at least 1, got {self.inner_steps}")
        if not 0 < self.outer_lr * self.lam <= 1 + 1e-9:
            raise ConfigError(f"PFedMe's outer_lr must be above 0 and at most 1/lam, got {self.outer_lr}")

    def batches(self, samples: int, public: int = 0) -> int:
        return self.inner_steps * super().batches(samples)

    def models(self, build: Build) -> dict[str, nn.Module]:
        return {"global": build.network(), "personal": build.network()}

    def slots(self, models: nn.ModuleDict) -> dict[str, list[str]]:
        return {"global": under(models, "global")}

    def components(self) -> dict[str, Mixer]:
        return {"global": RelaxedMean()}

    def local_round(self, site: Site) -> None:
        common, personal = site.models["global"], site.models["personal"]
        personal.load_state_dict(common.state_dict())
        personal.train()
        for batch in site.training_batches():
            pull = Proximal(personal, self.lam, anchor=common)
            for _ in range(self.inner_steps):
                with site.autocast():
                    loss = site.task.loss(personal(batch.inputs), batch.targets)
                site.step("personal", loss, term=pull)
            with torch.no_grad():
                for weight, theta in zip(common.parameters(), personal.parameters(), strict=True):
                    if weight.requires_grad:
                        weight.lerp_(theta, self.outer_lr * self.lam)
        for buffer, own in zip(common.buffers(), personal.buffers(), strict=True):
            buffer.copy_(own)
